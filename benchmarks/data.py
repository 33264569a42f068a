"""Speed of ingest, validate and convert, on the real path: `make bench-data` -> benchmarks/results/data.json.

    python benchmarks/data.py                                        this checkout
    python benchmarks/data.py --against FOLDER --turns 6 --folder D  this checkout and another one, by turns

There are two inputs. The *mixture* has the paper's size: the published counts (145,377 pairs of the train and
validation splits, 896,000 captions), captions of the right number and length, and small images under hard-linked names;
the two images of a pair differ. OmniDiff has its own layout, since the gate of the paper's profile is of its protocol;
the others are pairs of one's own. Of CLEVR-DC's captions no count is published; they are the remainder, 9.2 a pair. For
each size the mixture is written and ingested. Then one fresh process runs the command line's `validate` and `convert`
(cold: interpreter, imports and all), and again (warm). The outputs of every run must be the same bytes. Peak memory is
that of the process and its workers together.

The *pictures* are 5,000 distinct pairs of 512 x 512 pixels, half JPEG and half PNG, each of which is decoded. One fresh
process runs `ingest` without an image cache, another one `validate`.

`--against` measures the checkout in FOLDER with this copy of the benchmark on the same files, each checkout by its own
interpreter (FOLDER/.venv) and parameters. The checkouts take turns and alternate in going first. Of each duration the
table has the ratio of this checkout to the other with its 95 % interval: Student's t over the logarithms of the turns'
ratios. `--folder` keeps both inputs for a later call; delete it after a change of what this file draws.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import yaml
from PIL import Image
from scipy.stats import t as student_t

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import machine, write  # noqa: E402
from benchmarks.pictures import PX, write_picture_pair  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "data.json"
AGAINST_RESULTS = ROOT / "benchmarks" / "results" / "data_against.json"
RUN_STAGES = ROOT / "benchmarks" / "run_stages.py"
SIZES = (100_000, 300_000, 896_000)
WARM_RUNS = 3
TURNS = 6
TARGETS = {"cold_s": 15, "warm_s": 6, "peak_rss_mb": 1500}
RATIO_LIMITS = {"ingest_s": 1.15, "cold_s": 1.05, "warm_s": 1.05}  # of the upper end of the interval

SAMPLES = 896_000
SMALL_IMAGES = 64  # of each format; 32 before and 32 after. ext4 allows 65,000 names of a file
PICTURE_PAIRS = 5_000
PICTURES = "pictures"  # the name of their dataset

Captions = list[list[str]]
Splits = dict[str, Captions]  # the captions of every pair, by split


class Part(NamedTuple):
    """A dataset at full size: pairs and captions of train and val, words of a caption, words in use."""

    pairs: tuple[int, int]
    captions: tuple[int, int]
    words: tuple[int, int]  # fewest and most; the mean lies half-way
    vocabulary: int


PARTS = {
    "omnidiff_real": Part((7_007, 799), (7_007, 799), (20, 100), 3_793),
    "omnidiff_render": Part((5_445, 777), (5_445, 777), (20, 100), 3_793),
    "spot_the_diff": Part((8_566, 1_493), (17_623, 3_304), (3, 18), 2_400),
    "iedit": Part((3_061, 383), (3_061, 1_149), (2, 13), 2_000),
    "birds_to_words": Part((2_685, 325), (12_890, 1_556), (12, 53), 2_500),
    "clevr_change": Part((67_660, 3_976), (419_640, 24_660), (6, 14), 72),
    "clevr_dc": Part((40_800, 2_400), (375_978, 22_111), (5, 11), 83),
}
OMNIDIFF = ("omnidiff_real", "omnidiff_render")
OWN = {"reader": "pairs", "options": {"manifest": "pairs.json"}}


@dataclass(frozen=True)
class Checkout:
    """A checkout that is measured: its folder and the interpreter that imports its package."""

    name: str
    folder: Path
    python: str


class SmallImages:
    """A pool of small images, linked under as many names as a mixture needs.

    The images before are dark and those after are bright, so those of a pair differ in every cell of a thumbnail: no
    rule takes one for the other.
    """

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(SMALL_IMAGES)
        self.folder = folder
        folder.mkdir(parents=True)
        for number in range(SMALL_IMAGES // 2):
            dark = rng.integers(0, 100, (8, 8), dtype=np.uint8)
            bright = rng.integers(156, 256, (8, 8), dtype=np.uint8)
            for side, cells in (("before", dark), ("after", bright)):
                image = Image.fromarray(cells).resize((16, 16), Image.Resampling.NEAREST)
                for ending in ("png", "jpg"):
                    image.save(folder / f"{side}_{number}.{ending}")

    def link_pair(self, number: int, before: Path, after: Path) -> None:
        """Give two images of the pool these names. 1,024 pairs in a row have 1,024 combinations of images."""
        half = SMALL_IMAGES // 2
        sources = {"before": number % half, "after": (number // half) % half}
        for side, path in (("before", before), ("after", after)):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(self.folder / f"{side}_{sources[side]}{path.suffix}", path)


def write_mixture(root: Path, samples: int = SAMPLES) -> dict[str, Part]:
    """Write the datasets of the mixture to `root`/<name>, unless an earlier call did; return their sizes."""
    parts = _scaled(samples)
    if root.exists():
        return parts
    unfinished = _empty_folder(root)
    images = SmallImages(unfinished / "small_images")
    rng = np.random.default_rng(896)
    for name, part in parts.items():
        splits = {split: _captions(rng, part, which) for which, split in enumerate(("train", "val"))}
        (unfinished / name).mkdir()
        _write_pairs(unfinished / name, splits, images, name in OMNIDIFF)
    unfinished.rename(root)
    return parts


def write_pictures(root: Path, pairs: int = PICTURE_PAIRS) -> None:
    """Write the dataset of pictures to `root`, unless an earlier call did: a tenth each for validation and test."""
    if root.exists():
        return
    unfinished = _empty_folder(root)
    rng = np.random.default_rng(PICTURE_PAIRS)
    part = Part((pairs, 0), (2 * pairs, 0), (5, 20), 2_000)
    rows = []
    for number, captions in enumerate(_captions(rng, part, 0)):
        ending = ("jpg", "png")[number % 2]
        split = {0: "test", 1: "val"}.get(number // 2 % 10, "train")
        sides = {side: f"{number // 1000}/{number}_{side}.{ending}" for side in ("before", "after")}
        rows.append({**sides, "captions": captions, "split": split})
        (unfinished / sides["before"]).parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor() as pool:
        befores = [unfinished / row["before"] for row in rows]
        afters = [unfinished / row["after"] for row in rows]
        list(pool.map(write_picture_pair, range(pairs), befores, afters, chunksize=8))
    (unfinished / "pairs.json").write_text(json.dumps(rows), "utf-8")
    unfinished.rename(root)


def _empty_folder(root: Path) -> Path:
    """A new folder beside `root`, to be renamed when complete: an interrupted call leaves no half input."""
    unfinished = root.with_name(f"{root.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def _scaled(samples: int) -> dict[str, Part]:
    """Every part cut down alike; CLEVR-DC takes what rounding leaves, so that the sum is exact."""
    share, parts = samples / SAMPLES, {}
    for name, part in PARTS.items():
        train, val = (round(number * share) for number in part.pairs)
        captions = round(part.captions[0] * share), round(part.captions[1] * share)
        parts[name] = part._replace(pairs=(train, val), captions=captions)
    rest = samples - sum(sum(part.captions) for part in parts.values())
    last = parts["clevr_dc"]
    parts["clevr_dc"] = last._replace(captions=(last.captions[0] + rest, last.captions[1]))
    return parts


def _captions(rng: np.random.Generator, part: Part, which: int) -> Captions:
    """Captions of every pair of one split, dealt out evenly; numbered, since training drops repeats within a pair."""
    pairs, captions = part.pairs[which], part.captions[which]
    words = _words(part.vocabulary)
    lengths = rng.integers(part.words[0], part.words[1] + 1, captions)
    sampled = rng.integers(0, len(words), lengths.sum())
    ends = np.concatenate([[0], lengths.cumsum()])
    texts = [" ".join(words[index] for index in sampled[start:end].tolist()) for start, end in pairwise(ends)]
    cuts = (np.arange(pairs + 1) * captions) // pairs
    return [[f"{text} {number}" for number, text in enumerate(texts[start:end])] for start, end in pairwise(cuts)]


def _words(number: int) -> list[str]:
    """Made-up words of two or three syllables, five letters in the mean."""
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    stems = syllables + [first + second for first in syllables for second in syllables]
    return [stem + "rn"[index % 2] for index, stem in enumerate(stems)][:number]


def _write_pairs(root: Path, splits: Splits, images: SmallImages, is_omnidiff: bool) -> None:
    """A JSON list of pairs with their images; a caption of OmniDiff is a text of several sentences."""
    ending = "jpg" if is_omnidiff else "png"
    captions_of_pairs = [(split, captions) for split, pairs in splits.items() for captions in pairs]
    rows = []
    for number, (split, captions) in enumerate(captions_of_pairs):
        before = f"{number // 1000}/{number}_before.{ending}"
        after = f"{number // 1000}/{number}_after.{ending}"
        images.link_pair(number, root / before, root / after)
        row: dict[str, Any] = {"before": before, "after": after, "captions": captions, "split": split}
        if is_omnidiff:
            words = captions[0].split()
            sentences = [" ".join(words[start : start + 24]) for start in range(0, len(words), 24)]
            row |= {"captions": ". ".join(sentences) + ".", "change_types": ["addition"]}
        rows.append(row)
    (root / ("annotations.json" if is_omnidiff else "pairs.json")).write_text(json.dumps(rows), "utf-8")


def write_params(checkout: Checkout, work: Path, entries: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write `work`/params.yaml: the checkout's own parameters with these datasets, and outputs below `work`.

    The mixture is converted as the checkout's profile of the paper says.
    """
    params = yaml.safe_load((checkout.folder / "params.yaml").read_text("utf-8"))
    profile = yaml.safe_load((checkout.folder / "profiles" / "paper.yaml").read_text("utf-8"))
    for name, path in params["paths"].items():
        if name != "base":
            params["paths"][name] = str(work / Path(path).name)
    params["synthesize"] = {}
    params["ingest"]["datasets"] = dict(entries)
    params["compute"]["scratch"] = str(work / "runs")
    if PICTURES in entries:
        params["promote"] |= {"protocol": f"{PICTURES}/test", "guards": {}}
    else:
        params["convert"] |= profile["convert"]
        params["promote"] |= profile["promote"]  # a gate on these datasets
    work.mkdir(parents=True, exist_ok=True)
    path = work / "params.yaml"
    path.write_text(yaml.safe_dump(params, sort_keys=False), "utf-8")
    return path


