"""Protect servers without a token: they answer only programs on this machine and the pages that they serve themselves.

A page from any site can send requests to 127.0.0.1 through the browser of a person on this machine. The site can also
have a host name that resolves to 127.0.0.1 (DNS rebinding). Such requests are recognised by the headers that browsers
send: Origin is the page's site, and Host is the name of the server that the page asked for.

uvicorn also runs the Prefect and MLflow servers. It uses `GuardedProtocol` for them if the environment variable
UVICORN_HTTP contains the path of that class.
"""

import re
from collections.abc import Iterable
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.auto import AutoHTTPProtocol

# A name of this machine, with an optional port. Trailing dots and other spellings of an address do not match
ADDRESS = r"(?P<name>127(?:\.[0-9]{1,3}){3}|localhost|\[::1\])(?::(?P<port>[0-9]{1,5}))?"
HOST = re.compile(ADDRESS, re.IGNORECASE)
# Only http and https, since pages with other schemes (file, chrome-extension) can have any host name
ORIGIN = re.compile(rf"(?P<scheme>https?)://{ADDRESS}", re.IGNORECASE)
DEFAULT_PORTS = {"http": 80, "https": 443}
# Names that count as the same server, because Prefect's page sends requests to 127.0.0.1 even if opened as localhost
SAME_SERVER_NAMES = frozenset(("localhost", "127.0.0.1"))


def foreign_header(
    headers: Iterable[tuple[bytes, bytes]], equivalent_names: frozenset[str] = frozenset()
) -> tuple[str, str] | None:
    """Return the header that shows that a request comes from another site. The server must refuse such a request.

    The header Origin is allowed if it is http or https and its host name and port match the header Host. Default ports
    may be omitted.

    Args:
        equivalent_names: host names that count as the same server when Origin and Host are compared.

    Returns:
        The name ("host" or "origin") and value of the header, or None if the request is allowed.
    """
    decoded_headers = [(name.lower(), value.decode("latin-1")) for name, value in headers]
    hosts = [value for name, value in decoded_headers if name == b"host"]
    origins = [value for name, value in decoded_headers if name == b"origin"]
    server = HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if server is None:
        return "host", ", ".join(hosts)
    for origin in origins:
        page = ORIGIN.fullmatch(origin)
        if page is None or not _is_own_page(page, server, equivalent_names):
            return "origin", origin
    return None


def _is_own_page(page: re.Match[str], server: re.Match[str], equivalent_names: frozenset[str]) -> bool:
    default_port = DEFAULT_PORTS[page["scheme"].lower()]
    page_port = int(page["port"] or default_port)
    server_port = int(server["port"] or default_port)
    page_name = page["name"].lower()
    server_name = server["name"].lower()
    is_same_name = page_name == server_name or {page_name, server_name} <= equivalent_names
    return is_same_name and page_port == server_port


class Guard:
    """ASGI middleware that refuses requests from other sites with HTTP 403, including WebSocket requests."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the application, or answer HTTP 403 if its Host or Origin header is not allowed."""
        # A lifespan message is no request and has no headers
        header = None if scope["type"] == "lifespan" else foreign_header(scope["headers"], SAME_SERVER_NAMES)
        if header is None:
            await self.app(scope, receive, send)
            return
        name, value = header
        reason = (
            f"{name.capitalize()}: {value[:100]!r} is another site's; without a token this server answers programs of "
            "this machine and its own page alone\n"
        )
        await PlainTextResponse(reason, 403)(scope, receive, send)


class GuardedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # uvicorn chooses it on import
    """uvicorn's HTTP protocol with a `Guard` around the application."""

    def __init__(self, config: Config, *args: Any, **kwargs: Any) -> None:
        if not isinstance(config.loaded_app, Guard):  # false if an earlier connection has already added the guard
            config.loaded_app = Guard(config.loaded_app)
        super().__init__(config, *args, **kwargs)
