"""`ctl rehearse` by itself: over a real sshd, with a model cut from the demo's Kimi on two ranks."""

from __future__ import annotations

import json

import pytest

from .conftest import Project


@pytest.mark.engine
def test_a_rehearsal_alone_says_what_it_proved_and_what_not_and_leaves_no_output(project: Project) -> None:
    name = project.playbook("rehearsed", ('path = "output/demo"', 'path = "output/rehearsed"'))
    document = project.json("rehearse", "--host", "demo", "--playbook", name)
    assert (document["kind"], document["end_reason"], document["gpus_clean"]) == ("rehearse", "succeeded", True)
    rehearsal = document["rehearsal"]
    assert (rehearsal["weights"], rehearsal["layers"], rehearsal["boundaries"]) == ("cut", [0, 1, 2], [1, 2, 3])
    assert {"loader", "values", "boundary identity", "sample format"} <= set(rehearsal["proven"])
    assert rehearsal["not_proven"] == ["memory at full depth", "the tensors of the other layers"]
    figures = rehearsal["canary"]["figures"]
    assert figures["identity"] >= 0.99
    assert figures["logits"] == 1.0
    assert max(figures["boundary"].values()) <= 1e-5
    assert not (project.workdir / "output" / "rehearsed").exists()
    # What the next extraction on this host with this payload need not try again.
    (remembered,) = (project.workdir / "rehearsals").iterdir()
    assert json.loads(remembered.read_text())["run_id"] == document["run_id"]
