"""`m3diff synthesize`: generate a synthetic dataset."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.arguments import find_entry
from m3diff.command_line.command import Command, argument

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    settings = find_entry("synthesize", params.synthesize, args.name)
    from m3diff.stages.synthesize.stage import synthesize

    synthesize(params.ingest.datasets[args.name].reader, settings)


COMMAND = Command(
    run=_run,
    reads="nothing: the pairs follow from the seed",
    writes="images and captions, such as data/01_raw/minichange (synthesize.minichange.root)",
    needs="an entry of this name in `synthesize` and in `ingest.datasets`",
    sections="synthesize.<name>",
    arguments=(argument("name", help="an entry of the section `synthesize`"),),
    examples=("m3diff synthesize minichange",),
)
