"""Prepare image sets in threads, in order and in limited memory."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

from m3diff.models.threads import preparing_threads

if TYPE_CHECKING:
    from m3diff.models.prepared import Prepared

T = TypeVar("T")


class ImageQueue(Generic[T]):
    """Prepares the image sets of items in order, ahead of the code that takes them.

    The size of an image set is known only after its preparation, so the limit does not apply to the image sets that are
    being prepared. In total, the image sets take less than `max_bytes` and the bytes of one image set per thread. The
    code that takes them must release some before those that it has taken reach `max_bytes`.

    No thread waits for memory. Whenever there is room again, the next preparation is started. A thread that waited
    would keep the process from ending after an error.

    Args:
        prepare: function that prepares the image set of an item.
        items: the items.
        threads: number of threads.
        max_ahead: maximum number of image sets that are being prepared or wait to be taken.
        max_bytes: number of bytes from which no further image set is prepared, including those that were taken and not
            released.
    """

    def __init__(
        self, prepare: Callable[[T], "Prepared"], items: Iterable[T], threads: int, max_ahead: int, max_bytes: int
    ) -> None:
        self.prepare = prepare
        self.items = iter(items)
        self.threads = threads
        self.max_ahead = max_ahead
        self.max_bytes = max_bytes
        self.pool = preparing_threads(threads)
        self.lock = threading.Lock()
        self.futures: deque[Future[Prepared]] = deque()
        self.used_bytes = 0
        self.being_prepared = 0
        self.is_closed = False

    def take(self) -> "Prepared":
        """Return the next image set. Its bytes count as used until they are released.

        Raises:
            ImageError: an image cannot be read.
        """
        self._start_preparations()
        prepared = self.futures.popleft().result()
        self._start_preparations()
        return prepared

    def release(self, nbytes: int) -> None:
        """Make room for further image sets after image sets with so many bytes were deleted."""
        with self.lock:
            self.used_bytes -= nbytes
        self._start_preparations()

    def close(self) -> None:
        """Prepare no further image sets, and wait for those that are being prepared."""
        with self.lock:
            self.is_closed = True
        self.pool.shutdown()

    def _start_preparations(self) -> None:
        """Start the preparation of further image sets while there is room for them."""
        with self.lock:
            while self._has_room():
                try:
                    item = next(self.items)
                except StopIteration:
                    return
                self.being_prepared += 1
                self.futures.append(self.pool.submit(self._prepare, item))

    def _has_room(self) -> bool:
        has_thread = self.being_prepared < self.threads and len(self.futures) < self.max_ahead
        return has_thread and self.used_bytes < self.max_bytes and not self.is_closed

    def _prepare(self, item: T) -> "Prepared":
        nbytes = 0
        try:
            prepared = self.prepare(item)
            nbytes = prepared.nbytes
            return prepared
        finally:
            with self.lock:
                self.being_prepared -= 1
                self.used_bytes += nbytes
            self._start_preparations()
