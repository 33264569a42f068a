"""`m3diff caption`: describe what changed between two images or in many pairs of images, or answer questions."""

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
    from m3diff.serving.caption import CaptionOutput
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> int:
    from m3diff.models.checkpoint import read_sample_limits
    from m3diff.registry.model_source import find, load
    from m3diff.serving.caption import answer_inputs, ask_question, check_inputs, check_question, find_inputs
    from m3diff.serving.model_card import note_on_training

    named_columns = {"before": args.before_column, "after": args.after_column}
    columns = {side: column for side, column in named_columns.items() if column is not None}
    inputs = find_inputs(args.image, args.after, args.image_root, columns or None)
    cfg = params.register_
    base = args.base or params.train.base
    source = find(cfg.tracking_uri, cfg.model_name, args.model, base, params.predict.max_new_tokens)
    # checked before the model is loaded, which may take minutes
    takes, trained_on = read_sample_limits(source.folder)
    inputs = ask_question(inputs, args.question, takes)
    check_inputs(inputs, takes, trained_on)
    captioner = load(source)
    check_question(captioner, args.question)
    training_note = note_on_training(params, source)
    if training_note is not None:
        print(f"m3diff caption: note: {training_note}", file=sys.stderr)
    outputs = answer_inputs(captioner, inputs, args.overlay, params.validate_.max_image_pixels)
    if args.json:
        has_faults = _print_json_lines(outputs, source.name, len(inputs))
    else:
        has_faults = _print_captions(outputs, len(inputs))
    return DATA_REFUSED if has_faults else 0


def _print_json_lines(outputs: Iterable[CaptionOutput], model_name: str, input_count: int) -> bool:
    """Print one JSON object per input. Return True if an input could not be answered."""
    faults = []
    for output in outputs:
        print(json.dumps(output.as_dict(model_name), ensure_ascii=False), flush=True)
        if output.fault:
            faults.append(f"{output.input.name}: {output.fault}")
    if faults:
        # stdout is often redirected to a file, so the exit code needs an explanation on the terminal
        summary = Fault("command.pairs_without_caption", count=len(faults), pairs=input_count, first=faults[0])
        print(f"m3diff caption: {summary}", file=sys.stderr)
    return bool(faults)


def _print_captions(outputs: Iterable[CaptionOutput], input_count: int) -> bool:
    """Print one answer per line, with the input's name if there are several inputs.

    Return True if an input could not be answered.
    """
    has_faults = False
    printed_notes = set[str]()
    for output in outputs:
        if output.fault:
            has_faults = True
            print(f"m3diff caption: {output.fault}", file=sys.stderr)
            continue
        caption = " ".join((output.caption or "").split())  # an untrained model may write line breaks
        print(caption if input_count == 1 else f"{output.input.name}\t{caption}", flush=True)
        if output.note and output.note not in printed_notes:
            printed_notes.add(output.note)
            print(f"m3diff caption: note: {output.note}", file=sys.stderr)
    return has_faults


COMMAND = Command(
    run=_run,
    arguments=(
        argument("image", type=Path, metavar="IMAGE", help="an image, a folder of images, or a table"),
        argument("after", type=Path, nargs="?", metavar="IMAGE", help="the image after, or a folder of such images"),
        *MODEL,
        argument("--question", metavar="TEXT", help="the question; default: the table's, or the model's"),
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
        "m3diff caption before.png after.png --question 'How many buildings are new?'",
    ),
    extra="serve",
    parameters="optional",
)
