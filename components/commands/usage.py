"""What the help of each command shows, and which extra of the package it needs."""

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

GROUPS = {
    "stages, in order": "code pretrain synthesize augment ingest validate convert train predict evaluate",
    "data and scoring": "data compare score zero-shot export-llava",
    "use and share": "caption serve export",
    "model registry": "register promote rollback history models lineage restore prune",
    "set-up": "profile plan",
}
"""The commands as `m3diff --help` lists them."""

EXAMPLES = {
    "code": ("m3diff code",),
    "pretrain": ("m3diff pretrain", "m3diff --params infra/base-blip2idc.yaml pretrain"),
    "synthesize": ("m3diff synthesize minichange",),
    "augment": ("m3diff augment minichange_edits",),
    "ingest": ("m3diff ingest", "m3diff ingest mine"),
    "validate": ("m3diff validate",),
    "convert": ("m3diff convert",),
    "train": ("m3diff train",),
    "predict": ("m3diff predict",),
    "evaluate": ("m3diff evaluate", "m3diff evaluate --model champion", "m3diff evaluate --model 12 --out runs/12"),
    "data": ("m3diff data check data/01_raw/mine", "m3diff data check mine --reader pairs", "m3diff data statistics"),
    "compare": ("m3diff compare runs/a/report data/07_report --out compare.html",),
    "score": (
        "m3diff score captions.json --benchmark spot_the_diff --data spot-the-diff/",
        "m3diff score captions.csv --references references.json --json",
    ),
    "zero-shot": (
        "m3diff zero-shot --url http://127.0.0.1:8000/v1 --model Qwen/Qwen2.5-VL-7B-Instruct --limit 20",
        "m3diff zero-shot --url https://api.example.org/v1 --model NAME --out runs/name",
    ),
    "export-llava": ("m3diff export-llava llava/ --absolute",),
    "caption": (
        "m3diff caption before.png after.png --model data/05_model/checkpoint --overlay out.png",
        "m3diff caption before/ after/ --json",
        "m3diff caption pairs.csv --model champion",
    ),
    "serve": ("m3diff serve", "m3diff serve --model data/05_model/checkpoint --port 8001"),
    "export": ("m3diff export shared/model", "m3diff export shared/hub --hub", "m3diff export small --adapters"),
    "register": ("m3diff register",),
    "promote": ("m3diff promote", "m3diff promote --version 12"),
    "rollback": (
        "m3diff rollback --why 'worse on the new camera'",
        "m3diff rollback --to 9 --why 'requested by the team'",
    ),
    "history": ("m3diff history", "m3diff history --json"),
    "models": ("m3diff models", "m3diff models --json"),
    "lineage": ("m3diff lineage champion",),
    "restore": ("m3diff restore 12", "m3diff restore champion --into ../twelve"),
    "prune": ("m3diff prune --keep 5 --dry-run", "m3diff prune --keep 5 --yes"),
    "profile": ("m3diff profile one-gpu",),
    "plan": ("m3diff --params profiles/paper.yaml plan", "m3diff plan --gpu H100-80GB --utilisation 0.4"),
}
"""Examples of each command, as typed in the project's root."""

EXTRAS = {"score": "score", "augment": "augment", "caption": "serve", "serve": "serve"}
EXTRA = "train"
"""The extra of a command that EXTRAS does not name."""

SHIPPED = Path(__file__).parents[1] / "_profiles"
"""The profiles inside an installed wheel."""


def overview(texts: Mapping[str, str]) -> str:
    """Every command with its text, in groups, as wide as the terminal."""
    return "\n\n".join("\n".join(_group(title, names.split(), texts)) for title, names in GROUPS.items())


def _group(title: str, names: list[str], texts: Mapping[str, str]) -> Iterator[str]:
    width = max(shutil.get_terminal_size().columns - 2, 40)
    yield f"{title}:"
    for name in names:
        yield textwrap.fill(
            texts[name], width, initial_indent=f"  {name:<14}", subsequent_indent=" " * 16, break_on_hyphens=False
        )


def examples(command: str) -> str:
    return "examples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[command])


def not_installed(command: str, module: str) -> str:
    """What to do where a package that a command needs is missing.

    Args:
        module: as it is imported, such as `pycocoevalcap.cider.cider`.
    """
    extra = EXTRAS.get(command, EXTRA)
    package = module.partition(".")[0]
    return f"the package {package!r} is not installed here; {install(extra)} ({sys.executable})"


def install(extra: str) -> str:
    """The command that adds an extra to this installation. The project is on no index: pip takes the checkout, or the
    wheel that is installed already."""
    return f"pip install 'm3diff[{extra}]'" if SHIPPED.is_dir() else f"pip install -c constraints.txt -e '.[{extra}]'"


def profiles_folder() -> Path:
    """Where profiles are: in the working directory of a checkout, else in the wheel."""
    here = Path("profiles")
    return here if here.is_dir() or not SHIPPED.is_dir() else SHIPPED


def parameter_file(asked: Path) -> Path:
    """The parameter file of a command that runs outside a checkout too.

    Args:
        asked: what --params names.
    Returns:
        `asked`; of `params.yaml`, where it is not there, the embedded run's profile.
    """
    shipped = SHIPPED / "embedded.yaml"
    return asked if asked != Path("params.yaml") or asked.is_file() or not shipped.is_file() else shipped
