"""The rule of each server that asks for no token: it answers programs of this machine and its own page, nobody else.

A page of any site can send requests to 127.0.0.1 from the browser of someone on this machine, and can call itself by a
name that leads here (DNS rebinding). Browsers name both in the headers Host and Origin.

uvicorn, which runs Prefect's and MLflow's servers, takes `Guarded` where UVICORN_HTTP names it.
"""

import re
from collections.abc import Iterable
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.auto import AutoHTTPProtocol

LOCAL = re.compile(r"(?:127(?:\.\d+){3}|localhost|\[::1\])(:\d+)?", re.IGNORECASE)


def foreign(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, str] | None:
    """The header by which a request is refused, "host" or "origin", and its value; None where the request is answered.

    A page at localhost is the page at 127.0.0.1 where the port is the same.
    """
    given = [(name.lower(), value.decode("latin-1")) for name, value in headers]
    hosts = [value for name, value in given if name == b"host"]
    local = LOCAL.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if local is None:
        return "host", ", ".join(hosts)
    for origin in [value for name, value in given if name == b"origin"]:
        page = LOCAL.fullmatch(origin.partition("://")[2])
        if page is None or page[1] != local[1]:
            return "origin", origin
    return None


class Guard:
    """Around an application: 403 for what is foreign, WebSockets too."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = foreign(scope["headers"]) if scope["type"] != "lifespan" else None
        if found is None:
            await self.app(scope, receive, send)
            return
        name, value = found
        said = (
            f"{name.capitalize()}: {value[:100]!r} is another site's; without a token this server answers programs of "
            "this machine and its own page alone\n"
        )
        await PlainTextResponse(said, 403)(scope, receive, send)


class Guarded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # chosen as uvicorn is imported
    """uvicorn's protocol, with the guard around whatever application it serves."""

    def __init__(self, config: Config, *others: Any, **named: Any) -> None:
        if not isinstance(config.loaded_app, Guard):
            config.loaded_app = Guard(config.loaded_app)
        super().__init__(config, *others, **named)
