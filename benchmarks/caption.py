"""Compare the time of `m3diff caption` on two images with a stock script: `make bench-caption`.

    python benchmarks/caption.py                               the checkpoint in data/05_model
    python benchmarks/caption.py --version champion            also the version of an alias in the model registry
    python benchmarks/caption.py --against FOLDER --turns 6    also the command of another checkout

The stock script (benchmarks/stock_caption.py) imports the model's class and peft, loads the same folder and generates
the same tokens. A side is one of the compared commands. Every run is a fresh process, as a user would start it. Each
side first runs once without being timed, so that all files are cached in memory. The sides then take turns, and each
round starts with a different side, so that load on the machine affects all sides equally. Every run must produce the
same caption as the stock script, and the captioner of `m3diff caption` must generate the same tokens.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe_machine, write_results  # noqa: E402
from m3diff.models.checkpoint import read_manifest  # noqa: E402
from m3diff.models.generation import QUESTION, load_captioner  # noqa: E402
from m3diff.runtime import prepare  # noqa: E402
from m3diff.settings.load import load_params  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "caption.json"
CHECKPOINT = ROOT / "data" / "05_model" / "checkpoint"
STOCK = "stock"
TARGET = 1.5  # maximum ratio to the time of the stock script
PX = 128


@dataclass
class Side:
    """A compared command that captions the pair, and its measurements.

    Attributes:
        command: the command line, which prints the caption as JSON.
        folder: the working directory of the command.
        seconds: the duration of each timed run in seconds.
    """

    name: str
    command: Sequence[str]
    folder: Path
    seconds: list[float] = field(default_factory=list)

    def run(self) -> tuple[str, float]:
        """Run the command. Return the caption and the duration of the process in seconds."""
        start = time.perf_counter()
        process = subprocess.run(self.command, cwd=self.folder, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if process.returncode:
            sys.exit(f"{self.name}: exit code {process.returncode}\n{process.stderr}")
        return json.loads(process.stdout)["caption"], seconds


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Write two images and return their paths. The second image has a disc that the first image does not have."""
    paths = (folder / "before.png", folder / "after.png")
    for path in paths:
        image = Image.new("RGB", (PX, PX), (180, 180, 180))
        drawing = ImageDraw.Draw(image)
        drawing.rectangle((12, 12, 44, 44), fill=(200, 40, 40))
        if path == paths[1]:
            drawing.ellipse((76, 76, 108, 108), fill=(40, 60, 200))
        image.save(path)
    return paths


def path_of_m3diff(checkout: Path) -> str:
    """Return the path of a checkout's `m3diff` command."""
    return str(checkout / ".venv" / "bin" / "m3diff")


def make_sides(arguments: argparse.Namespace, pair: tuple[Path, Path], max_new_tokens: int) -> list[Side]:
    """Return the compared commands: the stock script, `m3diff caption`, and those of --version and --against."""
    model = str(arguments.model)
    images = [str(path) for path in pair]
    stock_script = [sys.executable, str(ROOT / "benchmarks" / "stock_caption.py")]
    stock_command = [*stock_script, model, *images, QUESTION, str(max_new_tokens)]
    caption_command = ["caption", *images, "--json", "--model"]
    sides = [
        Side(name=STOCK, command=stock_command, folder=ROOT),
        Side(name="m3diff caption", command=[path_of_m3diff(ROOT), *caption_command, model], folder=ROOT),
    ]
    if arguments.version:
        command = [path_of_m3diff(ROOT), *caption_command, arguments.version]
        sides.append(Side(name=f"m3diff caption --model {arguments.version}", command=command, folder=ROOT))
    if arguments.against:
        other_checkout = arguments.against.resolve()
        sides.append(
            Side(
                name=f"m3diff caption of {other_checkout.name}",
                command=[path_of_m3diff(other_checkout), *caption_command, model],
                folder=other_checkout,
            )
        )
    return sides


@torch.inference_mode()
def captioner_tokens(checkpoint: Path, pair: tuple[Path, Path], max_new_tokens: int) -> list[int]:
    """Return the token IDs that the captioner of `m3diff caption` generates for the pair."""
    captioner = load_captioner(checkpoint, max_new_tokens)
    generated: list[torch.Tensor] = []
    generate = captioner.model.generate

    def record(**inputs: Any) -> torch.Tensor:
        tokens = generate(**inputs)
        generated.append(tokens[0, inputs["input_ids"].shape[1] :])
        return tokens

    captioner.model.generate = record
    before, after = (Image.open(image, formats=["PNG"]) for image in pair)
    captioner.caption([(before, after)])
    return generated[0].tolist()


def compare(sides: list[Side], turns: int) -> str:
    """Time every side `turns` times and return the caption, which must be the same in every run."""
    captions = {side.name: side.run()[0] for side in sides}
    assert len(set(captions.values())) == 1, f"the captions differ: {captions}"
    caption = captions[STOCK]
    for turn in range(turns):
        start = turn % len(sides)
        for side in sides[start:] + sides[:start]:
            answer, seconds = side.run()
            assert answer == caption, f"{side.name}: {answer!r}, not {caption!r}"
            side.seconds.append(seconds)
            print(f"turn {turn + 1} of {turns}: {seconds:6.2f} s  {side.name}", flush=True)
    return caption


def summarize(sides: list[Side]) -> dict[str, dict[str, Any]]:
    """Return each side's durations, the median duration, and the median ratio to the stock script's time.

    Each ratio compares two durations of the same turn.
    """
    stock_seconds = sides[0].seconds
    rows = {}
    for side in sides:
        ratios = [seconds / stock for seconds, stock in zip(side.seconds, stock_seconds, strict=True)]
        rows[side.name] = {
            "median_s": statistics.median(side.seconds),
            "times_stock": statistics.median(ratios),
            "seconds": side.seconds,
        }
    return rows


def main() -> None:
    """Time all sides, print the medians and write the results."""
    prepare()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="checkpoint of M3Diff; default: the run's")
    parser.add_argument("--version", metavar="NAME", help="also time this version or alias of the same weights")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout with its .venv")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.model = arguments.model.resolve()
    family = read_manifest(arguments.model)["family"]
    if family != "m3diff":
        sys.exit(f"{arguments.model} is of the family {family}, but the stock script loads only m3diff")
    facts = describe_machine()
    max_new_tokens = load_params(ROOT / "params.yaml").predict.max_new_tokens
    with TemporaryDirectory() as folder:
        pair = write_pair(Path(folder))
        sides = make_sides(arguments, pair, max_new_tokens)
        stock = subprocess.run(sides[0].command, cwd=ROOT, capture_output=True, text=True, check=True)
        tokens = json.loads(stock.stdout)["tokens"]
        assert captioner_tokens(arguments.model, pair, max_new_tokens) == tokens, "the captioner generates other tokens"
        caption = compare(sides, arguments.turns)
    result = summarize(sides)
    for name, row in result.items():
        print(f"{row['median_s']:6.2f} s  {row['times_stock']:5.2f} x stock (at most {TARGET})  {name}")
    write_results(
        {"machine": facts, "caption": caption, "tokens": tokens, "sides": result, "target": TARGET}, arguments.out
    )


if __name__ == "__main__":
    main()
