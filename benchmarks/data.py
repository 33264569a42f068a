"""Compare the speed of ingest, validate and convert with a peer: `make bench-data` -> benchmarks/results/data.json.

    python benchmarks/data.py                                        this checkout and its peer
    python benchmarks/data.py --against FOLDER --turns 6 --folder D  this checkout and another one

The benchmark has two inputs: a mixture and pictures. A pair consists of two images, before and after a change.

The *mixture* is as large as the paper's mixture according to the published counts: 145,377 pairs in the train and
validation splits and 896,000 captions. The number and length of captions match. Images are hard links to a few small
files, and the two images of a pair differ. OmniDiff is written in its published layout, because the gate of the paper's
profile uses OmniDiff's protocol. The reader `pairs` reads the other datasets. CLEVR-DC does not publish its number of
captions, so it gets all captions that are left over, 9.2 per pair. For each size, the mixture is written and ingested.
A fresh process then runs the commands `validate` and `convert` (cold: including interpreter startup and imports), and
runs them again (warm). All runs must write the same bytes. Peak memory is measured for the process and its workers
together.

The *pictures* are 5,000 distinct pairs of 512 x 512 pixels, half JPEG and half PNG, all of which are decoded. One fresh
process runs `ingest` without an image cache, and another fresh process runs `validate`.

The peer is a stock implementation, benchmarks/peer_data.py. It does the same checks and conversion with `datasets.map`
in one process, from the same records to the same samples. It has two modes: row by row and in batches. This checkout
and the peer's two modes run alternately in fresh processes, and the order changes from turn to turn. The table shows
each mode's time divided by this checkout's time, cold and warm. The peer skips visual near-duplicates, the second
validation engine, the page, shuffling and sharding, which favours the peer. It requires the package `datasets` (extra
`dev`). `--no-peer` leaves the peer out.

`--against` measures the checkout in FOLDER on the same files with this copy of the benchmark. Each checkout uses its
own interpreter (FOLDER/.venv) and parameters. The checkouts run alternately, and each one runs first in every other
turn. For each duration, the table shows this checkout's time divided by the other checkout's time, with a 95 %
confidence interval (Student's t on the logarithms of the turns' ratios). `--folder` keeps both inputs for later calls.
Delete the folder after changing the functions that write the inputs."""

import argparse
import importlib.util
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
import polars as pl
import psutil
import yaml
from PIL import Image
from scipy.stats import t as student_t

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe_machine, write_results  # noqa: E402
from benchmarks.pictures import PX, write_picture_pair  # noqa: E402
from m3diff.datasets import DATASETS  # noqa: E402
from m3diff.records.tables import part_paths  # noqa: E402
from m3diff.runtime import prepare  # noqa: E402
from m3diff.settings.load import load_params  # noqa: E402
from m3diff.stages.convert.stage import load_questions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "data.json"
AGAINST_RESULTS = ROOT / "benchmarks" / "results" / "data_against.json"
RUN_STAGES = ROOT / "benchmarks" / "run_stages.py"
PEER = ROOT / "benchmarks" / "peer_data.py"
PEER_MODES = {"rows": "datasets.map, row by row", "batches": "datasets.map, batched"}
PEER_TURNS = 2
PEER_WARM_RUNS = 1
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
INSTALL_PEER = "pip install -c constraints.txt datasets, or make install"
SIZES = (100_000, 300_000, 896_000)  # numbers of captions in the mixtures, and so of samples
WARM_RUNS = 3
TURNS = 6
TARGETS = {"cold_s": 15, "warm_s": 6, "peak_rss_mb": 1500}
RATIO_LIMITS = {"ingest_s": 1.15, "cold_s": 1.05, "warm_s": 1.05}  # maximum of the confidence interval's upper bound

SAMPLES = 896_000
SMALL_IMAGES = 64  # files per format, half before and half after; several, since ext4 allows 65,000 links per file
PICTURE_PAIRS = 5_000
PICTURES = "pictures"  # name of the picture dataset

