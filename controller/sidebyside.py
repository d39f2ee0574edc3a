"""The same work for several hosts at once, which Ctrl-C ends at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(work: Callable[[T], R], items: Sequence[T], *, at_once: int) -> list[R]:
    """Return what `work` makes of each item, in their order; at most `at_once` are under way.

    Raises what `work` raised first. Then, and on Ctrl-C, no other item is begun, and what is under way is not waited
    for: its threads are daemons, as those of an executor are not, so that no host's time-out keeps the program alive.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(items)):
        waiting.put(index)
    answers: queue.SimpleQueue[tuple[int, R] | BaseException] = queue.SimpleQueue()
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                answers.put((index, work(items[index])))
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits for it
                answers.put(error)

    for number in range(min(at_once, len(items))):
        threading.Thread(target=serve, name=f"ctl-host-{number}", daemon=True).start()
    done: dict[int, R] = {}
    try:
        while len(done) < len(items):
            answer = answers.get()
            if isinstance(answer, BaseException):
                raise answer
            done[answer[0]] = answer[1]
        return [done[index] for index in range(len(items))]
    finally:
        over.set()
