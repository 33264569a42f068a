"""A server on 127.0.0.1 that speaks OpenAI's chat completions, good and bad."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CUT_BODY = b'{"id": "1", "object": "chat.completion", "choi'
FAULT_S = 20  # duration of a fault


class Fault(Enum):
    """A reply that does not arrive, or not in full."""

    HANG = "nothing"
    HEADERS_ONLY = "the headers, and nothing of the body"
    TRICKLE = "a space of the body now and then"
    RESET = "the connection is reset"


@dataclass
class Server:
    """A chat server: its replies, and the requests that it got.

    A reply is a text, a message (with `finish_reason` if that is not "stop"), None (no choice), a status, a status with
    a body, the bytes of a body, or a Fault.

    Attributes:
        default: the reply to a question without an entry in `replies`.
        replies: maps a word in the question to a list of replies. The last reply is repeated.
        models: the reply to `GET /v1/models`. 501 means that there is no such route.
        redirects: maps a method to the status and the URL (up to /v1) of a redirect.
        delay: seconds before a reply.
        delays: maps a word in the question to the seconds before the reply.
        listed: number of requests for the list of models.
        requests, times, keys: the bodies of the requests, their times of arrival, and the keys in them.
        concurrent, max_concurrent: number of requests in progress, now and at most.
        closing: set when the server ends.
    """

    default: Any
    url: str = ""
    replies: dict[str, list[Any]] = field(default_factory=dict)
    models: Any = 501
    redirects: dict[str, tuple[int, str]] = field(default_factory=dict)
    listed: int = 0
    closing: threading.Event = field(default_factory=threading.Event)
    requests: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    retry_after: str = "0.01"
    delay: float = 0.0
    delays: dict[str, float] = field(default_factory=dict)
    max_concurrent: int = 0
    concurrent: int = 0

    @property
    def texts(self) -> list[str]:
        """The texts of the requests, without images."""
        return [text_of(body) for body in self.requests]

    def reply(self, text: str) -> Any:
        """Return the next reply to a question."""
        for word, replies in self.replies.items():
            if word in text:
                return replies.pop(0) if len(replies) > 1 else replies[0]
        return self.default


def text_of(body: dict[str, Any]) -> str:
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def as_body(reply: Any) -> tuple[int, bytes]:
    """Return status and body of a reply."""
    if isinstance(reply, bytes):
        return 200, reply
    if isinstance(reply, int | tuple):
        status, body = (reply, {}) if isinstance(reply, int) else reply
        return status, json.dumps(body).encode()
    answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}
    if reply is not None:
        message = {"role": "assistant"} | ({"content": reply} if isinstance(reply, str) else reply)
        end = message.pop("finish_reason", "stop")
        answer["choices"] = [{"index": 0, "finish_reason": end, "message": message}]
    return 200, json.dumps(answer).encode()


class Replies(BaseHTTPRequestHandler):
    chat: Server

    def fail(self, fault: Fault) -> None:
        if fault is Fault.RESET:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        if fault is not Fault.HANG:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
        end = time.monotonic() + FAULT_S  # so that a client without a time limit fails at all
        while time.monotonic() < end and not self.chat.closing.wait(0.05):
            if fault is Fault.TRICKLE:
                with suppress(OSError):
                    self.wfile.write(b" ")
        self.close_connection = True

    def redirect(self, status: int, url: str) -> None:
        self.send_response(status)
        self.send_header("Location", url + self.path.removeprefix("/v1"))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Retry-After", self.chat.retry_after)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def chat_server(default: Any = "yes") -> Iterator[Server]:
    """Yield a chat server at a free port."""
    chat = Server(default)
    lock = threading.Lock()

    class Handler(Replies):
        def do_GET(self) -> None:
            chat.listed += 1
            if "GET" in chat.redirects:
                self.redirect(*chat.redirects["GET"])
            elif isinstance(chat.models, Fault):
                self.fail(chat.models)
            else:
                status, body = (chat.models, {}) if isinstance(chat.models, int) else (200, chat.models)
                self.send(status, body if isinstance(body, bytes) else json.dumps(body).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                chat.requests.append(body)
                chat.times.append(time.monotonic())
                chat.keys.add(self.headers["Authorization"])
                chat.concurrent += 1
                chat.max_concurrent = max(chat.max_concurrent, chat.concurrent)
                is_redirected = "POST" in chat.redirects
                reply = None if is_redirected else chat.reply(text_of(body))
            if is_redirected:
                with lock:
                    chat.concurrent -= 1
                self.redirect(*chat.redirects["POST"])
                return
            delays = [seconds for word, seconds in chat.delays.items() if word in text_of(body)]
            time.sleep(delays[0] if delays else chat.delay)
            if isinstance(reply, Fault):
                with lock:
                    chat.concurrent -= 1
                self.fail(reply)
                return
            status, content = as_body(reply)
            with lock:
                chat.concurrent -= 1
            self.send(status, content)

    Handler.chat = chat
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # `shutdown` waits for the end of an interval, which is half a second by default
    threading.Thread(target=http.serve_forever, args=[0.01], daemon=True).start()
    chat.url = f"http://127.0.0.1:{http.server_port}/v1"
    try:
        yield chat
    finally:
        chat.closing.set()
        http.shutdown()
        http.server_close()
