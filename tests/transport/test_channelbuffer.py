"""What a slow reader of a fast host holds in memory: the window, and no multiple of it."""

from __future__ import annotations

import hashlib
import tracemalloc

import paramiko
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paramiko.buffered_pipe import PipeTimeout
from support.hostrun import wait_until

from controller.transport.channelbuffer import ChannelBuffer
from controller.transport.link import WINDOW_BYTES
from controller.transport.ssh import SshTransport

ENOUGH = WINDOW_BYTES * 8 // 10
"""Of the window: paramiko tells the host of free room in tenths of it."""


@given(st.lists(st.binary(max_size=50)), st.lists(st.integers(1, 80)))
def test_what_was_fed_is_read_in_whatever_pieces(packets: list[bytes], sizes: list[int]) -> None:
    buffer = ChannelBuffer()
    for packet in packets:
        buffer.feed(packet)
    whole = b"".join(packets)
    read = b""
    for size in sizes:
        if not len(buffer):
            break
        piece = buffer.read(size, 0.0)
        assert 0 < len(piece) <= size
        read += piece
        assert len(buffer) == len(whole) - len(read)
        assert buffer.read_ready() == (len(buffer) > 0)
    assert read + buffer.empty() == whole
    with pytest.raises(PipeTimeout):
        buffer.read(1, 0.0)
    buffer.close()
    assert buffer.read(1, 0.0) == b""


def test_it_stands_in_for_all_of_the_pipe_that_a_channel_uses() -> None:
    """`set_event` serves `Channel.fileno` alone, which nobody here calls."""
    offered = {name for name in vars(paramiko.buffered_pipe.BufferedPipe) if not name.startswith("_")}
    assert offered - {"set_event"} <= set(dir(ChannelBuffer))


@pytest.mark.sshd
@pytest.mark.only("paramiko")
def test_a_reader_slower_than_the_host_holds_the_window_and_little_more(shared: SshTransport) -> None:
    size = 3 * WINDOW_BYTES
    process = shared.start(["head", "-c", str(size), "/dev/zero"])
    digest = hashlib.sha256()
    received = 0
    tracemalloc.start()
    try:
        while received < size:
            if received in (0, 1 << 20):  # the host is far ahead, at first and once more
                wait_until(lambda: len(process._channel.in_buffer) >= ENOUGH, "the host filled the window", 60)
            data = process.read(timeout=60)
            digest.update(data)
            received += len(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        process.close()
    assert digest.hexdigest() == hashlib.sha256(bytes(size)).hexdigest()
    assert peak < WINDOW_BYTES + (4 << 20)
