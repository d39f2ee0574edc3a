"""Sections side by side: each has its own deadline, error and process, and none can hold up the others."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from support.probing import REPO

from remote_payload.host.sections import Section, run_sections


class TestSections:
    def test_results_errors_and_order(self) -> None:
        def fail(note: Any, results: Any) -> None:
            raise KeyError("lost")

        results = run_sections(
            [
                Section("late", 10, lambda note, results: results["bad"]["ok"], after=("bad",)),
                Section("bad", 10, fail),
                Section("good", 10, lambda note, results: {"é": "\udcff\n"}),
            ],
            20,
        )
        assert list(results) == ["late", "bad", "good"]
        assert results["bad"]["error"] == "KeyError: 'lost'"
        assert results["good"]["data"] == {"é": "\udcff\n"}
        assert results["late"]["data"] is False

    def test_a_deadline_ends_worker_and_children_and_says_where(self, tmp_path: Path) -> None:
        def hang(note: Any, results: Any) -> None:
            note("/mnt/dead")
            child = subprocess.Popen(["sleep", "600"])
            (tmp_path / "pid").write_text(str(child.pid))
            time.sleep(600)

        results = run_sections([Section("slow", 1.5, hang), Section("fine", 9, lambda note, results: 1)], 60)
        assert results["slow"]["error"] == "timed out after 1.5 s at /mnt/dead"
        assert results["fine"]["data"] == 1
        pid = (tmp_path / "pid").read_text()
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text():
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"the section's child {pid} lives on")

    def test_the_whole_deadline_bounds_each(self) -> None:
        results = run_sections(
            [
                Section("one", 500, lambda note, results: time.sleep(500)),
                Section("two", 500, lambda note, results: time.sleep(500), after=("one",)),
            ],
            1.0,
        )
        assert [result["ok"] for result in results.values()] == [False, False]

    def test_a_worker_that_dies_is_an_error(self) -> None:
        results = run_sections([Section("dead", 10, lambda note, results: os._exit(3))], 20)
        assert results["dead"]["error"] == "the section's process ended without a result"

    def test_large_results_arrive_whole(self) -> None:
        text = "x" * 3_000_000
        assert run_sections([Section("large", 20, lambda note, results: text)], 30)["large"]["data"] == text

    def test_workers_hold_no_descriptor_of_the_caller(self) -> None:
        """What a worker leaves behind must not keep the caller's stdout, and with it the connection, open."""
        program = """
            import os, time
            from remote_payload.host.sections import Section, run_sections
            def leave_one_behind(note, results):
                if os.fork() == 0:
                    os.setsid()  # out of reach of the group's kill, as a process stuck in the kernel is
                    time.sleep(2)
                    os.write(1, b"leaked")
                    os._exit(0)
            result = run_sections([Section("left", 60, leave_one_behind)], 90)["left"]
            print(result["ok"], flush=True)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            cwd=REPO, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.stdout == "True\n", done.stderr