Captions = list[list[str]]  # the captions of each pair
Splits = dict[str, Captions]


class Part(NamedTuple):
    """The size of a dataset in the mixture.

    Attributes:
        pairs: number of pairs in the splits `train` and `val`.
        captions: number of captions in the splits `train` and `val`.
        words: minimum and maximum number of words per caption. Lengths are distributed uniformly.
        vocabulary: number of different words.
    """

    pairs: tuple[int, int]
    captions: tuple[int, int]
    words: tuple[int, int]
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
GATE = "omnidiff_real"  # the promotion gate of the paper's profile uses this dataset, so it must have test pairs
TEST_PAIRS = 10  # number of test pairs in GATE, which do not add training samples
PAIRS_ENTRY = {"reader": "pairs", "options": {"manifest": "pairs.json"}}


@dataclass(frozen=True)
class Checkout:
    """A measured checkout with its folder and Python interpreter."""

    name: str
    folder: Path
    python: str


class SmallImages:
    """A pool of small images. Each image of the mixture is a hard link to a file in this pool.

    Before-images are dark and after-images are bright. The two images of a pair differ in every cell of a thumbnail, so
    no rule treats them as duplicates.
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

    def link_pair(self, number: int, before: Path, after: Path, is_test: bool = False) -> None:
        """Link two images from the pool to these paths.

        Any 1,024 consecutive pairs have different combinations of images. Both images of a test pair are dark, so that
        the test pair differs from all pairs in other splits.
        """
        half = SMALL_IMAGES // 2
        source_before = f"before_{number % half}"
        source_after = f"before_{(number + 1) % half}" if is_test else f"after_{(number // half) % half}"
        for source, path in ((source_before, before), (source_after, after)):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(self.folder / f"{source}{path.suffix}", path)


def write_mixture(root: Path, samples: int = SAMPLES) -> dict[str, Part]:
    """Write the datasets of the mixture to `root`/<name> unless `root` exists. Return their sizes."""
    parts = _scale_parts(samples)
    if root.exists():
        return parts
    unfinished = _empty_folder(root)
    images = SmallImages(unfinished / "small_images")
    rng = np.random.default_rng(896)
    for name, part in parts.items():
        splits = {split: _captions(rng, part, index) for index, split in enumerate(("train", "val"))}
        if name == GATE:
            splits["test"] = _captions(rng, part._replace(pairs=(TEST_PAIRS, 0), captions=(TEST_PAIRS, 0)), 0)
        (unfinished / name).mkdir()
        _write_pairs(unfinished / name, splits, images, name in OMNIDIFF)
    unfinished.rename(root)
    return parts


def write_pictures(root: Path, pairs: int = PICTURE_PAIRS) -> None:
    """Write the picture dataset to `root` unless `root` exists. One tenth of its pairs is val and one tenth is test."""
    if root.exists():
        return
    unfinished = _empty_folder(root)
    rng = np.random.default_rng(PICTURE_PAIRS)
    part = Part((pairs, 0), (2 * pairs, 0), (5, 20), 2_000)
    rows = []
    for number, captions in enumerate(_captions(rng, part, 0)):
        suffix = "png" if number % 2 else "jpg"
        split = {0: "test", 1: "val"}.get(number // 2 % 10, "train")
        sides = {side: f"{number // 1000}/{number}_{side}.{suffix}" for side in ("before", "after")}
        rows.append({**sides, "captions": captions, "split": split})
        (unfinished / sides["before"]).parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor() as pool:
        paths_before = [unfinished / row["before"] for row in rows]
        paths_after = [unfinished / row["after"] for row in rows]
        list(pool.map(write_picture_pair, range(pairs), paths_before, paths_after, chunksize=8))
    (unfinished / "pairs.json").write_text(json.dumps(rows), "utf-8")
    unfinished.rename(root)


def _empty_folder(root: Path) -> Path:
    """Create an empty folder next to `root` and return its path.

    The caller renames the folder to `root` when it is complete, so that an interrupted call does not leave incomplete
    data in `root`.
    """
    unfinished = root.with_name(f"{root.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def _scale_parts(samples: int) -> dict[str, Part]:
    """Return the datasets' sizes, scaled so that the mixture has exactly `samples` captions.

    CLEVR-DC absorbs the rounding errors of the other datasets.
    """
    share = samples / SAMPLES
    parts = {}
    for name, part in PARTS.items():
        pairs = round(part.pairs[0] * share), round(part.pairs[1] * share)
        captions = round(part.captions[0] * share), round(part.captions[1] * share)
        parts[name] = part._replace(pairs=pairs, captions=captions)
    remainder = samples - sum(sum(part.captions) for part in parts.values())
    clevr_dc = parts["clevr_dc"]
    parts["clevr_dc"] = clevr_dc._replace(captions=(clevr_dc.captions[0] + remainder, clevr_dc.captions[1]))
    return parts


def _captions(rng: np.random.Generator, part: Part, split_index: int) -> Captions:
    """Return the captions of all pairs in a split (0: train, 1: val), distributed evenly over the pairs.

    Each caption ends with a number, because training drops repeated captions of a pair.
    """
    pairs = part.pairs[split_index]
    captions = part.captions[split_index]
    words = _words(part.vocabulary)
    lengths = rng.integers(part.words[0], part.words[1] + 1, captions)
    sampled = rng.integers(0, len(words), lengths.sum())  # indexes of the words of all captions, one after another
    ends = np.concatenate([[0], lengths.cumsum()])
    texts = []
    for start, end in pairwise(ends):
        texts.append(" ".join(words[index] for index in sampled[start:end].tolist()))
    cuts = (np.arange(pairs + 1) * captions) // max(pairs, 1)  # a small mixture may have an empty split
    captions_of_pairs = []
    for start, end in pairwise(cuts):
        captions_of_pairs.append([f"{text} {number}" for number, text in enumerate(texts[start:end])])
    return captions_of_pairs


def _words(number: int) -> list[str]:
    """Return invented words, most of them with two syllables and five letters."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    stems = syllables + [start + end for start in syllables for end in syllables]
    return [stem + "rn"[index % 2] for index, stem in enumerate(stems)][:number]


