"""The end of `make run`: register and promote what was trained, then say what there is and what to do next."""

import io
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from components.evaluate.summary import HEADLINE
from components.params import Params, ParamsError, load_params
from components.promote.promote import Promotion, promote
from components.records import DataError
from components.register.stage import Registration, register

REAL_VOCABULARY = 10_000  # tokens; of a language, tens of thousands

NEXT = """next
  compare runs and versions in a browser:     make up
  try the model on a page, over HTTP:         make serve
  caption two images:                         m3diff caption BEFORE AFTER
  try another setting beside this one:        dvc exp run -S train.epochs=6
  your own pairs, in six steps:               docs/your-data.md

Commands are in .venv: ./m3diff works as it is, and after `. .venv/bin/activate` so do all those of README.md"""


def summary(params: Params, registration: Registration, decision: Promotion) -> str:
    paths = params.paths
    protocols = json.loads((paths.report / "metrics.json").read_text())["protocols"]
    trained = json.loads((paths.model / "report.json").read_text())
    places = [
        ("report", (paths.report / "report.html").resolve()),
        ("predictions", (paths.predictions / "predictions.json").resolve()),
        ("model", f"{registration.uri} ({registration.outcome}) in {params.register_.tracking_uri}"),
        ("gate", decision),
    ]
    rows = [*places, *(("warning", f"training: {text}") for text in trained.get("warnings", []))]
    told = [*headlines(protocols), *(f"{name:<12} {value}" for name, value in rows)]
    return "\n".join(["", *told, *limits(params.train.base), "", NEXT])


def limits(base: Path) -> Iterator[str]:
    """What a model from this base is for, where the base is one of drawn scenes."""
    config = json.loads((base / "config.json").read_text())
    vocabulary, side = config["text_config"]["vocab_size"], config["vision_config"]["image_size"]
    if vocabulary < REAL_VOCABULARY:
        yield f"good for     showing that the pipeline works: it describes MiniChange's scenes, drawn at {side} px"
        yield f"not good for other images or words: its base knows {vocabulary} tokens. Your pairs need a real one:"
        yield "             `m3diff profile small` (0.5 B parameters), `one-gpu` or `paper` (7 B) name one"


def headlines(protocols: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The scores of each dataset's first protocol, which is its headline, with their intervals."""
    shown: set[str] = set()
    for name, found in protocols.items():
        dataset = name.partition("/")[0]
        if dataset in shown:
            continue
        shown.add(dataset)
        published = found.get("published_pairs")
        of = "" if published in (None, found["pairs"]) else f" of {published} that papers score"
        yield f"scores on {name}, {found['pairs']} pairs{of}; times 100, with 95 % intervals over pairs"
        for score in HEADLINE:
            if isinstance(value := found.get(score), int | float):
                interval = found["intervals"].get(score)
                bounds = f"   {100 * interval['low']:.1f} to {100 * interval['high']:.1f}" if interval else ""
                yield f"  {score:<22} {100 * value:6.1f}{bounds}"
        yield ""


@contextmanager
def hushed() -> Iterator[None]:
    """What tools say to stderr is shown only where they fail."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
    except BaseException:
        print(said.getvalue(), end="", file=sys.stderr)
        raise


def main() -> int:
    try:
        params = load_params(Path("params.yaml"))
        with hushed():
            registration = register(params)
            decision = promote(params, registration.version)
        print(summary(params, registration, decision))
    except (ParamsError, DataError, ConnectionError) as error:
        print(f"make run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
