"""Provide a toy captioner, the application with this captioner, and bodies of requests.

An answer of the toy contains its word, the texts of the dialogue and the colours of the images. The application runs in
this process, where tests use it through ASGI, or in a separate process with a registry of toys.

`python -m tests.serving.toy [OPTIONS OF m3diff]` runs `m3diff serve` with this captioner. The environment variable
TOY_CONSTANTS sets constants of m3diff.serving. The folder of a toy contains `word.txt`. The toy takes COMPUTE_S seconds
for a batch, so that other requests gather in the meantime.
"""

import asyncio
import base64
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import psutil
import torch
import yaml
from PIL import Image

from m3diff.models.checkpoint import read_trained_on
from m3diff.models.contract import Prepared, Takes
from m3diff.models.family import MAPS_OF_MODEL
from m3diff.models.generation import QUESTION
from m3diff.models.sample_limits import TrainedOn
from m3diff.records.errors import DataError
from m3diff.records.sample import Turn
from m3diff.registry.model_source import Source
from m3diff.serving import batcher
from m3diff.serving.app import Server
from m3diff.serving.batcher import BATCH_WAIT_S, AnswerRequest, Metrics, Models, Replica, ServedAnswer, UnusableImage
from m3diff.serving.model_card import ModelCard
from m3diff.settings.load import load_params
from tests.servers import free_port
from tests.toy import REPOSITORY

PARAMS = load_params(REPOSITORY / "profiles" / "embedded.yaml")
COMPUTE_S = 0.04
CONSTANTS = "TOY_CONSTANTS"
LOAD_LOCK = threading.Lock()
SIDE = 16
CELLS = 4
SPECIAL = ("<image>", "<|im_end|>")
# Words of toys that cannot be loaded, and the errors that they raise
FAULTS = {
    "broken": ValueError("model.safetensors: sha256 differs"),
    "cut off": DataError("model.safetensors: cut off; fetch"),
}


