"""Validate and convert at 896k samples, on the real path: `make bench-data` -> benchmarks/results/data.json.

For each size a mixture is written and ingested. Then one fresh process runs the command line's `validate` and `convert`
(cold: interpreter, imports and all), and again (warm). The outputs of every run must be the same bytes. Peak memory is
that of the process and its workers together.

The mixture has the paper's size: the published counts (145,377 pairs of the train and validation splits, 896,000
captions), captions of the right number and length, and one small image under every name (hard links). OmniDiff has its
own layout, since the gate of the paper's profile is of its protocol; the others are pairs of one's own. Of CLEVR-DC's
captions no count is published; they are the remainder, 9.2 a pair.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import yaml
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import machine, write  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "data.json"
SIZES = (100_000, 300_000, 896_000)
WARM_RUNS = 3
TARGETS = {"cold_s": 15, "warm_s": 6, "peak_rss_mb": 1500}

PARAMS, PROFILE = Path("params.yaml"), Path("profiles/paper.yaml")
SAMPLES = 896_000
LINKS = 60_000  # names of one file; ext4 allows 65,000

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


class Picture:
    """The one image, under as many names as are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, count()
        folder.mkdir(parents=True)

    def __call__(self, *paths: Path) -> None:
        for path in paths:
            source = self.folder / f"{next(self.names) // LINKS}{path.suffix}"
            if not source.exists():
                Image.linear_gradient("L").resize((16, 16)).save(source)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(source, path)


def write_synthetic_mixture(root: Path, samples: int = SAMPLES) -> Path:
    """Write the datasets under `root` and the parameter file `root/params.yaml`, whose path is returned."""
    picture, rng = Picture(root / "picture"), np.random.default_rng(896)
    parts = _scaled(samples)
    for name, part in parts.items():
        splits = {split: _captions(rng, part, which) for which, split in enumerate(("train", "val"))}
        (root / "raw" / name).mkdir(parents=True)
        _write_pairs(root / "raw" / name, splits, picture, name in OMNIDIFF)
    return _write_params(root, parts)


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


def _write_pairs(root: Path, splits: Splits, picture: Picture, omnidiff: bool) -> None:
    """A JSON list of pairs with their images; a caption of OmniDiff is a text of several sentences."""
    rows = []
    for number, (split, captions) in enumerate((split, one) for split, some in splits.items() for one in some):
        ending = "jpg" if omnidiff else "png"
        row: dict[str, Any] = {side: f"{number // 1000}/{number}_{side}.{ending}" for side in ("before", "after")}
        picture(*(root / path for path in row.values()))
        row |= {"captions": captions, "split": split}
        if omnidiff:
            words = captions[0].split()
            sentences = [" ".join(words[start : start + 24]) for start in range(0, len(words), 24)]
            row |= {"captions": ". ".join(sentences) + ".", "change_types": ["addition"]}
        rows.append(row)
    (root / ("annotations.json" if omnidiff else "pairs.json")).write_text(json.dumps(rows), "utf-8")


