"""Test that memory is returned in the first pause after work, and never during a request."""

import asyncio
import sys

import psutil
import pytest

from m3diff.serving import memory
from m3diff.serving.memory import PauseTrimmer, return_memory


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(memory, "PAUSE_S", 0.02)
    return 0.02


def test_memory_is_returned_once_after_the_last_request(pause):
    calls: list[int] = []
    trimmer = PauseTrimmer(lambda: calls.append(1))

    async def work() -> None:
        trimmer.begin()
        trimmer.begin()
        trimmer.end()
        await asyncio.sleep(5 * pause)
        assert calls == [], "a request is in progress"
        trimmer.end()
        await asyncio.sleep(10 * pause)

    asyncio.run(work())
    assert calls == [1]


def test_a_request_in_the_pause_delays_the_return_of_memory(pause):
    calls: list[int] = []
    trimmer = PauseTrimmer(lambda: calls.append(1))

    async def work() -> None:
        trimmer.begin()
        trimmer.end()
        trimmer.begin()
        await asyncio.sleep(5 * pause)
        assert calls == []
        trimmer.end()
        await asyncio.sleep(10 * pause)

    asyncio.run(work())
    assert calls == [1]


def test_nothing_is_done_on_a_system_without_the_call(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert return_memory() is False


def test_nothing_is_done_with_a_c_library_without_the_call(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert return_memory() is False


@pytest.mark.skipif(sys.platform != "linux", reason="other systems return freed memory themselves")
def test_freed_memory_is_returned_to_the_system():
    process = psutil.Process()
    blocks = [b"x" * 100_000 for _ in range(1000)]  # below the size that glibc maps and returns by itself
    block_above = b"y" * 100_000  # above them on the heap, so that the heap cannot shrink at its top
    del blocks
    before = process.memory_info().rss
    if not return_memory():
        pytest.skip("this C library has no malloc_trim")
    assert before - process.memory_info().rss > 50_000_000
    assert block_above