def mixture_entries(root: Path, parts: Mapping[str, Part]) -> dict[str, dict[str, Any]]:
    """The entries of the mixture's datasets. Validation splits train, as the paper's 145k pairs ask."""
    return {
        name: {
            **({"reader": "omnidiff"} if name in OMNIDIFF else OWN),
            "root": str(root / name),
            "train_on": ["train", "val"],
            "expected_pairs": {"train": part.pairs[0], "val": part.pairs[1]},
        }
        for name, part in parts.items()
    }


def run_stages(
    checkout: Checkout,
    params: Path,
    commands: Sequence[Sequence[str]],
    outputs: Sequence[Path] = (),
    warm_runs: int = 0,
) -> dict[str, Any]:
    """The figures of `run_stages.py` in a fresh process of the checkout, and the peak of memory of it and its workers.

    Raises:
        RuntimeError: a command fails, or the process imports another checkout.
        AssertionError: the outputs of two runs differ.
    """
    order = {
        "params": str(params),
        "commands": [list(command) for command in commands],
        "outputs": [str(folder) for folder in outputs],
        "warm_runs": warm_runs,
        "started": time.time(),
    }
    command = [checkout.python, "-P", str(RUN_STAGES), json.dumps(order)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=checkout.folder, stdout=subprocess.PIPE, stderr=errors, text=True)
        peak, is_done = [0.0], threading.Event()
        watch = threading.Thread(target=_watch, args=(process.pid, peak, is_done))
        watch.start()
        output, _ = process.communicate()
        is_done.set()
        watch.join()
        errors.seek(0)
        if process.returncode != 0:
            raise RuntimeError(f"{checkout.folder}: {commands} failed:\n{errors.read()[-4000:]}")
    figures = json.loads(output.splitlines()[-1])
    package = (checkout.folder / "components").resolve()
    if Path(figures["package"]) != package:
        raise RuntimeError(f"{checkout.python} imports {figures['package']}; run `make install` in {checkout.folder}")
    assert len(set(figures["digests"])) == 1, "the same input gave different bytes"
    return figures | {"peak_rss_mb": max(peak[0] / 1e6, figures["own_peak_mb"])}


