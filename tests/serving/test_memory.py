"""Memory is given back in the first pause after work, and never while a request is under way."""

import asyncio
import sys

import psutil
import pytest

from m3diff.serving import memory
from m3diff.serving.memory import PauseTrimmer, give_back


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(memory, "PAUSE_S", 0.02)
    return 0.02


def test_memory_is_given_back_once_when_the_last_request_ended(pause):
    calls: list[int] = []
    trimmer = PauseTrimmer(lambda: calls.append(1))

    async def work() -> None:
        trimmer.begin()
        trimmer.begin()
        trimmer.end()
        await asyncio.sleep(5 * pause)
        assert calls == [], "a request is under way"
        trimmer.end()
        await asyncio.sleep(10 * pause)

    asyncio.run(work())
    assert calls == [1]


def test_a_request_in_the_pause_puts_it_off(pause):
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


def test_a_system_without_the_call_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert give_back() is False


@pytest.mark.skipif(sys.platform != "linux", reason="other systems return freed memory themselves")
def test_freed_memory_goes_back_to_the_system():
    process = psutil.Process()
    blocks = [b"x" * 100_000 for _ in range(1000)]  # below the size that glibc maps and returns by itself
    kept = b"y" * 100_000  # above them on the heap, so that its top cannot be cut
    del blocks
    before = process.memory_info().rss
    if not give_back():
        pytest.skip("this C library has no malloc_trim")
    assert before - process.memory_info().rss > 50_000_000
    assert kept
