"""`m3diff caption`: describe what changed between two images, or in many pairs of images."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from m3diff.command_line.arguments import FOLDER, MODEL
from m3diff.command_line.command import Command, argument, flag
from m3diff.command_line.exit_codes import DATA_REFUSED
from m3diff.records.errors import Fault

if TYPE_CHECKING:
    from m3diff.serving.caption import PairCaption
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> int:
    from m3diff.registry.model_source import find, load
    from m3diff.serving.caption import caption_pairs, find_pairs
    from m3diff.serving.model_card import note_on_training

    named_columns = {"before": args.before_column, "after": args.after_column}
    columns = {side: column for side, column in named_columns.items() if column is not None}
    pairs = find_pairs(args.before, args.after, args.image_root, columns or None)
    cfg = params.register_
    base = args.base or params.train.base
    source = find(cfg.tracking_uri, cfg.model_name, args.model, base, params.predict.max_new_tokens)
    captioner = load(source)
    training_note = note_on_training(params, source)
    if training_note is not None:
        print(f"m3diff caption: note: {training_note}", file=sys.stderr)
    answers = caption_pairs(captioner, pairs, args.question, args.overlay, params.validate_.max_image_pixels)
    if args.json:
        has_faults = _print_json_lines(answers, source.name, len(pairs))
    else:
        has_faults = _print_captions(answers, len(pairs))
    return DATA_REFUSED if has_faults else 0


def _print_json_lines(answers: Iterable[PairCaption], model_name: str, pair_count: int) -> bool:
    """Print one JSON object per pair. Return True if no caption could be generated for a pair."""
    faults = []
    for answer in answers:
        print(json.dumps(answer.as_dict(model_name), ensure_ascii=False), flush=True)
        if answer.fault:
            faults.append(f"{answer.pair.name}: {answer.fault}")
    if faults:
        # stdout is often redirected to a file, so the exit code needs an explanation on the terminal
        summary = Fault("command.pairs_without_caption", count=len(faults), pairs=pair_count, first=faults[0])
        print(f"m3diff caption: {summary}", file=sys.stderr)
    return bool(faults)


def _print_captions(answers: Iterable[PairCaption], pair_count: int) -> bool:
    """Print one caption per line, with the pair's name if there are several pairs.

    Return True if no caption could be generated for a pair.
    """
    has_faults = False
    printed_notes = set[str]()
    for answer in answers:
        if answer.fault:
            has_faults = True
            print(f"m3diff caption: {answer.fault}", file=sys.stderr)
            continue
        caption = " ".join((answer.caption or "").split())  # an untrained model may write line breaks
        print(caption if pair_count == 1 else f"{answer.pair.name}\t{caption}", flush=True)
        if answer.note and answer.note not in printed_notes:
            printed_notes.add(answer.note)
            print(f"m3diff caption: note: {answer.note}", file=sys.stderr)
    return has_faults


COMMAND = Command(
    run=_run,
    arguments=(
        argument("before", type=Path, help="an image, a folder of images, or a table of pairs"),
        argument("after", type=Path, nargs="?", help="an image, or a folder of images"),
        *MODEL,
        argument("--question", metavar="TEXT", help="the question for each pair; default: what changed"),
        argument("--before", dest="before_column", metavar="COLUMN", help="the table's column of the images before"),
        argument("--after", dest="after_column", metavar="COLUMN", help="the table's column of the images after"),
        argument("--image-root", **FOLDER, help="a folder outside the table's that its paths may lead into"),
        argument("--overlay", type=Path, metavar="PNG", help="draw what the model looked at; for many pairs, a folder"),
        flag("--json", "print one JSON object per line"),
    ),
    examples=(
        "m3diff caption before.png after.png --model data/05_model/checkpoint --overlay out.png",
        "m3diff caption before/ after/ --json",
        "m3diff caption pairs.csv --before Vorher --after Nachher --model champion",
    ),
    extra="serve",
    parameters="optional",
)
