"""The benchmarks run and compare the same work: the same rows, trainable tensors and losses on every side."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save

from benchmarks import data as data_benchmark
from benchmarks import digests
from tests.tiny import one_thread  # noqa: F401  # pytest finds it by its name

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bench():
    from benchmarks.levers import Bench, tiny

    return Bench(tiny(pairs=2), gpu=False, precision="fp32")


@pytest.mark.slow
def test_every_variant_trains_the_same_references_to_the_same_loss(bench):
    from benchmarks.levers import ABLATION, GPU_ROWS

    losses = {}
    for variant in ABLATION + GPU_ROWS:
        bench.take(variant)
        losses[variant.name] = bench.run(variant)
    without = losses.pop("stock without MDP")
    assert list(losses.values()) == pytest.approx([losses["stock"]] * 14, rel=1e-5)
    assert without == pytest.approx(losses["stock"], rel=0.05)  # a new module is zero-initialised, or nearly
    assert bench.size.captions == 10


def data(found: dict[str, Any]) -> None:
    assert found["rows"] > 900
    assert len(found["warm_runs_s"]) == 1
    assert found["pictures"]["pairs"] == 24
    assert found["pictures"]["ingest_s"] > 0


def data_against(found: dict[str, Any]) -> None:
    assert found["ratios"].keys() == {"ingest_s", "pictures_validate_s", "cold_s", "warm_s"}
    for seconds in found["seconds"].values():
        assert {len(durations) for durations in seconds.values()} == {2}


def train(found: dict[str, Any]) -> None:
    for name in ("unpacked", "packed"):
        assert found[name]["losses"] == pytest.approx(found["peer"]["losses"], rel=2e-4)
        assert found["ratios"][name] == found[name]["captions_per_s"] / found["peer"]["captions_per_s"]
    assert found["peer"]["losses"][-1] < found["peer"]["losses"][0], "equal losses are losses of models that learn"
    assert len(found["ablation"]) == 7
    assert not found["not_run"]


def gpu_rows(found: dict[str, Any]) -> None:
    names = ["packed, flex, selective", "packed, sdpa, none", "unpacked, selective"]
    assert [row["name"] for row in found["ablation"]] == names
    assert all(row["planned_gb"] > 0 for row in found["ablation"])


TRAIN = "train --pairs 2 --repeats 1 --device cpu --threads 1"
GPU_ROWS = '--rows "packed, flex, selective" "packed, sdpa, none" "unpacked, selective"'
IN_SMALL: dict[str, tuple[int, Callable[[dict[str, Any]], None]]] = {
    "data --sizes 1000 --runs 1 --pairs 24": (30, data),
    "data --against . --turns 2 --sizes 1000 --runs 1 --pairs 24": (90, data_against),
    f"{TRAIN} --steps 4 --round-s 0.01": (25, train),
    f"{TRAIN} --precision bf16 {GPU_ROWS}": (60, gpu_rows),
}
"""Every benchmark with its arguments, its seconds in small, and what then holds of its file."""


def test_every_benchmark_has_a_small_run() -> None:
    scripts = {file.stem for file in (REPOSITORY / "benchmarks").glob("*.py") if "\ndef main(" in file.read_text()}
    others = {"gpu", "digests", "reading"}  # these have tests of their own
    assert scripts - others == {line.split()[0] for line in IN_SMALL}


@pytest.mark.parametrize("line", [pytest.param(line, marks=pytest.mark.slow(of[0])) for line, of in IN_SMALL.items()])
def test_every_benchmark_runs_in_small(line: str, tmp_path: Path) -> None:
    name, *arguments = shlex.split(line)
    command = [sys.executable, "-Wignore", f"benchmarks/{name}.py", *arguments, "--out", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out").read_text())
    IN_SMALL[line][1](found)
    lines = tmp_path / "out.jsonl"
    rows = [json.loads(row) for row in lines.read_text().splitlines()] if lines.exists() else []
    assert [row["name"] for row in rows] == [row["name"] for row in found.get("ablation", [])]


@pytest.mark.slow(10)
def test_a_slice_goes_on_where_the_last_one_ended_and_a_row_that_fails_or_hangs_ends_none(tmp_path: Path) -> None:
    from benchmarks.gpu import Row, climb

    results = tmp_path / "results" / "gpu.jsonl"
    write = "-c \"import pathlib; pathlib.Path('{out}').write_text('[7]')\""
    wait = '-c "import time; time.sleep(60)"'
    rows = [Row("writes", write, 60), Row("fails", "-c 1/0", 60), Row("hangs", wait, 1), Row("long", wait, 60)]
    assert climb(rows, results, 6, "cpu") == 1
    assert climb(rows, results, 2, "cpu") == 0, "a row that had the whole slice is not begun for ever"
    with results.open("a") as file:
        file.write('{"name": "to')  # a kill in the midst of a line
    assert climb([*rows, Row("torn", write, 60)], results, 12, "cpu") == 0
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    codes = [(line["name"], line["rc"]) for line in lines]
    assert codes == [*{"writes": 0, "fails": 1, "hangs": 9, "long": 9, "torn": 0}.items()]
    assert lines[0]["figures"] == lines[4]["figures"] == [7]
    assert "ZeroDivisionError" in lines[1]["printed"]


def mixture_records(folder: Path) -> list[dict[str, Any]]:
    """Every row of a mixture's datasets, with the folder of its images as `root`."""
    manifests = [*folder.glob("*/pairs.json"), *folder.glob("*/annotations.json")]
    return [row | {"root": file.parent} for file in manifests for row in json.loads(file.read_text("utf-8"))]


