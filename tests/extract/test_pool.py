"""The memory of a rank's buffers: who gets which range of it, who waits, and for what."""

from __future__ import annotations

import errno
import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_payload.extract.pool import ALIGNMENT, BufferPool


def test_the_pool_waits_for_writers_only() -> None:
    pool = BufferPool(100)
    assert pool.acquire(80, lambda: None) == 0
    assert pool.acquire(80, lambda: None) is None  # nobody is writing: waiting would be for ever
    pool.writing()
    entered: list[int | None] = []
    waiter = threading.Thread(target=lambda: entered.append(pool.acquire(80, lambda: None)), daemon=True)
    waiter.start()
    waiter.join(0.2)
    assert not entered
    pool.release(0, written=True)
    waiter.join(10)
    assert entered == [0]
    assert pool.peak == 80


def test_the_pool_gives_up_on_a_disk_that_is_too_slow() -> None:
    pool = BufferPool(100)
    pool.acquire(80, lambda: None)
    pool.writing()
    assert pool.acquire(80, lambda: None, wait_s=0.1) is None


def test_the_pool_raises_what_the_check_finds() -> None:
    pool = BufferPool(100)
    pool.acquire(80, lambda: None)
    pool.writing()

    def check() -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        pool.acquire(80, check)


def test_holes_become_one_again_whatever_the_order() -> None:
    pool = BufferPool(64)
    for order in itertools.permutations(range(4)):
        places = [pool.acquire(16, lambda: None) for _ in range(4)]
        assert places == [0, 16, 32, 48]
        for number in order:
            pool.release(number * 16, written=False)
    assert pool.acquire(64, lambda: None) == 0


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=60))
def test_no_two_buffers_share_a_byte(steps: list[tuple[int, int]]) -> None:
    pool, taken = BufferPool(128), dict[int, int]()
    for size, turn in steps:
        place = pool.acquire(size, lambda: None)
        if place is not None:
            assert place % ALIGNMENT == 0
            assert place + size <= 128
            assert all(place + size <= other or other + length <= place for other, length in taken.items())
            taken[place] = size
        elif taken:
            victim = sorted(taken)[turn % len(taken)]
            pool.release(victim, written=False)
            del taken[victim]
    for place in taken:
        pool.release(place, written=False)
    assert pool.acquire(128, lambda: None) == 0


def test_other_errors_than_a_full_disk_are_raised_at_once() -> None:
    def fail() -> None:
        raise PermissionError(errno.EACCES, "denied")

    with pytest.raises(PermissionError):
        BufferPool(1).patiently(fail)


def test_a_buffer_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="of 0 bytes"):
        BufferPool(64).acquire(0, lambda: None)
