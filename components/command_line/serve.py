"""`m3diff serve`: serve captions over HTTP."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.arguments import MODEL, parse_port
from m3diff.command_line.command import Command, argument

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.serving.server import serve

    serve(params, args.model, args.base or params.train.base, args.host, args.port or params.serve.port)


COMMAND = Command(
    run=_run,
    arguments=(
        *MODEL,
        argument("--host", default="127.0.0.1", help="default: 127.0.0.1; any other needs M3DIFF_SERVE_TOKEN"),
        argument("--port", type=parse_port, metavar="N", help="default: serve.port"),
    ),
    examples=("m3diff serve", "m3diff serve --model data/05_model/checkpoint --port 8001"),
    extra="serve",
    parameters="optional",
)
