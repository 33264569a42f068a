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
FAULT_S = 20  # that a fault lasts


class Fault(Enum):
    """A reply that does not come, or not as a reply."""

    HANG = "nothing"
    HEADERS_ONLY = "the headers, and nothing of the body"
    TRICKLE = "a space of the body now and then"
    RESET = "the connection is reset"


@dataclass
class Server:
    """What it answers to a question, by a word in it: a list of replies, the last one for ever.

    A reply is a text, a message (with `finish_reason` in it where it is not stop), None (no choice), a status, a status
    with a body, the bytes of a body, or a Fault. `models` is the reply to `GET /v1/models`; 501: it has no such route.
    """

    default: Any
    url: str = ""
    replies: dict[str, list[Any]] = field(default_factory=dict)
    models: Any = 501
    redirects: dict[str, tuple[int, str]] = field(default_factory=dict)  # by method: status and URL up to /v1
    listed: int = 0  # how often the models were asked for
    closing: threading.Event = field(default_factory=threading.Event)
    asked: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    retry_after: str = "0.01"
    delay: float = 0.0
    delays: dict[str, float] = field(default_factory=dict)  # of single questions, by a word in them
    at_once: int = 0  # most questions at a time
    now: int = 0

    @property
    def texts(self) -> list[str]:
        """What was asked, without images."""
        return [text_of(body) for body in self.asked]

    def reply(self, text: str) -> Any:
        replies = next((replies for word, replies in self.replies.items() if word in text), [self.default])
        return replies.pop(0) if len(replies) > 1 else replies[0]


def text_of(body: dict[str, Any]) -> str:
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


def as_body(reply: Any) -> tuple[int, bytes]:
    """Status and body of a reply."""
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
    known: Server

    def fail(self, fault: Fault) -> None:
        if fault is Fault.RESET:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        if fault is not Fault.HANG:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
        end = time.monotonic() + FAULT_S  # a client without a limit of its own fails then, and not never
        while time.monotonic() < end and not self.known.closing.wait(0.05):
            if fault is Fault.TRICKLE:
                with suppress(OSError):
                    self.wfile.write(b" ")
        self.close_connection = True

    def redirect(self, status: int, url: str) -> None:
        self.send_response(status)
        self.send_header("Location", url + self.path.removeprefix("/v1"))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send(self, status: int, sent: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Retry-After", self.known.retry_after)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def chat_server(default: Any = "yes") -> Iterator[Server]:
    known, lock = Server(default), threading.Lock()

    class Handler(Replies):
        def do_GET(self) -> None:
            known.listed += 1
            if "GET" in known.redirects:
                self.redirect(*known.redirects["GET"])
            elif isinstance(known.models, Fault):
                self.fail(known.models)
            else:
                status, body = (known.models, {}) if isinstance(known.models, int) else (200, known.models)
                self.send(status, body if isinstance(body, bytes) else json.dumps(body).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                known.asked.append(body)
                known.times.append(time.monotonic())
                known.keys.add(self.headers["Authorization"])
                known.now += 1
                known.at_once = max(known.at_once, known.now)
                redirected = "POST" in known.redirects and "/again/" not in self.path
                reply = None if redirected else known.reply(text_of(body))
            if redirected:
                with lock:
                    known.now -= 1
                self.redirect(*known.redirects["POST"])
                return
            time.sleep(next((s for word, s in known.delays.items() if word in text_of(body)), known.delay))
            if isinstance(reply, Fault):
                with lock:
                    known.now -= 1
                self.fail(reply)
                return
            status, sent = as_body(reply)
            with lock:
                known.now -= 1
            self.send(status, sent)

    Handler.known = known
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    known.url = f"http://127.0.0.1:{http.server_port}/v1"
    try:
        yield known
    finally:
        known.closing.set()
        http.shutdown()
        http.server_close()