def _watch(pid: int, peak: list[float], is_done: threading.Event) -> None:
    """Keep the largest sum of the process's and its descendants' memory, in bytes; shared pages count for each of them.

    It looks ten times a second. A look takes a millisecond from what is measured.
    """
    process = psutil.Process(pid)
    while not is_done.wait(0.1):
        try:
            family = [process, *process.children(recursive=True)]
            peak[0] = max(peak[0], sum(member.memory_info().rss for member in family))
        except psutil.NoSuchProcess:
            continue


def ingest_mixture(checkout: Checkout, params: Path) -> None:
    """Ingest every dataset of a parameter file, in one process."""
    names = yaml.safe_load(params.read_text("utf-8"))["ingest"]["datasets"]
    run_stages(checkout, params, [["ingest", name] for name in names])


def measure_mixture(checkout: Checkout, params: Path, warm_runs: int) -> dict[str, Any]:
    """Cold and warm seconds of validate + convert on an ingested mixture, its rows, and the peak of memory in MB."""
    outputs = [params.parent / "03_clean", params.parent / "04_mixture"]
    figures = run_stages(checkout, params, [["validate"], ["convert"]], outputs, warm_runs)
    report = json.loads((params.parent / "04_mixture/report.json").read_text("utf-8"))
    return {
        "rows": report["rows_out"],
        "pairs": report["rows_in"],
        "cold_s": round(figures["cold_s"], 2),
        "warm_s": round(statistics.median(figures["warm_s"]), 2),
        "warm_validate_s": round(statistics.median(figures["first_command_s"]), 2),
        "warm_runs_s": [round(seconds, 2) for seconds in figures["warm_s"]],
        "peak_rss_mb": round(figures["peak_rss_mb"]),
    }