def _write_pairs(root: Path, splits: Splits, images: SmallImages, is_omnidiff: bool) -> None:
    """Write a dataset: a JSON list of pairs, and their images.

    OmniDiff has a different file name and captions that are paragraphs of several sentences.
    """
    ending = "jpg" if is_omnidiff else "png"
    captions_of_pairs = [(split, captions) for split, pairs in splits.items() for captions in pairs]
    rows = []
    for number, (split, captions) in enumerate(captions_of_pairs):
        before = f"{number // 1000}/{number}_before.{ending}"
        after = f"{number // 1000}/{number}_after.{ending}"
        images.link_pair(number, root / before, root / after, is_test=split == "test")
        row: dict[str, Any] = {"before": before, "after": after, "captions": captions, "split": split}
        if is_omnidiff:
            words = captions[0].split()
            sentences = [" ".join(words[start : start + 24]) for start in range(0, len(words), 24)]
            row |= {"captions": ". ".join(sentences) + ".", "change_types": ["addition"]}
        rows.append(row)
    (root / ("annotations.json" if is_omnidiff else "pairs.json")).write_text(json.dumps(rows), "utf-8")


def write_params(checkout: Checkout, work: Path, entries: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write the checkout's parameters to `work`/params.yaml with these datasets, and return the path.

    All outputs go to `work`. For the mixture, the sections `convert` and `promote` are updated from the checkout's
    profile `paper`.
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
        params["promote"] |= profile["promote"]  # the gate uses one of these datasets
    work.mkdir(parents=True, exist_ok=True)
    path = work / "params.yaml"
    path.write_text(yaml.safe_dump(params, sort_keys=False), "utf-8")
    return path


def mixture_entries(root: Path, parts: Mapping[str, Part]) -> dict[str, dict[str, Any]]:
    """Return the entries of the mixture's datasets for params.yaml.

    The val splits are also used for training, since the paper's 145k pairs include them.
    """
    entries: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        reader_fields = {"reader": "omnidiff"} if name in OMNIDIFF else PAIRS_ENTRY
        expected_pairs = {"train": part.pairs[0], "val": part.pairs[1]}
        if name == GATE:
            expected_pairs["test"] = TEST_PAIRS
        entries[name] = {
            **reader_fields,
            "root": str(root / name),
            "train_on": ["train", "val"],
            "expected_pairs": expected_pairs,
        }
    return entries


def run_stages(
    checkout: Checkout,
    params: Path,
    commands: Sequence[Sequence[str]],
    outputs: Sequence[Path] = (),
    warm_runs: int = 0,
) -> dict[str, Any]:
    """Run `run_stages.py` in a fresh process of the checkout.

    Returns:
        The figures that the script prints, and the peak memory of the process and its workers.

    Raises:
        RuntimeError: a command fails, or the process imports the package of another checkout.
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
    figures = run_watched(command, checkout.folder)
    package = (checkout.folder / "components").resolve()
    if Path(figures["package"]) != package:
        raise RuntimeError(f"{checkout.python} imports {figures['package']}; run `make install` in {checkout.folder}")
    assert len(set(figures["digests"])) == 1, "the same input gave different bytes"
    return figures


def run_watched(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a process in a folder and return the JSON in its last line of output.

    The result also includes `peak_rss_mb`, the peak memory of the process and its workers.

    Raises:
        RuntimeError: the process fails.
    """
    variables = os.environ | (environment or {})
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True)
        peak = [0.0]
        is_done = threading.Event()
        watch = threading.Thread(target=_watch, args=(process.pid, peak, is_done))
        watch.start()
        output, _ = process.communicate()
        is_done.set()
        watch.join()
        errors.seek(0)
        if process.returncode != 0:
            raise RuntimeError(f"{folder}: {command} failed:\n{errors.read()[-4000:]}")
    figures = json.loads(output.splitlines()[-1])
    return figures | {"peak_rss_mb": max(peak[0] / 1e6, figures["own_peak_mb"])}


