"""Implement `m3diff serve`: load the model, listen for requests, and follow an alias in the model registry."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from m3diff.endpoint.url import THIS_MACHINE
from m3diff.registry.model_source import Source, find, resolve_version
from m3diff.serving import limits
from m3diff.serving.app import Server
from m3diff.serving.batcher import Metrics, Models, deployer
from m3diff.serving.model_card import build_model_card
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params

TOKEN = "M3DIFF_SERVE_TOKEN"
MIN_TOKEN_CHARS = 16
MAKE_TOKEN = "python -c 'import secrets; print(secrets.token_hex())'"
POLL_S = 5  # seconds between checks of the alias


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line to a stream (stdout by default).

    If the stream has been closed, as in `m3diff serve | head`, the server keeps running and drops later lines.
    """
    stream = stream or sys.stdout
    try:
        print(f"m3diff serve: {text}", file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


async def print_notes(models: Models) -> None:
    """Print why information is missing from the current model's card."""
    if models.current is not None:
        card = await models.current.card
        for note in card.notes:
            print_line(note)


class HeadTimeoutProtocol(H11Protocol):
    """uvicorn's HTTP protocol with a time limit: a request's head must arrive within UPLOAD_S seconds.

    Otherwise, the connection is closed. uvicorn 0.54 does not have such a limit. `Upload` limits the time for the body.
    """

    timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request on the connection."""
        super().connection_made(transport)
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        """Process incoming data. Stop the timer after the head of a request, and restart it before the next request."""
        super().data_received(data)
        self._set_timer()

    def _set_timer(self) -> None:
        is_waiting_for_head = self.conn.their_state is h11.IDLE
        if is_waiting_for_head and self.timer is None:
            self.timer = self.loop.call_later(limits.UPLOAD_S, self.transport.close)
        elif not is_waiting_for_head and self.timer is not None:
            self.timer.cancel()
            self.timer = None


async def follow_alias(
    models: Models, find_version: Callable[[], str], find_source: Callable[[], Source], poll_s: float
) -> None:
    """Check every `poll_s` seconds which version the alias points to, and switch to it if it has changed.

    If this fails, print the error and try again at the next check. The current model keeps answering requests.

    Args:
        find_version: a function that returns the version the alias points to.
        find_source: a function that returns the checkpoint of that version.
    """
    last_failure = ""
    while True:
        await asyncio.sleep(poll_s)
        assert models.current is not None
        current_name = models.current.facts.name
        try:
            if await asyncio.to_thread(find_version) != current_name:
                source = await asyncio.to_thread(find_source)
                await models.switch(source)
                print_line(f"now answers with {source.name}")
                await print_notes(models)
            last_failure = ""
        except Exception as error:  # MLflow or Ray failed, or a checkpoint is damaged
            models.metrics.poll_failures.inc()
            if str(error) != last_failure:
                print_line(f"keeps answering with {current_name}; cannot load the next version: {error}", sys.stderr)
            last_failure = str(error)


def serve(params: Params, model: str, base: Path, host: str, port: int) -> None:
    """Serve requests until the process receives SIGTERM, SIGINT or (unless it runs under nohup) SIGHUP.

    After the signal, new requests are refused and requests in progress are completed.

    Args:
        model: a checkpoint folder, a version number or an alias. If an alias is moved to another version, the server
            switches to that version.
        base: the folder of the base model, which is needed if the checkpoint contains only adapters.

    Raises:
        ParamsError: the address cannot be used, other machines could reach the server without a token, or several
            replicas are configured without a cluster.
        DataError: the model does not exist, or its checkpoint is damaged.
    """
    cfg = params.serve
    model_name = params.register_.model_name
    tracking_uri = params.register_.tracking_uri
    is_alias = not (Path(model).is_dir() or model.isdecimal())

    def find_source() -> Source:
        return find(tracking_uri, model_name, model, base, params.predict.max_new_tokens)

    def find_version() -> str:
        return resolve_version(tracking_uri, model_name, model)

    async def keep_model_current() -> None:
        """Load the first model, then follow the alias or wait forever."""
        await models.switch(source)
        print_line(f"{url_of(listener)} answers with {source.name}")
        await print_notes(models)
        if is_alias:
            await follow_alias(models, find_version, find_source, POLL_S)
        await asyncio.Event().wait()

    token = take_token(host)
    with listening_socket(host, port) as listener:
        source = find_source()
        with deployer(cfg, params.compute) as deploy:
            models = Models(deploy, Metrics(), partial(build_model_card, params))
            server = Server(cfg, models, model_name, token)
            asyncio.run(run(server, listener, cfg.answer_s, models, keep_model_current))


async def run(
    application: Server, listener: socket.socket, answer_s: float, models: Models, keep_model_current: Callable[[], Any]
) -> None:
    """Answer requests and keep the model current until a signal arrives, then shut down.

    Requests are accepted immediately, before the first model is loaded.

    Args:
        answer_s: maximum time for an answer in seconds. Shutdown waits for requests in progress at most this long plus
            UPLOAD_S.
        keep_model_current: a coroutine function that loads the first model and follows its alias.
    """
    config = uvicorn.Config(
        application,
        http=HeadTimeoutProtocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(limits.UPLOAD_S + answer_s) + 1,
    )
    server = uvicorn.Server(config)
    stop_event = stop_on_signals()
    # The public method `serve` would raise the signal again after shutdown
    server_task = asyncio.create_task(server._serve([listener]))
    model_task = asyncio.create_task(keep_model_current())
    signal_task = asyncio.create_task(stop_event.wait())
    await asyncio.wait((server_task, model_task, signal_task), return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    if model_task.done():
        await server_task
        model_task.result()  # raises the error that kept the first model from loading
    print_line("stops after it has answered the requests in progress")
    model_task.cancel()
    await server_task
    await models.close()


def stop_on_signals() -> asyncio.Event:
    """Return an event that is set by SIGTERM, SIGINT and SIGHUP. Under nohup, SIGHUP is still ignored."""
    stop_event = asyncio.Event()
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, stop_event.set)
    return stop_event


def take_token(host: str) -> str | None:
    """Return the server's token, or None if it is not set.

    The token is removed from the environment, because replicas inherit the environment.

    Raises:
        ParamsError: the token is too short, or it is missing and other machines could reach the server.
    """
    token = os.environ.pop(TOKEN, None)
    if token is None and host not in THIS_MACHINE:
        raise ParamsError("serving.no_token", host=host, variable=TOKEN, command=MAKE_TOKEN)
    if token is not None and len(token) < MIN_TOKEN_CHARS:
        raise ParamsError(
            "serving.short_token", variable=TOKEN, value=len(token), limit=MIN_TOKEN_CHARS, command=MAKE_TOKEN
        )
    return token


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ParamsError: the address is in use or does not belong to this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=512)  # type: ignore[arg-type]
    except OSError as error:
        next_port = port % 65535 + 1
        raise ParamsError(
            "serving.address_not_free", host=host, port=port, cause=str(error), expected=next_port
        ) from error


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    address, port = listener.getsockname()[:2]
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}"
