"""The end of a log: what is kept of it, what is found in it, and that it stays bounded."""

from __future__ import annotations

from support.recorded import LOG

from controller.core.logs import LINE_CAP
from controller.ui.logbuffer import BYTES_KEPT, LINES_KEPT, LogBuffer


def buffer_of(data: bytes, now: float = 0.0) -> LogBuffer:
    buffer = LogBuffer()
    buffer.feed(data, now)
    return buffer


def texts(buffer: LogBuffer, count: int = 50, **choice: object) -> list[str]:
    return [line.text for line in buffer.page(count, **choice).lines]  # type: ignore[arg-type]


def test_a_page_does_not_depend_on_how_the_bytes_came() -> None:
    whole = texts(buffer_of(LOG))
    for step in (1, 7, 100):
        pieces = LogBuffer()
        for start in range(0, len(LOG), step):
            pieces.feed(LOG[start : start + step], 0.0)
        assert texts(pieces) == whole
    assert len(whole) == 6


def test_the_unfinished_line_is_shown_until_it_is_complete() -> None:
    buffer = buffer_of(b"first\n\rLoading: 10%\rLoading: 20%")
    assert texts(buffer) == ["first", "Loading: 20%"]
    buffer.feed(b"\rLoading: 100%\nnext\n", 0.0)
    assert texts(buffer) == ["first", "Loading: 100%", "next"]


def test_a_line_written_behind_a_bar_comes_apart_from_it() -> None:
    assert texts(buffer_of(b"Load: 1%\rLoad: 50%INFO 11-29 19:37:24 [a.py:1] hello\n")) == ["Load: 50%", "hello"]


def test_a_place_stays_where_it_is_while_lines_come() -> None:
    buffer = buffer_of(b"".join(b"line %d\n" % number for number in range(100)))
    frozen = buffer.total
    before = buffer.page(3, end=frozen, skip=10)
    assert [line.text for line in before.lines] == ["line 87", "line 88", "line 89"]
    buffer.feed(b"more\n" * 50, 0.0)
    after = buffer.page(3, end=frozen, skip=10)
    assert after.lines == before.lines
    assert (before.below, after.below) == (10, 60)


def test_ranks_and_words_are_found() -> None:
    buffer = buffer_of(LOG + b"(VllmWorker-12 pid=9) old style quotes (Worker_TP3 pid=1)\n", now=7.0)
    assert texts(buffer, rank=3) == ["kernel compiled during inference: fused_moe_kernel"]
    assert texts(buffer, rank=12) == ["old style quotes (Worker_TP3 pid=1)"]
    assert texts(buffer, needle="FIRST sample") == ["first sample: [712, 4, 7168] bfloat16"]
    assert texts(buffer, needle="sample", rank=3) == []
    assert buffer.signs == {0: 7.0, 3: 7.0, 12: 7.0}
    buffer.feed(b"(Worker_TP5 pid=1) Loading: 1%\r", 8.0)
    buffer.feed(b"Loading: 2%\r", 9.0)
    assert buffer.signs[5] == 9.0


def test_shards_are_read_from_both_forms_of_the_bar() -> None:
    bare = (
        b"(EngineCore pid=1) Loading safetensors checkpoint shards:  40% Completed | 25/62 [00:10<00:15, 2.4it/s]\n"
    )
    assert buffer_of(bare).shards == (25, 62)
    drawn = b"Loading pt checkpoint shards: 100%|##########| 3/3 [00:01<00:00]\r"
    assert buffer_of(drawn).shards == (3, 3)
    assert buffer_of(b"Writing model shards:   0%|  | 0/1 [00:00<?, ?it/s]\n").shards is None


def test_memory_is_bounded_by_lines_and_by_bytes() -> None:
    buffer = LogBuffer()
    for number in range(30):
        buffer.feed(b"".join(b"%d.%d\n" % (number, index) for index in range(5000)), 0.0)
        assert len(buffer._lines) <= 2 * LINES_KEPT
    assert buffer.total == 150_000
    assert texts(buffer, 1) == ["29.4999"]
    assert texts(buffer, 2, end=10) == []  # given up since
    for _ in range(600):
        buffer.feed(b"x" * 60_000 + b"\n", 0.0)
        assert sum(map(len, buffer._lines)) <= 2 * BYTES_KEPT
    bar = LogBuffer()
    for number in range(20_000):
        bar.feed(b"Loading: %d%%\r" % number, 0.0)
    assert len(bar._rest) < 4 * LINE_CAP
    assert texts(bar) == ["Loading: 19999%"]
