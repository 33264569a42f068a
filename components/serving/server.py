"""`m3diff serve`: captions over HTTP. One process listens, replicas of Ray Serve hold the model."""

import asyncio
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from m3diff.registry.model_source import Source, find, version_of
from m3diff.serving.metrics import say
from m3diff.serving.params import Serve
from m3diff.settings.compute import Compute
from m3diff.settings.section import ParamsError
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.register.params import Register

TOKEN = "M3DIFF_SERVE_TOKEN"
SHORTEST_TOKEN = 16
NEW_TOKEN = "python -c 'import secrets; print(secrets.token_hex())'"
BACKLOG = 512
POLL_S = 5
"""Seconds between two checks of which version the alias names."""


def serve(
    cfg: Serve,
    register: Register,
    compute: Compute,
    entries: Mapping[str, DatasetEntry],
    clean: Path,
    model: str,
    base: Path,
    max_new_tokens: int,
    host: str,
    port: int,
) -> None:
    """Answer requests until SIGTERM, SIGINT or, unless nohup started it, SIGHUP; then take no new one and answer those
    that are there.

    Args:
        clean: validate's folder, for examples on the page; it need not be there.
        model: a folder or a version's number, which stay as they are; or an alias, which is followed.
        base, max_new_tokens: as in `model_source.find`.

    Raises:
        ParamsError: the address is taken, or others could reach it without a token.
        DataError: there is no such model, or its checkpoint is damaged.
    """
    token = take_token(host)
    with listening(host, port) as listener:
        source = find(register.tracking_uri, register.model_name, model, base, max_new_tokens)
        followed = not (Path(model).is_dir() or model.isdecimal())

        def find_now() -> Source:
            return find(register.tracking_uri, register.model_name, model, base, max_new_tokens)

        def version_now() -> str:
            return version_of(register.tracking_uri, register.model_name, model)

        from m3diff.serving.app import Server, make_app
        from m3diff.serving.deploy import Deployer, ray_serve
        from m3diff.serving.examples import find_examples
        from m3diff.serving.metrics import Metrics
        from m3diff.serving.models import Models

        with ray_serve(compute):
            metrics = Metrics()
            models = Models(Deployer(cfg, compute), metrics)
            server = Server(cfg, models, metrics, register.model_name, find_examples(clean, entries))
            app = make_app(server, token)
            follow = (version_now, find_now) if followed else None
            asyncio.run(run(app, listener, cfg, models, source, follow))


async def run(
    app: Any,
    listener: socket.socket,
    cfg: Serve,
    models: Any,
    source: Source,
    follow: tuple[Callable[[], str], Callable[[], Source]] | None,
) -> None:
    """Listen at once, load the model, say that it is ready, and go on until a signal."""
    import uvicorn

    from m3diff.serving.connections import impatient
    from m3diff.serving.http import UPLOAD_S

    config = uvicorn.Config(
        app,
        http=impatient(UPLOAD_S),
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(UPLOAD_S + cfg.answer_s) + 1,
    )
    server, stopped = uvicorn.Server(config), asyncio.Event()
    loop = asyncio.get_running_loop()
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
        loop.add_signal_handler(number, stopped.set)
    listens = asyncio.create_task(server._serve([listener]))  # `serve` would raise the signal again when it is done
    works = asyncio.create_task(work(models, source, follow, address_of(listener)))
    stops = asyncio.create_task(stopped.wait())
    await asyncio.wait((listens, works, stops), return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    if works.done():
        await listens
        works.result()  # the first model could not be loaded
    say("stops; answers what was asked")
    works.cancel()
    await listens
    await models.close()


async def work(models: Any, source: Source, follow: Any, address: str) -> None:
    """Load the first model, then follow the alias, or wait for ever."""
    await models.switch(source)
    say(f"{address} answers with {source.name}")
    if follow is None:
        await asyncio.Event().wait()
    else:
        await models.follow(*follow, POLL_S)


def take_token(host: str) -> str | None:
    """The token, taken out of the environment, which the replicas inherit; None where there is none.

    Raises:
        ParamsError: it is short, or there is none and other machines could reach the server.
    """
    token = os.environ.pop(TOKEN, None)
    if token is None and not is_loopback(host):
        raise ParamsError(
            f"serve: --host {host} lets other machines in, and there is no token; set {TOKEN} ({NEW_TOKEN} makes one), "
            "or leave --host out"
        )
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise ParamsError(f"serve: {TOKEN} has {len(token)} characters; {SHORTEST_TOKEN} at least: {NEW_TOKEN}")
    return token


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ParamsError where the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)  # type: ignore[arg-type]
    except OSError as error:
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ParamsError(
            f"serve: cannot listen on {host} port {port} ({why}); end the program that does, or choose another: "
            f"m3diff serve --port {port % 65535 + 1}"
        ) from error


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