def thumbnail(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("L").resize((8, 8), Image.Resampling.HAMMING)).astype(int)


def test_the_images_of_a_pair_of_the_mixture_differ_in_every_cell_of_their_thumbnails(tmp_path):
    parts = data_benchmark.write_mixture(tmp_path / "mixture", 3000)
    rows = mixture_records(tmp_path / "mixture")
    assert len(rows) == sum(sum(part.pairs) for part in parts.values())
    for row in rows:
        before = thumbnail(row["root"] / row["before"])
        after = thumbnail(row["root"] / row["after"])
        assert (after - before).min() > 20, row["before"]
    contents = {(row["root"] / row[side]).read_bytes() for row in rows for side in ("before", "after")}
    assert len(contents) <= 2 * data_benchmark.SMALL_IMAGES


def test_inputs_that_an_interrupted_call_left_are_written_anew_and_complete_ones_are_kept(tmp_path):
    unfinished = tmp_path / "pictures.unfinished"
    unfinished.mkdir()
    (unfinished / "pairs.json").write_text("[")
    data_benchmark.write_pictures(tmp_path / "pictures", 4)
    assert not unfinished.exists()
    manifest = tmp_path / "pictures" / "pairs.json"
    assert len(json.loads(manifest.read_text("utf-8"))) == 4
    written_at = manifest.stat().st_mtime_ns
    data_benchmark.write_pictures(tmp_path / "pictures", 4)
    assert manifest.stat().st_mtime_ns == written_at


def test_pictures_are_distinct_repeatable_and_half_of_them_jpeg(tmp_path):
    for name in ("first", "second"):
        data_benchmark.write_pictures(tmp_path / name, 12)
    first, second = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "first", tmp_path / "second")
    )
    assert first == second
    assert len(set(first.values())) == 25
    endings = [path.suffix for path in first]
    assert endings.count(".jpg") == 12
    assert endings.count(".png") == 12
    assert Image.open(tmp_path / "first/0/0_before.jpg").size == (512, 512)


@pytest.mark.parametrize(
    ("seconds", "other_seconds", "ratio", "low", "high"),
    [
        pytest.param([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], 2, 2, 2, id="twice as long in every turn"),
        pytest.param([1.0, 3.0], [1.0, 3.0], 1, 1, 1, id="turns differ but the checkouts do not"),
        pytest.param([1.1, 1.0], [1.0, 1.1], 1, 0.297890, 3.356943, id="two turns that disagree say little"),
    ],
)
def test_the_ratio_of_turns_is_paired(seconds, other_seconds, ratio, low, high):
    result = data_benchmark.ratio_of_turns(seconds, other_seconds)
    assert (result.ratio, result.low, result.high) == pytest.approx((ratio, low, high), rel=1e-5)


def test_two_checkouts_take_turns_and_alternate_in_going_first(tmp_path, monkeypatch, capsys):
    measured = []

    def measure_turn(checkout, pictures, mixture, warm_runs):
        measured.append(checkout.name)
        slower = 1.2 if checkout.name == "this" else 1.0
        return dict.fromkeys(data_benchmark.DURATIONS, slower)

    monkeypatch.setattr(data_benchmark, "measure_turn", measure_turn)
    monkeypatch.setattr(data_benchmark, "ingest_mixture", lambda checkout, params: None)
    checkouts = [data_benchmark.Checkout(name, REPOSITORY, sys.executable) for name in ("this", "other")]
    options = argparse.Namespace(sizes=[1000], pairs=2, turns=3, runs=1)
    figures = data_benchmark.compare(tmp_path, checkouts, options)
    assert measured == ["this", "other"] + ["this", "other"] + ["other", "this"] + ["this", "other"]
    assert figures["ratios"]["ingest_s"] == pytest.approx({"ratio": 1.2, "low": 1.2, "high": 1.2, "limit": 1.15})
    assert figures["ratios"]["pictures_validate_s"]["limit"] is None
    assert capsys.readouterr().out.count("exceeded") == 3


def test_a_process_that_imports_another_checkout_is_refused(tmp_path):
    (tmp_path / "components").mkdir()
    (tmp_path / "params.yaml").write_text("")
    elsewhere = data_benchmark.Checkout("other", tmp_path, sys.executable)
    with pytest.raises(RuntimeError, match="make install"):
        data_benchmark.run_stages(elsewhere, tmp_path / "params.yaml", [])


def test_tensors_are_compared_without_their_order_and_notes():
    one, two = np.arange(6, dtype=np.float32), np.ones(2, dtype=np.int64)
    first = digests.tensors(save({"a": one, "b": two}, {"note": "yesterday"}))
    assert first == digests.tensors(save({"b": two, "a": one}))
    assert first != digests.tensors(save({"a": one, "b": two + 1}))
    assert first != digests.tensors(save({"a": one.reshape(2, 3), "b": two}))


def test_pixels_and_values_are_digested_and_places_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "WORK", tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "page.html").write_text("words")
    found = []
    for path, loss, blue, level in (("a", 1.0, 5, 1), ("b", 1.0, 5, 9), ("a", 1.5, 6, 9)):
        (folder / "report.json").write_text(json.dumps({"all": [{"path": path, "loss": loss}]}))
        (folder / "log.csv").write_text(f"loss,seconds\n{loss},{level}\n")
        Image.new("RGB", (4, 4), (0, 0, blue)).save(folder / "image.png", compress_level=level)
        found.append(dict(digests.contents(folder)))
    assert found[0] == found[1]
    changed = [name for name in found[0] if found[0][name] != found[2][name]]
    assert changed == ["run/log.csv", "run/report.json", "run/1 images"]
