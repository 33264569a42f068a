"""Test that the benchmarks run and that all sides do the same work: equal rows, trained tensors and losses."""

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
from benchmarks.gpu import Row, run_missing_rows
from tests.tiny import (
    one_thread,  # noqa: F401  # pytest finds it by its name
    tiny_base,
    tiny_checkpoint,
)

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
        bench.use_variant(variant)
        losses[variant.name] = bench.run(variant)
    loss_without_module = losses.pop("stock without MDP")
    assert list(losses.values()) == pytest.approx([losses["stock"]] * 14, rel=1e-5)
    assert loss_without_module == pytest.approx(
        losses["stock"], rel=0.05
    )  # a new module is zero-initialised, or nearly
    assert bench.size.captions == 10


def check_data(figures: dict[str, Any]) -> None:
    assert figures["rows"] > 900
    assert len(figures["warm_runs_s"]) == 1
    assert figures["pictures"]["pairs"] == 24
    assert figures["pictures"]["ingest_s"] > 0
    assert figures["peers"].keys() == {"rows", "batches"}
    for peer in figures["peers"].values():
        assert peer["rows"] == figures["rows"]
        assert peer["cold_ratio"] == pytest.approx(peer["cold_s"] / figures["cold_s"], abs=0.01)
        assert peer["warm_ratio"] == pytest.approx(peer["warm_s"] / figures["warm_s"], abs=0.01)


def check_data_against(figures: dict[str, Any]) -> None:
    assert figures["ratios"].keys() == {"ingest_s", "pictures_validate_s", "cold_s", "warm_s"}
    for seconds in figures["seconds"].values():
        assert {len(durations) for durations in seconds.values()} == {2}


def check_score(figures: dict[str, Any]) -> None:
    assert figures["equal"]
    assert figures["equal_to_other"]
    assert figures["captions"] == "made"
    assert [len(side["turns"]) for side in figures["sides"].values()] == [2, 2, 2]
    assert figures["sides"]["stock"]["ratio"] > 1
    assert figures["scores"]["METEOR"] > 0.1


def check_vlm(figures: dict[str, Any]) -> None:
    base = figures["bases"]["qwen3_vl"]
    assert base["learned"]["last_loss"] < base["learned"]["first_loss"]
    assert base["learned"]["batch_equals_single"]
    assert base["speed"]["loss_difference"] < 1e-5
    assert base["speed"]["gradient_difference"] < 1e-3
    assert all(base["speed"][str(count)]["packed"] > 0 for count in (1, 3, 6))


def check_train(figures: dict[str, Any]) -> None:
    for name in ("unpacked", "packed"):
        assert figures[name]["losses"] == pytest.approx(figures["peer"]["losses"], rel=2e-4)
        assert figures["ratios"][name] == figures[name]["captions_per_s"] / figures["peer"]["captions_per_s"]
    assert figures["peer"]["losses"][-1] < figures["peer"]["losses"][0], "equal losses are losses of models that learn"
    assert len(figures["ablation"]) == 7
    assert not figures["not_run"]


def check_gpu_rows(figures: dict[str, Any]) -> None:
    names = ["packed, flex, selective", "packed, sdpa, none", "unpacked, selective"]
    assert [row["name"] for row in figures["ablation"]] == names
    assert all(row["planned_gb"] > 0 for row in figures["ablation"])


TRAIN = "train --pairs 2 --repeats 1 --device cpu --threads 1"
GPU_ROWS = '--rows "packed, flex, selective" "packed, sdpa, none" "unpacked, selective"'
SMALL_RUNS: dict[str, tuple[int, Callable[[dict[str, Any]], None]]] = {
    "data --sizes 1000 --runs 1 --pairs 24 --peer-turns 1": (30, check_data),
    "data --against . --turns 2 --sizes 1000 --runs 1 --pairs 24": (100, check_data_against),
    "score --made --images 60 --turns 2 --against .": (70, check_score),
    f"{TRAIN} --steps 4 --round-s 0.01": (25, check_train),
    f"{TRAIN} --precision bf16 {GPU_ROWS}": (10, check_gpu_rows),
    "vlm qwen3_vl --steps 4": (115, check_vlm),
}
"""By the command line of a small run: its seconds and a function that checks its figures."""


def test_every_benchmark_has_a_small_run() -> None:
    scripts = {file.stem for file in (REPOSITORY / "benchmarks").glob("*.py") if "\ndef main(" in file.read_text()}
    separately_tested = {"gpu", "digests", "reading", "caption"}
    assert scripts - separately_tested == {line.split()[0] for line in SMALL_RUNS}


