"""`m3diff serve`: a process that loads the model, follows an alias of the registry and listens."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import check_licence
from m3diff.endpoint import THIS_MACHINE
from m3diff.records.errors import DataError
from m3diff.registry.model_source import Source, find, version_of
from m3diff.serving import app
from m3diff.serving.batcher import Metrics, Models, deployer
from m3diff.settings.rules import licensed
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params

TOKEN, SHORTEST_TOKEN = "M3DIFF_SERVE_TOKEN", 16
NEW_TOKEN = "python -c 'import secrets; print(secrets.token_hex())'"
POLL_S = 5  # seconds between two checks of which version the alias names


def say(text: str, to: TextIO | None = None) -> None:
    """Print a line to the output, else to `to`; where nobody reads that any more (`m3diff serve | head`), to nobody."""
    out = to or sys.stdout
    try:
        print(f"m3diff serve: {text}", file=out, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


class Impatient(H11Protocol):
    """uvicorn's protocol, which closes a connection whose request has not its whole head after UPLOAD_S; uvicorn would
    wait without an end. The body has a limit of its own."""

    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        is_waiting = self.conn.their_state is h11.IDLE
        if is_waiting and self.timer is None:
            self.timer = self.loop.call_later(app.UPLOAD_S, self.transport.close)
        elif not is_waiting and self.timer is not None:
            self.timer.cancel()
            self.timer = None


async def follow(models: Models, version: Callable[[], str], find: Callable[[], Source], poll_s: float) -> None:
    """Check again and again which version the alias names, and switch when it moved. A failure is reported and tried
    again at the next check; the current model goes on answering.

    Args:
        version: the name of the version that the alias names at the moment.
        find: its checkpoint.
    """
    failed = ""
    while True:
        await asyncio.sleep(poll_s)
        assert models.current is not None
        name = models.current.facts.name
        try:
            if await asyncio.to_thread(version) != name:
                source = await asyncio.to_thread(find)
                await models.switch(source)
                say(f"answers now with {source.name}")
            failed = ""
        except Exception as error:  # of MLflow, of a checkpoint, of Ray
            models.metrics.poll_failures.inc()
            if str(error) != failed:
                say(f"goes on with {name}; the next version could not be had: {error}", sys.stderr)
            failed = str(error)


def serve(params: Params, model: str, base: Path, host: str, port: int) -> None:
    """Answer requests until SIGTERM, SIGINT or, unless nohup started it, SIGHUP; then take no new one and answer those
    that are there.

    Args:
        model: a folder or a version's number, which stay as they are; or an alias, which is followed.
        base: as in `model_source.find`.

    Raises:
        ParamsError: the address is taken, others could reach it without a token, or replicas have no cluster.
        DataError: there is no such model, or its checkpoint is damaged.
    """
    cfg, name = params.serve, params.register_.model_name
    store = (params.register_.tracking_uri, name, model)

    def find_now() -> Source:
        return find(*store, base, params.predict.max_new_tokens)

    async def work() -> None:
        """Load the first model, then follow the alias, or wait for ever."""
        await models.switch(source)
        where, number = listener.getsockname()[:2]
        say(f"http://{f'[{where}]' if ':' in where else where}:{number} answers with {source.name}")
        if Path(model).is_dir() or model.isdecimal():
            await asyncio.Event().wait()
        await follow(models, lambda: version_of(*store), find_now, POLL_S)

    token = take_token(host)
    with listening(host, port) as listener:
        source = find_now()
        with deployer(cfg, params.compute) as deploy:
            models = Models(deploy, Metrics())
            shown = []
            for dataset, entry in licensed(params).items():
                with suppress(DataError):
                    check_licence(DATASETS[entry.reader], "show")
                    shown.append(dataset)
            examples = app.find_examples(params.paths.clean / "records.parquet", shown)
            asyncio.run(run(app.Server(cfg, models, name, token, examples), listener, cfg.answer_s, models, work))


async def run(
    application: app.Server, listener: socket.socket, answer_s: float, models: Models, work: Callable[[], Any]
) -> None:
    """Listen at once, and `work` until a signal."""
    config = uvicorn.Config(
        application,
        http=Impatient,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(app.UPLOAD_S + answer_s) + 1,
    )
    server, stopped = uvicorn.Server(config), asyncio.Event()
    loop = asyncio.get_running_loop()
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
        loop.add_signal_handler(number, stopped.set)
    listens = asyncio.create_task(server._serve([listener]))  # `serve` would raise the signal again when it is done
    works = asyncio.create_task(work())
    await asyncio.wait((listens, works, asyncio.create_task(stopped.wait())), return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    if works.done():
        await listens
        works.result()  # the first model could not be loaded
    say("stops; answers what was asked")
    works.cancel()
    await listens
    await models.close()


def take_token(host: str) -> str | None:
    """The token, taken out of the environment, which the replicas inherit; None if there is none.

    Raises:
        ParamsError: it is short, or there is none and other machines could reach the server.
    """
    token = os.environ.pop(TOKEN, None)
    if token is None and host not in THIS_MACHINE:
        raise ParamsError(
            f"serve: --host {host} lets other machines in, and there is no token; set {TOKEN} ({NEW_TOKEN} makes one), "
            "or leave --host out"
        )
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise ParamsError(f"serve: {TOKEN} has {len(token)} characters; {SHORTEST_TOKEN} at least: {NEW_TOKEN}")
    return token


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ParamsError if the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=512)  # type: ignore[arg-type]
    except OSError as error:
        raise ParamsError(
            f"serve: cannot listen on {host} port {port} ({error}); end the program that does, or choose another: "
            f"m3diff serve --port {port % 65535 + 1}"
        ) from error