def _watch(pid: int, peak: list[float], is_done: threading.Event) -> None:
    """Store the peak memory of a process and its descendants in `peak[0]`, in bytes, until `is_done` is set.

    Shared pages are counted once per process. Memory is sampled ten times per second, which slows the process down by
    about a millisecond.
    """
    process = psutil.Process(pid)
    while not is_done.wait(0.1):
        try:
            family = [process, *process.children(recursive=True)]
            peak[0] = max(peak[0], sum(member.memory_info().rss for member in family))
        except psutil.NoSuchProcess:
            continue


def ingest_mixture(checkout: Checkout, params: Path) -> None:
    """Ingest all datasets in a parameter file, one after another in one process."""
    names = yaml.safe_load(params.read_text("utf-8"))["ingest"]["datasets"]
    run_stages(checkout, params, [["ingest", name] for name in names])


def measure_mixture(checkout: Checkout, params: Path, warm_runs: int) -> dict[str, Any]:
    """Measure `validate` and `convert` on an ingested mixture.

    Returns:
        The seconds of the cold run and of the warm runs, the number of rows and pairs, and the peak memory in MB.
    """
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


def measure_peer(params: Path, mode: str, mixture: Path | None = None) -> dict[str, Any]:
    """Measure the peer on an ingested mixture.

    Args:
        mode: a key of PEER_MODES.
        mixture: folder with the samples of `m3diff convert`. The peer's samples must be equal to these. If None, the
            samples are not compared.

    Returns:
        The seconds of the cold run and the warm runs, the number of rows, and the peak memory in MB.
    """
    out = params.parent / f"peer_{mode}"
    shutil.rmtree(out, ignore_errors=True)
    order = peer_order(params, mode, out) | {"started": time.time()}
    figures = run_watched([sys.executable, "-P", str(PEER), json.dumps(order)], ROOT, OFFLINE)
    if mixture is not None:
        check_same_samples(mixture, out / "samples")
    shutil.rmtree(out)
    return {
        "rows": figures["rows"],
        "cold_s": round(figures["cold_s"], 2),
        "warm_s": round(statistics.median(figures["warm_s"]), 2),
        "peak_rss_mb": round(figures["peak_rss_mb"]),
    }


