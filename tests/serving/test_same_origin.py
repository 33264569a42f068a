"""Test that Host and Origin show whether a request comes from the server's own page. tests/flows tests real servers."""

import asyncio
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from m3diff.serving.same_origin import SAME_SERVER_NAMES, Guard, GuardedProtocol, foreign_header

# Host and Origin of requests from programs and from the server's own page
ALLOWED_REQUESTS = {
    "a program": ("127.0.0.1:8000", None),
    "the address": ("127.0.0.1:8000", "http://127.0.0.1:8000"),
    "the name": ("localhost:8000", "http://localhost:8000"),
    "IPv6": ("[::1]:8000", "http://[::1]:8000"),
    "another loopback address": ("127.0.0.2:8000", "http://127.0.0.2:8000"),
    "capitals": ("LOCALHOST:8000", "HTTP://localhost:8000"),
    "https, as of a proxy": ("localhost:8443", "https://localhost:8443"),
    "the default port of http": ("localhost", "http://localhost"),
    "the default port of https": ("localhost", "https://localhost"),
    "a default port that is written once": ("localhost:80", "http://localhost"),
    "a default port of https that is written once": ("localhost", "https://localhost:443"),
}

FOREIGN_ORIGINS = {
    "null": "null",
    "empty": "",
    "a file": "file://",
    "a file on this host": "file://127.0.0.1:8000",
    "an extension": "chrome-extension://abcdefghijklmnop",
    "an extension that is called as the server": "chrome-extension://127.0.0.1:8000",
    "Firefox' extension": "moz-extension://127.0.0.1:8000",
    "an application's scheme": "app://127.0.0.1:8000",
    "a web socket's scheme": "ws://127.0.0.1:8000",
    "ftp": "ftp://127.0.0.1:8000",
    "no scheme": "127.0.0.1:8000",
    "no scheme but its end": "://127.0.0.1:8000",
    "a scheme that ends in http": "xhttp://127.0.0.1:8000",
    "another port": "http://127.0.0.1:8001",
    "no port": "http://127.0.0.1",
    "the other name of this machine": "http://localhost:8000",
    "the other address of this machine": "http://[::1]:8000",
    "another loopback address": "http://127.0.0.2:8000",
    "a trailing dot": "http://127.0.0.1.:8000",
    "a name with a trailing dot": "http://localhost.:8000",
    "a rebound name": "http://127.0.0.1.nip.io:8000",
    "a name that begins as ours": "http://localhost.evil.example:8000",
    "a name that ends as ours": "http://evil-localhost:8000",
    "the address as a number": "http://2130706433:8000",
    "the address in hexadecimal": "http://0x7f.0.0.1:8000",
    "a short address": "http://127.1:8000",
    "the address inside IPv6": "http://[::ffff:127.0.0.1]:8000",
    "IPv6 written out": "http://[0:0:0:0:0:0:0:1]:8000",
    "all addresses": "http://0.0.0.0:8000",
    "a login in front": "http://127.0.0.1:8000@evil.example",
    "a login that is another site": "http://evil.example@127.0.0.1:8000",
    "a path": "http://127.0.0.1:8000/",
    "two origins": "http://127.0.0.1:8000 http://evil.example",
    "a port that is none": "http://127.0.0.1:8000x",
    "a line's end": "http://127.0.0.1:8000\n",
}

FOREIGN_HOSTS = ["evil.example:8000", "127.0.0.1.nip.io:8000", "localhost.:8000", "127.0.0.1.:8000", "0.0.0.0:8000", ""]


def headers(host: str, *origins: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", host.encode()), *((b"Origin", origin.encode("latin-1")) for origin in origins)]


@pytest.mark.parametrize(("host", "origin"), ALLOWED_REQUESTS.values(), ids=ALLOWED_REQUESTS)
def test_its_own_page_and_programs_are_answered(host, origin):
    assert foreign_header(headers(host, *([] if origin is None else [origin]))) is None


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS.values(), ids=FOREIGN_ORIGINS)
def test_every_other_origin_is_refused(origin):
    assert foreign_header(headers("127.0.0.1:8000", origin)) == ("origin", origin)


def test_a_second_origin_is_judged_too():
    assert foreign_header(headers("127.0.0.1:8000", "http://127.0.0.1:8000", "null")) == ("origin", "null")


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_a_host_that_is_not_this_machine_is_refused(host):
    assert foreign_header(headers(host)) == ("host", host)
    assert foreign_header(headers(host, f"http://{host}")) == ("host", host)


def test_prefects_page_at_localhost_may_ask_its_api_at_the_address():
    request_headers = headers("127.0.0.1:4200", "http://localhost:4200")
    assert foreign_header(request_headers) == ("origin", "http://localhost:4200")
    assert foreign_header(request_headers, SAME_SERVER_NAMES) is None
    assert foreign_header(headers("127.0.0.1:4200", "http://[::1]:4200"), SAME_SERVER_NAMES) is not None
    assert foreign_header(headers("127.0.0.1:4200", "http://localhost:4201"), SAME_SERVER_NAMES) is not None
    assert foreign_header(headers("127.0.0.1:4200", "chrome-extension://localhost:4200"), SAME_SERVER_NAMES) is not None


class Application:
    """An ASGI application that keeps the scopes of its requests and what is sent to the client."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.sent: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def ask_guard(self, scope: dict[str, Any]) -> None:
        asyncio.run(Guard(self)(scope, None, self.send))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "http", "headers": headers("127.0.0.1:4200", "http://localhost:4200")},
        {"type": "websocket", "headers": headers("localhost:4200")},
        {"type": "lifespan"},
    ],
    ids=["the page", "a program", "the start"],
)
def test_the_guard_passes_on_what_is_not_of_another_site(scope):
    application = Application()
    application.ask_guard(scope)
    assert application.scopes == [scope]
    assert application.sent == []


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(("name", "value"), [("Host", "evil.example"), ("Origin", "https://evil.example")])
def test_the_guard_refuses_a_request_of_another_site_and_names_the_header(kind, name, value):
    application = Application()
    origins = [value] if name == "Origin" else []
    host = value if name == "Host" else "localhost:4200"
    application.ask_guard({"type": kind, "headers": headers(host, *origins)})
    assert application.scopes == []
    start, *body = application.sent
    assert start["status"] == 403
    assert body[0]["body"].decode().startswith(f"{name}: '{value}'")


def test_uvicorns_protocol_guards_the_application_of_every_connection_once():
    application = Application()
    config = Config(application, lifespan="off", log_config=None)
    config.load()
    loaded_app = config.loaded_app

    async def connect() -> None:
        for _ in range(2):
            protocol = GuardedProtocol(config, ServerState(), {})
            assert protocol.app is config.loaded_app

    asyncio.run(connect())
    assert isinstance(config.loaded_app, Guard)
    assert config.loaded_app.app is loaded_app