def _write_params(root: Path, parts: dict[str, Part]) -> Path:
    """The embedded run's parameters with this mixture in place of its dataset, converted as the paper's profile says.

    Validation splits train, as the paper's 145k pairs ask.
    """
    params, profile = (yaml.safe_load(path.read_text("utf-8")) for path in (PARAMS, PROFILE))
    params["paths"] |= {name: str(root / Path(path).name) for name, path in params["paths"].items() if name != "base"}
    params["synthesize"], params["convert"] = {}, params["convert"] | profile["convert"]
    params["promote"] |= profile["promote"]  # a gate on these datasets
    params["compute"]["scratch"] = str(root / "runs")
    params["ingest"]["datasets"] = {
        name: {
            **({"reader": "omnidiff"} if name in OMNIDIFF else OWN),
            "root": str(root / "raw" / name),
            "train_on": ["train", "val"],
            "expected_pairs": dict(zip(("train", "val"), part.pairs, strict=True)),
        }
        for name, part in parts.items()
    }
    path = root / "params.yaml"
    path.write_text(yaml.safe_dump(params, sort_keys=False), "utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="samples of each mixture")
    parser.add_argument("--runs", type=int, default=WARM_RUNS, help="warm ones of each size")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    facts = machine()
    print(f"{facts['device']}; load before the start {facts['load_before']:.1f}")
    print(f"{'samples':>9} {'pairs':>8} {'cold s':>7} {'warm s':>7} {'peak MB':>8} {'warm us/sample':>15}")
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            params = write_synthetic_mixture(Path(folder) / str(size), size)
            measured.append(one := measure(params, args.runs))
            each = 1e6 * one["warm_s"] / one["rows"]
            print(f"{one['rows']:9,} {one['pairs']:8,} {one['cold_s']:7.1f} {one['warm_s']:7.1f}", end=" ")
            print(f"{one['peak_rss_mb']:8,.0f} {each:15.2f}", flush=True)
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    write({"date": date, **facts, **measured[-1], "sizes": measured, "targets": TARGETS}, args.out)


def measure(params: Path, runs: int) -> dict[str, Any]:
    """Cold and warm seconds of validate + convert on one mixture, its rows, and the peak of memory in MB."""
    from m3diff.__main__ import main as m3diff

    for name in yaml.safe_load(params.read_text("utf-8"))["ingest"]["datasets"]:
        assert m3diff(["--params", str(params), "ingest", name]) == 0
    found = measured_run(params, runs)
    assert len(set(found["digests"])) == 1, "the same input gave different bytes"
    report = json.loads((params.parent / "04_mixture/report.json").read_text("utf-8"))
    return {
        "rows": report["rows_out"],
        "pairs": report["rows_in"],
        "cold_s": round(found["cold_s"], 2),
        "warm_s": round(statistics.median(found["warm_s"]), 2),
        "warm_validate_s": round(statistics.median(found["validate_s"]), 2),
        "warm_runs_s": [round(seconds, 2) for seconds in found["warm_s"]],
        "peak_rss_mb": round(max(found["peak_rss_mb"], found["own_peak_mb"])),
    }


def measured_run(params: Path, runs: int) -> dict[str, Any]:
    """The figures of `run` in a fresh process, and the peak of memory of it and its workers."""
    peak, done = [0.0], threading.Event()
    started = time.time()
    command = [sys.executable, __file__, "run", str(params), str(started), str(runs)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    watch = threading.Thread(target=_watch, args=(process.pid, peak, done))
    watch.start()
    output, _ = process.communicate()
    done.set()
    watch.join()
    assert process.returncode == 0, f"failed: {' '.join(command)}"
    return json.loads(output.splitlines()[-1]) | {"peak_rss_mb": peak[0] / 1e6}


def _watch(pid: int, peak: list[float], done: threading.Event) -> None:
    """Ten times a second the memory of the process and its descendants, in bytes; shared pages count for each of them.
    A look takes a millisecond from what is measured; `run` adds the process's own exact peak."""
    process = psutil.Process(pid)
    while not done.wait(0.1):
        try:
            family = [process, *process.children(recursive=True)]
            peak[0] = max(peak[0], sum(one.memory_info().rss for one in family))
        except psutil.NoSuchProcess:
            continue


def run(params: Path, started: float, runs: str) -> dict[str, Any]:
    """In a fresh process: the command line's validate and convert, once cold and then warm."""
    from m3diff.__main__ import main as m3diff
    from m3diff.records.files import sha256_of_folder

    def digest() -> str:
        return "".join(sha256_of_folder(params.parent / stage) for stage in ("03_clean", "04_mixture"))

    def both() -> float:
        assert m3diff(["--params", str(params), "validate"]) == 0
        between = time.time()
        assert m3diff(["--params", str(params), "convert"]) == 0
        return between

    both()
    cold = time.time() - started
    digests, warm, validate = [digest()], [], []
    for _ in range(int(runs)):
        before = time.time()
        validate.append(both() - before)
        warm.append(time.time() - before)
        digests.append(digest())
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss: macOS counts single ones
    own_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    return {"cold_s": cold, "warm_s": warm, "validate_s": validate, "digests": digests, "own_peak_mb": own_mb}


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        print(json.dumps(run(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4])))
    else:
        main()