class ToyCaptioner:
    tokenizer = SimpleNamespace(all_special_tokens=SPECIAL[1:], get_added_vocab=lambda: {SPECIAL[0]: 1})
    family = SimpleNamespace(takes=Takes(), maps=MAPS_OF_MODEL)
    max_new_tokens = 64
    question = QUESTION
    trained_on = TrainedOn(QUESTION)

    def __init__(self, word: str, trained_on: TrainedOn | None = None) -> None:
        self.word = word
        if trained_on is not None:
            self.trained_on = trained_on
            self.question = trained_on.question or QUESTION
        self.processor = SimpleNamespace(
            tokenizer=self.tokenizer,
            prepare=prepare_toy,
            encode_answer=lambda text: list(range(1 + len(text.split()))),
        )

    def encode_prompt(self, turns, marks) -> tuple[int, ...]:
        return tuple(range(len(texts_of(turns)) + len(marks)))

    def answer(self, prepared, dialogues, saliency=False) -> tuple[list[str], np.ndarray | None]:
        time.sleep(COMPUTE_S)
        samples = list(zip(prepared, dialogues, strict=True))
        lengths = {len(self.encode_prompt(turns, images.marks)) for images, turns in samples}
        assert len(lengths) == 1, "a prompt would be padded"
        assert len({len(images.marks) for images in prepared}) == 1, "numbers of images differ"
        if any(turns[-1].question == "Break down?" for turns in dialogues):
            raise RuntimeError("the secret place /var/model is on fire")
        texts = []
        for images, turns in samples:
            pixels = images.tensors.get("pixels", [])
            colours = ["/".join(map(str, image[SIDE // 2, SIDE // 2].tolist())) for image in pixels]
            texts.append(toy_answer(self.word, colours, texts_of(turns)))
        grids = np.full((len(texts), CELLS, CELLS), 0.5 / (CELLS**2 - 1), np.float16)
        grids[:, 1, 1] = 0.5
        return texts, grids if saliency else None


def prepare_toy(images: Iterable[Image.Image]) -> Prepared:
    """Prepare images as a processor does, each of SIDE pixels a side."""
    prepared = [np.asarray(image.resize((SIDE, SIDE), Image.Resampling.NEAREST)) for image in images]
    tensors = {"pixels": torch.from_numpy(np.stack(prepared))} if prepared else {}
    return Prepared(tensors, ("<image>",) * len(prepared))


def texts_of(turns: Sequence[Turn]) -> str:
    """Return the texts of a dialogue, such as `Is it red? Yes. Why?`."""
    return " ".join(text for turn in turns for text in turn if text)


def toy_answer(word: str, colours: Sequence[str], question: str) -> str:
    """Return the answer of a toy about images with these colours."""
    return f"{word}: {' became '.join(colours)} ({question})"


def toy_caption(word: str, question: str, before: str, after: str) -> str:
    return toy_answer(word, (before, after), question)


def write_toy(folder: Path, word: str, **trained_on: Any) -> Path:
    """Write the folder of a toy. `trained_on` is the field of its manifest with this name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "word.txt").write_text(word)
    manifest = {"files": {}, "word": word} | ({"trained_on": trained_on} if trained_on else {})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def source(folder: Path, version: int | str = 1) -> Source:
    return Source(f"m3diff/{version}", folder, 16, None)


def load_toy(source: Source) -> Any:
    word = (source.folder / "word.txt").read_text()
    if word in FAULTS:
        raise FAULTS[word]
    manifest = json.loads((source.folder / "manifest.json").read_text())
    return ToyCaptioner(word, read_trained_on(manifest) if "trained_on" in manifest else None)


class ToyReplica(Replica):
    def __init__(self, *arguments: Any) -> None:
        # Without the lock, two replicas that load in two threads could leave the toy's function in the module
        with LOAD_LOCK, patch.object(batcher, "load", load_toy):
            super().__init__(*arguments)


class Local(ToyReplica):
    """A replica that fails if it is asked after its removal, or removed before its last answer."""

    removed = False

    async def ask(self, request: AnswerRequest) -> ServedAnswer | UnusableImage:
        assert not self.removed, "asked after it was removed"
        answer = await super().ask(request)
        assert not self.removed, "removed before it gave its last answer"
        return answer

    async def remove(self) -> None:
        await super().remove()
        self.removed = True


class Service:
    """A server with its own event loop, and without a model at first.

    Args:
        card: facts of each model's card.
        changes: changed values in the section `serve`.
    """

    def __init__(self, token: str | None = None, card: dict[str, Any] | None = None, **changes: Any) -> None:
        self.cfg = PARAMS.serve.model_copy(update=changes)
        self.replicas: list[Local] = []
        self.models = Models(self.deploy, Metrics(), lambda source: ModelCard(source.name, **(card or {})))
        self.server = Server(self.cfg, self.models, "m3diff", token)
        self.runner = asyncio.Runner()
        self.run = self.runner.run

    def deploy(self, source: Source) -> Local:
        self.replicas.append(Local(source, self.cfg.batch_pairs, BATCH_WAIT_S, 1))
        return self.replicas[-1]

    async def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.server, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, **request)

    def get(self, path: str, **request: Any) -> httpx.Response:
        return self.run(self.ask("GET", path, **request))

    def post(self, path: str, **request: Any) -> httpx.Response:
        return self.run(self.ask("POST", path, **request))

    def post_at_once(self, path: str, requests: Sequence[dict[str, Any]]) -> list[httpx.Response]:
        async def post_all() -> list[httpx.Response]:
            return await asyncio.gather(*(self.ask("POST", path, **request) for request in requests))

        return self.run(post_all())


def plain(red: int, green: int, blue: int = 0, size: tuple[int, int] = (32, 24)) -> Image.Image:
    return Image.new("RGB", size, (red, green, blue))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def image_part(url: str, **fields: Any) -> dict[str, Any]:
    """Return an image part of a chat message."""
    return {"type": "image_url", "image_url": {"url": url} | fields}


def chat(before: bytes, after: bytes, question: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the body of a chat request about a pair."""
    return dialogue([before, after], question, **options)


def dialogue(images: Sequence[bytes], *texts: str | None, **options: Any) -> dict[str, Any]:
    """Return the body of a chat request about images.

    Args:
        texts: the texts of the user and the assistant in turn. None stands for no text.
    """
    messages: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        parts: list[Any] = [{"type": "text", "text": text}] if text is not None else []
        if not messages:
            parts += [image_part(f"data:image/png;base64,{base64_of(content)}") for content in images]
        messages.append({"role": ("user", "assistant")[number % 2], "content": parts})
    return {"model": "m3diff", "messages": messages} | options


def image_form(image: bytes, **texts: str) -> dict[str, Any]:
    """Return a form with one image."""
    return {"files": {"image": ("a.png", image)}, "data": texts}


def form(before: bytes, after: bytes, **texts: str) -> dict[str, Any]:
    return {"files": {"before": ("a.png", before), "after": ("b.png", after)}, "data": texts}


PATIENCE_S = 180


class Running:
    """A running server. `root` is its current directory."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path, root: Path) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.root = root
        self.address = f"http://127.0.0.1:{port}"

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def family(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def metric(self, line: str) -> float:
        metrics = httpx.get(f"{self.address}/metrics").text.splitlines()
        (metric,) = [metric for metric in metrics if metric.startswith(f"{line} ")]
        return float(metric.rpartition(" ")[2])


def write_registry(root: Path, *words: str) -> Any:
    """Write a registry and return its client. Versions 1, 2, ... are toys with these words; version 1 is champion."""
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{root}/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)
    client.create_registered_model("m3diff")
    for word in words:
        write_toy(root / "versions" / word / "artifacts" / "checkpoint", word)
        client.create_model_version("m3diff", (root / "versions" / word).as_uri())
    client.set_registered_model_alias("m3diff", "champion", "1")
    return client


def command(root: Path, *options: str, toy: bool = True, port: int | None = None, **changes: Any) -> list[str]:
    """Write the parameters and return the command line of a server.

    Args:
        changes: changed values in the section `serve`.
    """
    values = yaml.safe_load((REPOSITORY / "profiles" / "embedded.yaml").read_text())
    values["serve"] = changes
    values["register"] = {"tracking_uri": f"sqlite:///{root}/mlflow.db"}
    values["train"]["base"] = str(REPOSITORY / values["train"]["base"])
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    module = "tests.serving.toy" if toy else "m3diff"
    return [sys.executable, "-m", module, "serve", "--port", str(port or free_port()), *options]


def environment(**variables: str) -> dict[str, str]:
    """Return the environment for a process that imports this repository, with additional variables."""
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"} | variables


@contextmanager
def running(root, *options, toy=True, constants=None, variables=None, **changes) -> Iterator[Running]:
    """Start a server and yield it when it is ready. After the block, end all of its processes.

    Args:
        constants: values by module and name, such as `limits.UPLOAD_S`.
        variables: additional environment variables.
    """
    line = command(root, *options, toy=toy, **changes)
    log = root / "serve.log"
    with log.open("w") as out:
        env = environment(**{CONSTANTS: json.dumps(constants or {})} | (variables or {}))
        pipes = {"stdout": out, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(line, cwd=root, env=env, start_new_session=True, **pipes)
    server = Running(process, int(line[line.index("--port") + 1]), log, root)
    try:
        server.wait_for(" answers with ")
        yield server
    finally:
        if process.poll() is None:
            family = server.family()
            server.stop()
            _, live_processes = psutil.wait_procs(family, 20)
            for live_process in live_processes:
                live_process.kill()


if __name__ == "__main__":
    from m3diff.__main__ import main
    from tests.serving.toy import ToyReplica as Importable  # a replica cannot import it from __main__

    for name, value in json.loads(os.environ.get(CONSTANTS, "{}")).items():
        module, _, constant = name.partition(".")
        setattr(importlib.import_module(f"m3diff.serving.{module}"), constant, value)
    batcher.Replica = Importable  # type: ignore[misc]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, and so by the server, if the tests run under nohup
    sys.exit(main())
