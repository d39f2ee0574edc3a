"""The plan of `ctl hosts fetch-model`: where a model goes, what is downloaded, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.errors import RefusedError, UsageError
from controller.core.fetching import ModelWish, model_folder, parse_model, plan_download
from controller.core.model import Host

HOST = Host(
    name="gpu1", address="gpu1", python="/opt/vllm/bin/python", workdir="/ctl", output_roots=("/data/out",),
    accelerator="cpu",
)  # fmt: skip
WISH = ModelWish(repo="org/tiny", revision="v1", folder="/models/tiny")


def found(**folder: Any) -> dict[str, Any]:
    """What the host says: three files of a commit, and a folder that is absent unless fields say otherwise."""
    state: dict[str, Any] = {
        "path": "/models/tiny", "state": "absent", "holds": "", "complete": False, "proved": 0, "unproved": [],
        "differing": [], "missing": ["a", "b", "c"], "bytes_to_fetch": 1000, "partial_bytes": 0, "free": 10**9,
        **folder,
    }  # fmt: skip
    return {"commit": "c" * 40, "files": [{}] * 3, "bytes": 1000, "left_out": ["a.bin"], "folder": state}


def test_the_plan_names_the_commit_and_what_is_left_out() -> None:
    download = plan_download(HOST, WISH, found(partial_bytes=10, differing=["a"], unproved=["b"], proved=1))
    text = str(download.sections)
    for part in ("commit " + "c" * 40, "a.bin", "10 B are there of an earlier try", "a: of another size"):
        assert part in text
    assert [step["name"] for step in download.steps] == ["fetch", "verify"]
    for step in download.steps:
        assert step["argv"][0] == HOST.python
        assert step["argv"][step["argv"].index("--commit") + 1] == "c" * 40
    assert download.nothing is False
    assert download.facts["bytes_to_fetch"] == 1000
    assert plan_download(HOST, WISH, found(complete=True, state="ours", free=0)).nothing


@pytest.mark.parametrize(
    ("folder", "code"),
    [
        ({"state": "other", "holds": "org/tiny@" + "d" * 40}, "folder-other"),
        ({"state": "foreign"}, "folder-foreign"),
        ({"free": 1000}, "disk-space"),
    ],
)
def test_what_is_refused(folder: dict[str, Any], code: str) -> None:
    with pytest.raises(RefusedError) as refused:
        plan_download(HOST, WISH, found(**folder))
    assert refused.value.code == code
    assert refused.value.why
    assert refused.value.fix


def test_an_adopted_folder_is_not_refused() -> None:
    wish = ModelWish(repo="org/tiny", revision="v1", folder="/models/tiny", adopt=True)
    assert "--adopt" in plan_download(HOST, wish, found(state="foreign")).steps[0]["argv"]


@pytest.mark.parametrize(
    ("text", "model"),
    [("org/name@v1.0", ("org/name", "v1.0")), ("name", ("name", "main")), ("o/n@refs/pr/1", ("o/n", "refs/pr/1"))],
)
def test_a_model_and_its_revision(text: str, model: tuple[str, str]) -> None:
    assert parse_model(text) == model


@pytest.mark.parametrize(
    "text", ["", "@main", "a/b/c", "a/b@", "../x", "a/b@ main", "-a/b", "https://hub.example/a/b"]
)
def test_what_is_no_model(text: str) -> None:
    with pytest.raises(UsageError, match="is not a model"):
        parse_model(text)


def test_a_model_goes_below_the_workdir_unless_a_place_is_named() -> None:
    assert model_folder(HOST, "org/tiny", None) == "/ctl/models/org/tiny"
    assert model_folder(HOST, "org/tiny", "/models/x/") == "/models/x"
    for place in (
        "/ctl", "/ctl/runs/x", "/ctl/payload", "/ctl/data", "/ctl/files", "/data/out/model", "/data", "~/x", "../x",
        "/",
    ):  # fmt: skip
        with pytest.raises(UsageError):
            model_folder(HOST, "org/tiny", place)
