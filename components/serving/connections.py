"""Connections that say nothing: uvicorn waits for a request's head without an end."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def impatient(seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol, which closes a connection whose request has not its whole head after so many seconds. The
    body has a limit of its own, in components/serving/http.py."""

    class Impatient(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._rest()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._rest()
            elif self.timer is None:
                self.timer = self.loop.call_later(seconds, self.transport.close)

        def _rest(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    return Impatient