def peer_order(params: Path, mode: str, out: Path) -> dict[str, Any]:
    """Return the arguments with which the peer does the same work as `validate` and `convert` with a parameter file.

    Raises:
        AssertionError: the parameters leave out pairs or references, which the peer does not support.
    """
    values = load_params(params)
    convert = values.convert
    assert convert.references_per_question is None, convert
    assert convert.no_change_share == 1.0, convert
    assert convert.sources == {}, convert
    questions = load_questions(ROOT / convert.questions)
    return {
        "mode": mode,
        "records": [
            str(part) for name in values.ingest.datasets for part in part_paths(values.paths.records / name / "records")
        ],
        "out": str(out),
        "questions": {name: questions[DATASETS[entry.reader].task] for name, entry in values.ingest.datasets.items()},
        "seed": convert.seed,
        "max_caption_chars": values.validate_.max_caption_chars,
        "warm_runs": PEER_WARM_RUNS,
    }


def check_same_samples(mixture: Path, samples: Path) -> None:
    """Check that the Parquet files in both folders have the same rows, in any order.

    Raises:
        AssertionError: the rows differ.
    """
    own_samples = pl.read_parquet(mixture / "*" / "*.parquet").sort("id")
    peer_samples = pl.read_parquet(samples / "*.parquet").select(own_samples.columns).sort("id")
    assert own_samples.height == peer_samples.height, (
        f"{own_samples.height} samples of convert, {peer_samples.height} of the peer"
    )
    assert own_samples.equals(peer_samples), "the peer made other samples"