def measure_pictures(checkout: Checkout, params: Path) -> dict[str, Any]:
    """Seconds of ingest without an image cache and of validate on the pictures, each in a fresh process."""
    for output in params.parent.iterdir():
        if output.is_dir():  # records, and the image cache in `runs`
            shutil.rmtree(output)
    ingest = run_stages(checkout, params, [["ingest", PICTURES]])
    validate = run_stages(checkout, params, [["validate"]])
    report = json.loads((params.parent / "03_clean/report.json").read_text("utf-8"))
    assert report["quarantined"] == 0, f"{params.parent / '03_clean/report.json'}: sound pictures are in quarantine"
    return {
        "pairs": report["rows_out"],
        "ingest_s": round(ingest["cold_s"], 2),
        "validate_s": round(validate["cold_s"], 2),
        "ingest_peak_rss_mb": round(ingest["peak_rss_mb"]),
    }


@dataclass(frozen=True)
class Ratio:
    """The ratio of two checkouts' seconds over paired turns: its geometric mean and 95 % interval."""

    ratio: float
    low: float
    high: float


def ratio_of_turns(seconds: Sequence[float], other_seconds: Sequence[float]) -> Ratio:
    """The ratio of durations that were measured in turns, at least two; Student's t over the ratios' logarithms."""
    logarithms = np.log(np.asarray(seconds) / np.asarray(other_seconds))
    turns = len(logarithms)
    margin = student_t.ppf(0.975, turns - 1) * logarithms.std(ddof=1) / math.sqrt(turns)
    mean = logarithms.mean()
    return Ratio(ratio=float(np.exp(mean)), low=float(np.exp(mean - margin)), high=float(np.exp(mean + margin)))


