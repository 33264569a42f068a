"""Return freed memory to the operating system while the server is idle.

glibc keeps freed memory for later use, so a server would hold the memory of a batch of photographs for as long as it
runs. `malloc_trim` returns that memory to the system. The call takes a few milliseconds, so the server makes it only in
a pause between requests. Other C libraries (musl, macOS) either return memory themselves or do not have such a call, so
the server does nothing there.
"""

import asyncio
import ctypes
import sys
from collections.abc import Callable

PAUSE_S = 1.0  # seconds without a request before memory is returned


def return_memory() -> bool:
    """Return freed memory to the operating system. The result is False if the C library does not support this."""
    if sys.platform != "linux":
        return False
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return False
    trim(0)
    return True


class PauseTrimmer:
    """Return freed memory to the operating system once after each burst of requests.

    Args:
        return_memory: function that returns the memory. It runs in a thread, since it takes time and releases the GIL.
    """

    def __init__(self, return_memory: Callable[[], object] = return_memory) -> None:
        self.return_memory = return_memory
        self.requests = 0
        self.timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Count a request that starts. Memory is not returned before it ends."""
        self.requests += 1
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def end(self) -> None:
        """Count a request that ends. After the last one, return memory in PAUSE_S seconds unless a new one starts."""
        self.requests -= 1
        if not self.requests:
            loop = asyncio.get_running_loop()
            self.timer = loop.call_later(PAUSE_S, loop.run_in_executor, None, self.return_memory)