def measure_by_turns(checkout: Checkout, params: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure this checkout and the peer's two modes alternately.

    Returns:
        The median durations and the largest peak memory of this checkout. The key `peers` contains the same for each
        mode of the peer, and also `cold_ratio` and `warm_ratio`: the mode's time divided by this checkout's time
        (geometric mean over the turns).
    """
    modes = [] if args.no_peer else list(PEER_MODES)
    sides = [checkout.name, *modes]
    turns: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for turn in range(args.peer_turns if modes else 1):
        start = -turn % len(sides)  # the last side of a turn is the first side of the next turn
        for side in sides[start:] + sides[:start]:
            if side == checkout.name:
                turns[side].append(measure_mixture(checkout, params, args.runs))
            else:
                mixture = params.parent / "04_mixture" if turn == 0 else None  # samples are compared only once
                turns[side].append(measure_peer(params, side, mixture))
    own_turns = turns[checkout.name]
    row = summarize_turns(own_turns)
    row["warm_validate_s"] = statistics.median(turn["warm_validate_s"] for turn in own_turns)
    row["warm_runs_s"] = [seconds for turn in own_turns for seconds in turn["warm_runs_s"]]
    row["peers"] = {}
    for mode in modes:
        peer = summarize_turns(turns[mode])
        assert peer["rows"] == row["rows"], f"{mode}: {peer['rows']} rows, but {row['rows']} of this checkout"
        for name in ("cold", "warm"):
            seconds = zip(turns[mode], own_turns, strict=True)
            ratios = [peer_turn[f"{name}_s"] / own_turn[f"{name}_s"] for peer_turn, own_turn in seconds]
            peer[f"{name}_ratio"] = round(statistics.geometric_mean(ratios), 2)
        row["peers"][mode] = peer
    return row


def summarize_turns(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median durations and the largest peak memory over several turns."""
    row = dict(turns[0])
    for name in ("cold_s", "warm_s"):
        row[name] = round(statistics.median(turn[name] for turn in turns), 2)
    row["peak_rss_mb"] = max(turn["peak_rss_mb"] for turn in turns)
    return row


def measure_pictures(checkout: Checkout, params: Path) -> dict[str, Any]:
    """Measure `ingest` (without an image cache) and `validate` on the pictures, each in a fresh process."""
    for output in params.parent.iterdir():
        if output.is_dir():  # records and, in `runs`, the image cache
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
    """The ratio of two checkouts' durations: its geometric mean over the turns and its 95 % confidence interval."""

    ratio: float
    low: float
    high: float


def ratio_of_turns(seconds: Sequence[float], other_seconds: Sequence[float]) -> Ratio:
    """Return the ratio of two series of durations, measured in the same turns. There must be at least two turns.

    The confidence interval uses Student's t distribution on the logarithms of the turns' ratios.
    """
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
    """Measure all DURATIONS for a checkout whose mixture has been ingested."""
    picture_figures = measure_pictures(checkout, pictures)
    mixture_figures = measure_mixture(checkout, mixture, warm_runs)
    return {
        "ingest_s": picture_figures["ingest_s"],
        "pictures_validate_s": picture_figures["validate_s"],
        "cold_s": mixture_figures["cold_s"],
        "warm_s": mixture_figures["warm_s"],
    }


def compare(folder: Path, checkouts: Sequence[Checkout], args: argparse.Namespace) -> dict[str, Any]:
    """Measure two checkouts alternately on the same files.

    Returns:
        The result of `report_ratios`: the first checkout's times divided by the second's, and all measured times.
    """
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
        # This run is not counted, since it compiles modules and reads files from disk
        measure_turn(checkout, pictures, mixture, warm_runs=1)
    print(f"written, ingested and run once without timing in {time.time() - start:.0f} s", flush=True)
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
    """Print and return the first checkout's durations divided by the second's, with confidence intervals and limits."""
    own_seconds, other_seconds = seconds.values()
    print(f"{'':42} {'this s':>8} {'other s':>8} {'ratio':>6} {'95 % interval':>15} {'limit':>6}")
    ratios = {}
    for name, title in DURATIONS.items():
        result = ratio_of_turns(own_seconds[name], other_seconds[name])
        limit = RATIO_LIMITS.get(name)
        verdict = ""
        if limit is not None:
            verdict = f"{limit:6.2f} {'kept' if result.high <= limit else 'exceeded'}"
        medians = f"{statistics.median(own_seconds[name]):8.2f} {statistics.median(other_seconds[name]):8.2f}"
        print(f"{title:42} {medians} {result.ratio:6.3f} {result.low:7.3f} {result.high:7.3f} {verdict}")
        ratios[name] = {"ratio": result.ratio, "low": result.low, "high": result.high, "limit": limit}
    return {"ratios": ratios, "seconds": seconds}


def picture_entries(root: Path) -> dict[str, dict[str, Any]]:
    """Return the entry of the picture dataset for params.yaml."""
    return {PICTURES: {**PAIRS_ENTRY, "root": str(root)}}


def print_size(row: Mapping[str, Any]) -> None:
    """Print a line for this checkout, and a line for each mode of the peer with its ratios to this checkout."""
    sides = {"m3diff": row}
    for mode, peer in row["peers"].items():
        sides[PEER_MODES[mode]] = peer
    for title, side in sides.items():
        figures = f"{side['cold_s']:7.1f} {side['warm_s']:7.1f} {side['peak_rss_mb']:8,.0f}"
        microseconds = f"{1e6 * side['warm_s'] / side['rows']:9.2f}"
        ratios = f" {side['cold_ratio']:20.1f} {side['warm_ratio']:6.1f}" if "cold_ratio" in side else ""
        print(f"{row['rows']:9,} {row['pairs']:8,} {title:26} {figures} {microseconds}{ratios}", flush=True)


def measure_sizes(folder: Path, checkout: Checkout, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a checkout and the peer on a mixture of each size, then the checkout alone on the pictures."""
    head = f"{'samples':>9} {'pairs':>8} {'':26} {'cold s':>7} {'warm s':>7} {'peak MB':>8} {'us/sample':>9}"
    print(f"{head} {'times as long: cold':>20} {'warm':>6}")
    sizes = []
    for samples in args.sizes:
        root = folder / f"mixture_{samples}"
        entries = mixture_entries(root, write_mixture(root, samples))
        work = folder / "work" / checkout.name / str(samples)
        shutil.rmtree(work, ignore_errors=True)
        params = write_params(checkout, work, entries)
        ingest_mixture(checkout, params)
        row = measure_by_turns(checkout, params, args)
        sizes.append(row)
        print_size(row)
    root = folder / f"pictures_{args.pairs}"
    write_pictures(root, args.pairs)
    params = write_params(checkout, folder / "work" / checkout.name / PICTURES, picture_entries(root))
    pictures = measure_pictures(checkout, params)
    print(
        f"{pictures['pairs']:,} pairs of {PX} px: ingest {pictures['ingest_s']} s, validate {pictures['validate_s']} s"
    )
    return {**sizes[-1], "sizes": sizes, "pictures": pictures, "targets": TARGETS}


def main() -> None:
    """Measure this checkout and the peer, or two checkouts with `--against`, and write the results."""
    prepare()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="samples of each mixture; --against: the last"
    )
    parser.add_argument("--runs", type=int, default=WARM_RUNS, help="warm runs of each size, or of each turn")
    parser.add_argument("--pairs", type=int, default=PICTURE_PAIRS, help="pairs of pictures")
    parser.add_argument("--against", type=Path, help="folder of another checkout, where `make install` ran")
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of both checkouts, at least two")
    parser.add_argument("--peer-turns", type=int, default=PEER_TURNS, help="turns of each size with its peers")
    parser.add_argument("--no-peer", action="store_true", help="without the peers, which need the package datasets")
    parser.add_argument("--folder", type=Path, help="keep inputs and outputs here; default: a temporary folder")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.name}, or {AGAINST_RESULTS.name}")
    args = parser.parse_args()
    if args.against and args.turns < 2:
        parser.error("--turns: an interval needs at least two")
    if args.against and not (args.against / ".venv/bin/python").exists():
        parser.error(f"--against: {args.against} has no .venv; run `make install` there")
    if not args.against and not args.no_peer and importlib.util.find_spec("datasets") is None:
        parser.error(f"the peer needs the package datasets: {INSTALL_PEER}; --no-peer leaves it out")
    if args.peer_turns < 1:
        parser.error("--peer-turns: at least one")
    own_checkout = Checkout("this", ROOT, sys.executable)
    facts = describe_machine()
    print(f"{facts['device']}; load before the start {facts['load_before']:.1f}")
    with ExitStack() as stack:
        folder = (args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        if args.against:
            other_folder = args.against.resolve()
            other_checkout = Checkout("other", other_folder, str(other_folder / ".venv/bin/python"))
            figures = compare(folder, [own_checkout, other_checkout], args)
        else:
            figures = measure_sizes(folder, own_checkout, args)
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    write_results({"date": date, **facts, **figures}, args.out or (AGAINST_RESULTS if args.against else RESULTS))


if __name__ == "__main__":
    main()
