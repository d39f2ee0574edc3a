"""What the summary of a run says in a terminal."""

from __future__ import annotations

from support.printed import SUMMARY, Paper
from support.recorded import RUN

from controller.ui.summaryrows import summary_rows
from controller.ui.tables import print_summary


def test_a_summary_shows_the_proof() -> None:
    paper = Paper()
    print_summary(paper.console, SUMMARY)
    head = f"✗ run {RUN} on gpu-host-1: ended, but its output is not what"
    assert paper.lines[0].startswith(head)
    assert "990 of 1,000 written, 2 skipped, 1 failed, 7 missing" in paper.text
    assert "730,000 tokens, 41.0 GiB; 5,371 tokens/s, 286 MiB/s" in paper.text
    assert "tokens x 4 x 7168, bfloat16, speculators" in paper.text
    assert "push 0.5 s, load 8 min 32 s" in paper.text
    assert "not known whether the host is clean" in paper.text
    (row,) = [line for line in paper.lines if line.startswith("  61")]
    assert row.split() == ["61", "-", "1880", "3", "0", "0"]


def test_a_summary_says_what_was_proved_about_the_states() -> None:
    paper = Paper()
    rehearsal = {"layers": [0, 1, 2], "weights": "cut", "not_proven": ["memory at full depth"]}
    note = "no prompt could be cut"
    canary = {"enabled": True, **{when: {"figures": {}, "notes": [note]} for when in ("start", "end")}}
    print_summary(paper.console, {**SUMMARY, "rehearsal": rehearsal, "canary": canary, "repairs": ["cpu-rotary"]})
    assert "layers 0 1 2 with cut weights; not proven: memory at full depth" in paper.text
    assert f"passed at the start and the end; {note}" in paper.text
    assert paper.text.count(note) == 1
    assert "cpu-rotary" in paper.text
    off = Paper()
    print_summary(off.console, {**SUMMARY, "canary": {"enabled": False}})
    assert "switched off: nothing proves" in off.text


def test_a_summary_says_where_the_last_state_is_taken() -> None:
    """Whoever trains applies the final norm, or must not."""

    def shape(**more: object) -> str:
        return dict(summary_rows({**SUMMARY, "boundaries": [2, 30, 58, 61], "num_layers": 61, **more}))["shape"].plain

    plain = "tokens x 4 x 7168, bfloat16, speculators"
    assert shape(final_norm=True) == f"{plain}; the last state after the final norm"
    assert shape(final_norm=False) == f"{plain}; the last state before the final norm"
    assert shape(final_norm=False, boundaries=[2, 30]) == plain, "the model's last state is none of them"
    assert shape() == plain, "of a run of an earlier version"


def test_the_time_is_the_whole_and_its_parts() -> None:
    paper = Paper()
    timings = {
        "push_s": 0.2, "preflight_s": 3.3, "load_s": 48.0, "extract_s": 1.8, "rehearse_s": 0.4, "verify_s": 0.4,
        "probe_s": 22.0, "canary_s": 13.0, "data_s": 0.02, "shutdown_s": 10.0, "host_s": 100.0,
    }  # fmt: skip
    print_summary(paper.console, {**SUMMARY, "end_reason": "succeeded", "timings": timings})
    assert (
        "1 min 40 s on the host: load 48 s, probe 22 s, canary 13 s, extract 1.8 s, shutdown 10 s, verify 0.4 s, "
        "other 4.8 s; before the launch push 0.2 s, preflight 3.3 s"
    ) in " ".join(paper.text.split())
    command = Paper()
    print_summary(command.console, {**SUMMARY, "timings": {"push_s": 0.2, "host_s": 7.0}})
    assert "7.0 s on the host; before the launch push 0.2 s" in command.text


def test_a_summary_says_why_records_were_skipped_and_how_to_go_on() -> None:
    paper = Paper()
    print_summary(paper.console, {**SUMMARY, "kind": "extract", "skipped": {"not-json": 1, "no-text": 1}})
    assert "2 skipped (not-json 1, no-text 1)" in paper.text
    assert "`--stale resume` keeps what is written" in paper.text
    whole = Paper()
    timings = {"rehearse_s": 0.4, "load_s": 9.0}
    print_summary(whole.console, {**SUMMARY, "kind": "extract", "end_reason": "succeeded", "timings": timings})
    assert "--stale resume" not in whole.text
    assert "rehearse" not in whole.text, "nothing was rehearsed"


def test_an_end_in_mid_load_says_so_and_how_many_samples_there_are() -> None:
    stage = {"step": "extract", "phase": "load", "seconds": 192.0}
    samples = {"expected": 200, "written": 0, "skipped": 0, "failed": 0, "missing": 200}
    stopped = {"kind": "extract", "run_id": RUN, "end_reason": "stopped", "last_stage": stage, "gpus_clean": True}
    rows = dict(summary_rows({**stopped, "samples": samples}))
    assert list(rows)[:2] == ["while", "samples"]
    assert rows["while"].plain == "loading the model, after 3 min 12 s"
    assert rows["samples"].plain == "0 of 200 written, 200 missing"
    early = dict(summary_rows(stopped))
    assert early["samples"].plain == "none written; how many there are to write was not known yet"
    command = dict(summary_rows({**stopped, "kind": "command", "last_stage": {"step": "odd", "seconds": None}}))
    assert (command["while"].plain, "samples" in command) == ("at `odd`", False)