DURATIONS = {
    "ingest_s": "ingest of the pictures, cold",
    "pictures_validate_s": "validate of the pictures, cold",
    "cold_s": "validate + convert of the mixture, cold",
    "warm_s": "validate + convert of the mixture, warm",
}


def measure_turn(checkout: Checkout, pictures: Path, mixture: Path, warm_runs: int) -> dict[str, float]:
    """The seconds of DURATIONS, of a checkout whose mixture is ingested."""
    of_pictures = measure_pictures(checkout, pictures)
    of_mixture = measure_mixture(checkout, mixture, warm_runs)
    return {
        "ingest_s": of_pictures["ingest_s"],
        "pictures_validate_s": of_pictures["validate_s"],
        "cold_s": of_mixture["cold_s"],
        "warm_s": of_mixture["warm_s"],
    }


def compare(folder: Path, checkouts: Sequence[Checkout], args: argparse.Namespace) -> dict[str, Any]:
    """Measure two checkouts by turns on the same files; print the turns and the ratios of the first to the second."""
    start = time.time()
    samples = args.sizes[-1]
    parts = write_mixture(folder / f"mixture_{samples}", samples)
    write_pictures(folder / f"pictures_{args.pairs}", args.pairs)
    params: dict[str, tuple[Path, Path]] = {}
    for checkout in checkouts:
        work = folder / "work" / checkout.name
        shutil.rmtree(work, ignore_errors=True)
        entries = mixture_entries(folder / f"mixture_{samples}", parts)
        mixture = write_params(checkout, work / "mixture", entries)
        pictures = write_params(checkout, work / PICTURES, picture_entries(folder / f"pictures_{args.pairs}"))
        params[checkout.name] = (pictures, mixture)
        ingest_mixture(checkout, mixture)
        measure_turn(
            checkout, pictures, mixture, warm_runs=1
        )  # the first run compiles modules and reads files from disk
    print(f"written, ingested and run once without a clock in {time.time() - start:.0f} s", flush=True)
    seconds: dict[str, dict[str, list[float]]] = {
        checkout.name: {name: [] for name in DURATIONS} for checkout in checkouts
    }
    for turn in range(args.turns):
        start = time.time()
        for checkout in checkouts if turn % 2 == 0 else reversed(checkouts):
            durations = measure_turn(checkout, *params[checkout.name], args.runs)
            for name, duration in durations.items():
                seconds[checkout.name][name].append(duration)
        print(f"turn {turn + 1} of {args.turns}: {time.time() - start:.0f} s", flush=True)
    return report_ratios(seconds)


