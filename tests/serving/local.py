"""The application with its model, asked through ASGI in this process, and the bodies of requests."""

import asyncio
import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from m3diff.registry.model_source import Source
from m3diff.serving.app import Server, make_app
from m3diff.serving.batcher import BATCH_WAIT_S, Answer, Fault, Models
from m3diff.serving.http import Metrics
from m3diff.serving.request import Asked
from m3diff.settings.load import load_params
from tests.serving.toy import ToyReplica
from tests.toy import REPOSITORY

PARAMS = load_params(REPOSITORY / "profiles" / "embedded.yaml")
Response = httpx.Response


class Local(ToyReplica):
    """A replica that is asked while it is there, and removed after its last answer."""

    removed = False

    async def ask(self, asked: Asked) -> Answer | Fault:
        assert not self.removed, "asked after it was removed"
        answer = await super().ask(asked)
        assert not self.removed, "removed before it gave its last answer"
        return answer

    async def remove(self) -> None:
        await super().remove()
        self.removed = True


class Service:
    """A server without a model yet, with an event loop of its own; `changes` are of the section `serve`."""

    def __init__(self, token: str | None = None, examples: Sequence[Any] = (), **changes: Any) -> None:
        self.cfg, self.metrics = PARAMS.serve.model_copy(update=changes), Metrics()
        self.made: list[Local] = []
        self.models = Models(self.deploy, self.metrics)
        self.server = Server(self.cfg, self.models, self.metrics, "m3diff", list(examples))
        self.app = make_app(self.server, token)
        self.runner = asyncio.Runner()
        self.run = self.runner.run

    def deploy(self, source: Source) -> Local:
        self.made.append(Local(source, self.cfg.batch_pairs, BATCH_WAIT_S, 1))
        return self.made[-1]

    async def ask(self, method: str, path: str, **request: Any) -> Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, **request)

    def get(self, path: str, **request: Any) -> Response:
        return self.run(self.ask("GET", path, **request))

    def post(self, path: str, **request: Any) -> Response:
        return self.run(self.ask("POST", path, **request))

    def post_at_once(self, path: str, requests: Sequence[dict[str, Any]]) -> list[Response]:
        async def all_of_them() -> list[Response]:
            return await asyncio.gather(*(self.ask("POST", path, **request) for request in requests))

        return self.run(all_of_them())


def png(image: Image.Image) -> bytes:
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def at(url: str, **more: Any) -> dict[str, Any]:
    """The part of a chat that is an image at this address."""
    return {"type": "image_url", "image_url": {"url": url} | more}


def chat(before: bytes, after: bytes, question: str | None = None, **more: Any) -> dict[str, Any]:
    """The body of a chat."""
    parts: list[Any] = [{"type": "text", "text": question}] if question is not None else []
    parts += [at(f"data:image/png;base64,{base64_of(data)}") for data in (before, after)]
    return {"model": "m3diff", "messages": [{"role": "user", "content": parts}]} | more


def form(before: bytes, after: bytes, **texts: str) -> dict[str, Any]:
    """The arguments of a multipart request."""
    return {"files": {"before": ("a.png", before), "after": ("b.png", after)}, "data": texts}


def source(folder: Path, version: int | str = 1) -> Source:
    return Source(f"m3diff/{version}", folder, 16, None)