@pytest.mark.parametrize(
    ("line", "check"),
    [pytest.param(line, check, marks=pytest.mark.slow(seconds)) for line, (seconds, check) in SMALL_RUNS.items()],
    ids=SMALL_RUNS.keys(),
)
def test_every_benchmark_runs_in_small(line: str, check: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    name, *arguments = shlex.split(line)
    command = [sys.executable, "-Wignore", f"benchmarks/{name}.py", *arguments, "--out", str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": "."}
    process = subprocess.run(command, env=environment, text=True, capture_output=True, cwd=REPOSITORY)
    assert process.returncode == 0, process.stderr
    figures = json.loads((tmp_path / "out").read_text())
    check(figures)
    lines = tmp_path / "out.jsonl"
    rows = [json.loads(row) for row in lines.read_text().splitlines()] if lines.exists() else []
    assert [row["name"] for row in rows] == [row["name"] for row in figures.get("ablation", [])]


@pytest.mark.slow(45)
def test_a_caption_by_the_command_has_the_stock_script_s_tokens(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tiny_base(tmp_path / "base"), tmp_path / "checkpoint")
    out = tmp_path / "out.json"
    command = [sys.executable, "benchmarks/caption.py", "--model", str(checkpoint), "--turns", "1", "--out", str(out)]
    process = subprocess.run(command, text=True, capture_output=True, cwd=REPOSITORY)
    assert process.returncode == 0, process.stderr
    figures = json.loads(out.read_text())
    assert figures["tokens"]
    assert [len(side["seconds"]) for side in figures["sides"].values()] == [1, 1]
    assert figures["sides"]["stock"]["times_stock"] == 1


WRITES_FIGURES = "-c \"import pathlib; pathlib.Path('{out}').write_text('[7]')\""
SLEEPS = '-c "import time; time.sleep(60)"'


def read_lines(results: Path) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in map(json.loads, results.read_text().splitlines())}


@pytest.mark.slow(10)
def test_a_slice_continues_after_the_last_and_a_failed_row_does_not_end_it(tmp_path: Path) -> None:
    results = tmp_path / "results" / "gpu.jsonl"
    rows = [
        Row(name="writes", command=WRITES_FIGURES, limit_s=60),
        Row(name="fails", command="-c 1/0", limit_s=60),
        Row(name="hangs", command=SLEEPS, limit_s=1),
        Row(name="long", command=SLEEPS, limit_s=60),
    ]
    assert run_missing_rows(rows, results, 6, "cpu") == 1
    assert run_missing_rows(rows, results, 2, "cpu") == 0, "a row that had a whole slice is recorded"
    lines = read_lines(results)
    assert {name: line["rc"] for name, line in lines.items()} == {"writes": 0, "fails": 1, "hangs": 9, "long": 9}
    assert list(lines) == ["writes", "fails", "hangs", "long"]
    assert lines["writes"]["figures"] == [7]
    assert "ZeroDivisionError" in lines["fails"]["printed"]


@pytest.mark.slow(10)
def test_a_slice_removes_a_line_that_a_kill_cut_off_and_runs_its_row(tmp_path: Path) -> None:
    results = tmp_path / "gpu.jsonl"
    finished = Row(name="finished", command=WRITES_FIGURES, limit_s=60)
    run_missing_rows([finished], results, 12, "cpu")
    with results.open("a") as file:
        file.write('{"name": "to')
    assert run_missing_rows([finished, Row(name="torn", command=WRITES_FIGURES, limit_s=60)], results, 12, "cpu") == 0
    lines = read_lines(results)
    assert list(lines) == ["finished", "torn"]
    assert lines["torn"]["rc"] == 0
    assert lines["torn"]["figures"] == [7]


def mixture_records(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all datasets in a mixture. The field `root` is the folder of the images."""
    manifests = [*folder.glob("*/pairs.json"), *folder.glob("*/annotations.json")]
    return [row | {"root": file.parent} for file in manifests for row in json.loads(file.read_text("utf-8"))]


def thumbnail(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("L").resize((8, 8), Image.Resampling.HAMMING)).astype(int)


def test_the_images_of_a_pair_of_the_mixture_differ_in_every_cell_of_the_thumbnail(tmp_path):
    parts = data_benchmark.write_mixture(tmp_path / "mixture", 3000)
    rows = mixture_records(tmp_path / "mixture")
    assert len(rows) == sum(sum(part.pairs) for part in parts.values()) + data_benchmark.TEST_PAIRS
    contents = {(row["root"] / row[side]).read_bytes() for row in rows for side in ("before", "after")}
    assert len(contents) <= 2 * data_benchmark.SMALL_IMAGES
    for row in rows:
        if row["split"] == "test":  # two dark images, as no pair of another split has
            assert (row["root"] / row["before"]).read_bytes() != (row["root"] / row["after"]).read_bytes()
            continue
        before = thumbnail(row["root"] / row["before"])
        after = thumbnail(row["root"] / row["after"])
        assert (after - before).min() > 20, row["before"]


@pytest.mark.slow(5)
def test_inputs_that_an_interrupted_call_left_are_written_again(tmp_path):
    unfinished = tmp_path / "pictures.unfinished"
    unfinished.mkdir()
    (unfinished / "pairs.json").write_text("[")
    data_benchmark.write_pictures(tmp_path / "pictures", 4)
    assert not unfinished.exists()
    assert len(json.loads((tmp_path / "pictures" / "pairs.json").read_text("utf-8"))) == 4


@pytest.mark.slow(8)
def test_complete_inputs_are_not_written_again(tmp_path):
    data_benchmark.write_pictures(tmp_path / "pictures", 4)
    manifest = tmp_path / "pictures" / "pairs.json"
    written_at = manifest.stat().st_mtime_ns
    data_benchmark.write_pictures(tmp_path / "pictures", 4)
    assert manifest.stat().st_mtime_ns == written_at


@pytest.mark.slow(12)
def test_pictures_are_distinct_repeatable_and_half_of_them_jpeg(tmp_path):
    contents = []
    for name in ("a", "b"):
        data_benchmark.write_pictures(tmp_path / name, 12)
        files = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        contents.append({path.relative_to(tmp_path / name): path.read_bytes() for path in files})
    assert contents[0] == contents[1]
    assert len(set(contents[0].values())) == 25, "24 pictures and the manifest"
    endings = [path.suffix for path in contents[0]]
    assert endings.count(".jpg") == 12
    assert endings.count(".png") == 12
    assert Image.open(tmp_path / "a/0/0_before.jpg").size == (512, 512)


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
    assert result.ratio == pytest.approx(ratio, rel=1e-5)
    assert result.low == pytest.approx(low, rel=1e-5)
    assert result.high == pytest.approx(high, rel=1e-5)


@pytest.mark.slow
def test_two_checkouts_take_turns_and_alternate_in_going_first(tmp_path, monkeypatch, capsys):
    checkout_names = []

    def measure_turn(checkout, pictures, mixture, warm_runs):
        checkout_names.append(checkout.name)
        seconds = 1.2 if checkout.name == "this" else 1.0
        return dict.fromkeys(data_benchmark.DURATIONS, seconds)

    monkeypatch.setattr(data_benchmark, "measure_turn", measure_turn)
    monkeypatch.setattr(data_benchmark, "ingest_mixture", lambda checkout, params: None)
    checkouts = [data_benchmark.Checkout(name, REPOSITORY, sys.executable) for name in ("this", "other")]
    options = argparse.Namespace(sizes=[1000], pairs=2, turns=3, runs=1)
    figures = data_benchmark.compare(tmp_path, checkouts, options)
    assert checkout_names == ["this", "other"] + ["this", "other"] + ["other", "this"] + ["this", "other"]
    assert figures["ratios"]["ingest_s"] == pytest.approx({"ratio": 1.2, "low": 1.2, "high": 1.2, "limit": 1.15})
    assert figures["ratios"]["pictures_validate_s"]["limit"] is None
    assert capsys.readouterr().out.count("exceeded") == 3


def test_a_process_that_imports_another_checkout_is_refused(tmp_path):
    (tmp_path / "components").mkdir()
    (tmp_path / "params.yaml").write_text("")
    other_checkout = data_benchmark.Checkout("other", tmp_path, sys.executable)
    with pytest.raises(RuntimeError, match="make install"):
        data_benchmark.run_stages(other_checkout, tmp_path / "params.yaml", [])


def test_tensors_are_compared_without_their_order_and_notes():
    floats = np.arange(6, dtype=np.float32)
    integers = np.ones(2, dtype=np.int64)
    digest = digests.describe_tensors(save({"a": floats, "b": integers}, {"note": "yesterday"}))
    assert digest == digests.describe_tensors(save({"b": integers, "a": floats}))
    assert digest != digests.describe_tensors(save({"a": floats, "b": integers + 1}))
    assert digest != digests.describe_tensors(save({"a": floats.reshape(2, 3), "b": integers}))


def test_pixels_and_values_are_digested_and_paths_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "WORK", tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "page.html").write_text("words")
    digests_of_runs = []
    for path, loss, blue, level in (("a", 1.0, 5, 1), ("b", 1.0, 5, 9), ("a", 1.5, 6, 9)):
        (folder / "report.json").write_text(json.dumps({"all": [{"path": path, "loss": loss}]}))
        (folder / "log.csv").write_text(f"loss,seconds\n{loss},{level}\n")
        Image.new("RGB", (4, 4), (0, 0, blue)).save(folder / "image.png", compress_level=level)
        digests_of_runs.append(dict(digests.digest_files(folder)))
    assert digests_of_runs[0] == digests_of_runs[1]
    changed = [name for name in digests_of_runs[0] if digests_of_runs[0][name] != digests_of_runs[2][name]]
    assert changed == ["run/log.csv", "run/report.json", "run/1 images"]
