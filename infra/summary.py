"""The end of `make run`: register and promote what was trained, then say what there is and what to do next."""

import json
import sys
from pathlib import Path

from components.params import Params, ParamsError, load_params
from components.records import DataError
from components.register.promotion import Promotion, promote
from components.register.stage import Registration, register

SCORES = (
    "BLEU-4",
    "METEOR",
    "ROUGE-L",
    "CIDEr",
    "change_type_accuracy",
    "change_exact_accuracy",
    "no_change_recall",
    "false_no_change",
    "CIDEr_shuffled",
)

NEXT = """next
  look at the report in a browser, and at the model's versions:   make up
  caption a pair:                                                 see README.md, "Use the model"
  try another setting beside this one:                            dvc exp run -S train.epochs=6
  run on your own pairs:                                          params.yaml, section ingest"""


def summary(params: Params, registration: Registration, decision: Promotion) -> str:
    paths = params.paths
    scores = json.loads((paths.report / "metrics.json").read_text())
    lines = [f"  {name:<22} {scores[name]:8.4f}" for name in SCORES if isinstance(scores.get(name), int | float)]
    places = [
        ("report", (paths.report / "report.html").resolve()),
        ("predictions", (paths.predictions / "predictions.json").resolve()),
        ("model", f"{registration.uri} ({registration.outcome}) in {params.register_.tracking_uri}"),
        ("gate", decision),
    ]
    return "\n".join(
        ["", "scores on the test split", *lines, "", *(f"{name:<12} {place}" for name, place in places), "", NEXT]
    )


def main() -> int:
    try:
        params = load_params(Path("params.yaml"))
        print(summary(params, register(params), promote(params)))
    except (ParamsError, DataError, ConnectionError) as error:
        print(f"make run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