def report_ratios(seconds: Mapping[str, Mapping[str, list[float]]]) -> dict[str, Any]:
    """Print and return the ratio of the first checkout's durations to the second's, with the limits of RATIO_LIMITS."""
    ours, theirs = seconds.values()
    print(f"{'':42} {'this s':>8} {'other s':>8} {'ratio':>6} {'95 % interval':>15} {'limit':>6}")
    ratios = {}
    for name, title in DURATIONS.items():
        result = ratio_of_turns(ours[name], theirs[name])
        limit = RATIO_LIMITS.get(name)
        verdict = "" if limit is None else f"{limit:6.2f} {'kept' if result.high <= limit else 'exceeded'}"
        medians = f"{statistics.median(ours[name]):8.2f} {statistics.median(theirs[name]):8.2f}"
        print(f"{title:42} {medians} {result.ratio:6.3f} {result.low:7.3f} {result.high:7.3f} {verdict}")
        ratios[name] = {"ratio": result.ratio, "low": result.low, "high": result.high, "limit": limit}
    return {"ratios": ratios, "seconds": seconds}


def picture_entries(root: Path) -> dict[str, dict[str, Any]]:
    return {PICTURES: {**OWN, "root": str(root)}}


def measure_sizes(folder: Path, checkout: Checkout, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one checkout: the mixture at each size, and the pictures. Print a line for each."""
    print(f"{'samples':>9} {'pairs':>8} {'cold s':>7} {'warm s':>7} {'peak MB':>8} {'warm us/sample':>15}")
    sizes = []
    for samples in args.sizes:
        root = folder / f"mixture_{samples}"
        entries = mixture_entries(root, write_mixture(root, samples))
        work = folder / "work" / checkout.name / str(samples)
        shutil.rmtree(work, ignore_errors=True)
        params = write_params(checkout, work, entries)
        ingest_mixture(checkout, params)
        row = measure_mixture(checkout, params, args.runs)
        sizes.append(row)
        print(f"{row['rows']:9,} {row['pairs']:8,} {row['cold_s']:7.1f} {row['warm_s']:7.1f}", end=" ")
        print(f"{row['peak_rss_mb']:8,.0f} {1e6 * row['warm_s'] / row['rows']:15.2f}", flush=True)
    root = folder / f"pictures_{args.pairs}"
    write_pictures(root, args.pairs)
    params = write_params(checkout, folder / "work" / checkout.name / PICTURES, picture_entries(root))
    pictures = measure_pictures(checkout, params)
    print(
        f"{pictures['pairs']:,} pairs of {PX} px: ingest {pictures['ingest_s']} s, validate {pictures['validate_s']} s"
    )
    return {**sizes[-1], "sizes": sizes, "pictures": pictures, "targets": TARGETS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="samples of each mixture; --against: the last"
    )
    parser.add_argument("--runs", type=int, default=WARM_RUNS, help="warm ones of each size, or of each turn")
    parser.add_argument("--pairs", type=int, default=PICTURE_PAIRS, help="of pictures")
    parser.add_argument("--against", type=Path, help="folder of another checkout, where `make install` ran")
    parser.add_argument("--turns", type=int, default=TURNS, help="of both checkouts, at least two")
    parser.add_argument("--folder", type=Path, help="keep inputs and outputs here; default: a temporary folder")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.name}, or {AGAINST_RESULTS.name}")
    args = parser.parse_args()
    if args.against and args.turns < 2:
        parser.error("--turns: an interval needs at least two")
    if args.against and not (args.against / ".venv/bin/python").exists():
        parser.error(f"--against: {args.against} has no .venv; run `make install` there")
    this = Checkout("this", ROOT, sys.executable)
    facts = machine()
    print(f"{facts['device']}; load before the start {facts['load_before']:.1f}")
    with ExitStack() as stack:
        folder = (args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        if args.against:
            other_folder = args.against.resolve()
            other = Checkout("other", other_folder, str(other_folder / ".venv/bin/python"))
            figures = compare(folder, [this, other], args)
        else:
            figures = measure_sizes(folder, this, args)
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    write({"date": date, **facts, **figures}, args.out or (AGAINST_RESULTS if args.against else RESULTS))


if __name__ == "__main__":
    main()