def test_a_good_part_of_the_data_that_was_skipped_is_not_overlooked() -> None:
    samples = {"expected": 32, "written": 32, "skipped": 32, "failed": 0, "missing": 0}
    rows = dict(summary_rows({**SUMMARY, "samples": samples, "skipped": {"malformed": 32, "truncated": 5}}))
    told = "32 of 32 written, 32 skipped of 64 records, 50% of the data (malformed 32)"
    assert rows["samples"].plain == told
    assert [span.style for span in rows["samples"].spans] == ["bold red"]
    few = dict(summary_rows({**SUMMARY, "samples": {**samples, "expected": 1000, "skipped": 2}}))
    assert few["samples"].plain.endswith(", 2 skipped")
    assert [span.style for span in few["samples"].spans] == ["yellow"]


def test_a_summary_shows_lengths_shares_and_what_is_missing() -> None:
    paper = Paper()
    summary = {
        **SUMMARY,
        "missing": [3, 7, 8, 9, *range(100, 160, 2)],
        "token_lengths": [{"up_to": 64, "samples": 0}, {"up_to": 256, "samples": 900}, {"up_to": None, "samples": 2}],
        "ranks": [{"rank": 0, "files": 496, "bytes": 2**30}, {"rank": 1, "files": 494, "bytes": 2**30}],
        "kept": {"files": 40, "bytes": 2**20},
    }
    print_summary(paper.console, summary)
    words = " ".join(paper.text.split())
    for shown in (
        "missing 3, 7-9, 100, 102", "and 20 more", "900 up to 256 tokens, 2 longer",
        "0: 496 (1.00 GiB), 1: 494 (1.00 GiB)", "40 of an earlier run, 1.00 MiB",
    ):  # fmt: skip
        assert shown in words


def test_the_summary_of_another_kind_of_run_needs_no_samples() -> None:
    paper = Paper()
    print_summary(paper.console, {"run_id": RUN, "end_reason": "succeeded", "gpus_clean": True})
    assert paper.lines == [f"✓ run {RUN}: succeeded", "  after       host left clean"]


def test_what_was_skipped_is_named_by_its_lines() -> None:
    broken = {
        "samples": {"expected": 61, "written": 61, "skipped": 10}, "skipped": {"encoding": 1, "malformed": 9},
        "skipped_lines": {"encoding": [7], "malformed": [3, 4, 5, 6, 8, 9, 10, 11]}, "blank_lines": 1,
    }  # fmt: skip
    of = "skipped of 71 records, 14% of the data (encoding 1, line 7; malformed 9, lines 3, 4, 5, 6, 8, 9, 10, 11"
    of += " and more)"
    lines = str(dict(summary_rows({**SUMMARY, **broken, "data": {"read_as": "jsonl: 71 token records"}}))["samples"])
    assert of + ", 1 blank line passed over" in lines
    rows = str(dict(summary_rows({**SUMMARY, **broken, "data": {"read_as": "arrow: 71 token records"}}))["samples"])
    assert of.replace("line", "row") in rows


def test_what_is_kept_but_noted_has_a_row_of_its_own() -> None:
    noted = {"noted": {"no-loss": 1, "truncated": 12}, "noted_lines": {"no-loss": [25], "truncated": [3, 4]}}
    rows = dict(summary_rows({**SUMMARY, **noted, "data": {"read_as": "jsonl: 71 token records"}}))
    assert str(rows["noted"]) == "no-loss 1, line 25; truncated 12, lines 3, 4 and more"
    assert "noted" not in dict(summary_rows({**SUMMARY, "noted": {}, "noted_lines": {}}))


def test_a_pause_is_no_part_of_its_own() -> None:
    timings = {"host_s": 100.0, "load_s": 10.0, "extract_s": 80.0, "paused_s": 60.0}
    time = str(dict(summary_rows({**SUMMARY, "timings": timings}))["time"])
    assert "load 10 s, extract 1 min 20 s, other 10 s; paused 1 min 00 s of that, for room on the disk" in time


def test_a_run_that_left_the_queue_was_never_on_the_host() -> None:
    summary = {
        "kind": "command", "state": "finished", "end_reason": "stopped", "gpus_clean": "unknown", "last_stage": None,
        "timings": {"push_s": 0.2, "host_s": 0.0},
    }  # fmt: skip
    rows = {label: value.plain for label, value in summary_rows(summary)}
    assert rows == {"time": "before the launch push 0.2 s", "after": "nothing was started"}


def test_a_lost_run_says_when_it_was_seen_last() -> None:
    summary = {
        "kind": "extract", "state": "lost", "end_reason": None, "last_seen": "2026-01-02T03:09:00Z",
        "gpus_clean": "unknown", "last_stage": {"step": "extract", "phase": "capture", "seconds": 14.0},
        "samples": {"expected": 900, "written": 257, "missing": 643}, "timings": {"extract_s": 14.0},
    }  # fmt: skip
    assert {label: value.plain for label, value in summary_rows(summary)} == {
        "while": "capturing hidden states, after 14 s",
        "last seen": "2026-01-02T03:09:00Z",
        "samples": "257 of 900 written, 643 missing",
        "go on": "the same command with `--stale resume` keeps what is written and adds the rest",
        "time": "extract 14 s",
        "after": "not known whether the host is clean",
    }
