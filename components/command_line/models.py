"""`m3diff models`: list the registered versions."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from m3diff.command_line.arguments import JSON
from m3diff.command_line.command import Command

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.registry import versions
    from m3diff.scoring.metrics import BY_CHARACTERS

    gate = params.promote
    score_names = list(dict.fromkeys((gate.metric, *gate.guards)))
    character_scores = [f"{score}{BY_CHARACTERS}" for score in score_names]
    listed_versions = versions.list_models(params.register_, gate.protocol, [*score_names, *character_scores])
    if args.json:
        print(json.dumps(listed_versions, indent=2))
        return
    # For captions in scripts without spaces between words, `m3diff promote` compares the scores by characters instead
    for score in character_scores:
        if any(score in version["scores"] for version in listed_versions):
            score_names.append(score)
    print(versions.format_table(listed_versions, gate.protocol, score_names))


COMMAND = Command(
    run=_run,
    arguments=(JSON,),
    examples=("m3diff models", "m3diff models --json"),
)
