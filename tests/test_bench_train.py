"""Test that `make bench-train ROWS=...` measures some rows and does not change the others."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import levers, train

DEVICE = {"device": "a CPU", "load_before": 0.0}
CONDITIONS = {"device": "a CPU", "shapes": "tiny", "precision": "fp32", "pairs": 16}
FIRST_ROW, SECOND_ROW = (variant.name for variant in levers.ABLATION[:2])


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the result file of a run of two rows, which took one second each."""
    file = tmp_path / "train.json"
    rows = [{"name": FIRST_ROW, "seconds": 1}, {"name": SECOND_ROW, "seconds": 1}]
    result = CONDITIONS | {"ablation": rows, "not_run": {}, "packed": {"losses": [1.0]}, "command": "the first run's"}
    file.write_text(json.dumps(result))
    file.with_suffix(".jsonl").write_text("".join(json.dumps(row | CONDITIONS) + "\n" for row in rows))
    monkeypatch.setattr(train, "describe_machine", lambda device: DEVICE)
    return file


def run(out: Path, monkeypatch: pytest.MonkeyPatch, *rows: str, seconds: int = 2, not_run: str = "") -> dict[str, Any]:
    """Run the benchmark for these rows with simulated durations, and return the result."""

    def measure_levers(*arguments: Any) -> dict[str, Any]:
        *_, variants, report = arguments
        names = [variant.name for variant in variants if variant.name != not_run]
        for name in names:
            report({"name": name, "seconds": seconds})
        missing = {not_run: "does not fit"} if not_run else {}
        return {"ablation": [{"name": name, "seconds": seconds} for name in names], "not_run": missing, "pairs": 16}

    monkeypatch.setattr(levers, "measure_levers", measure_levers)
    options = ["--device", "cpu", "--shapes", "tiny", "--precision", "fp32", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["train.py", *options, "--rows", *rows])
    train.main()
    return json.loads(out.read_text())


def seconds_of(rows: list[dict[str, Any]]) -> dict[str, int]:
    return {row["name"]: row["seconds"] for row in rows}


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]


def test_the_other_rows_stay_in_both_files(out, monkeypatch):
    result = run(out, monkeypatch, SECOND_ROW)
    assert seconds_of(result["ablation"]) == {FIRST_ROW: 1, SECOND_ROW: 2}
    assert seconds_of(lines_of(out)) == {FIRST_ROW: 1, SECOND_ROW: 2}


def test_the_comparison_of_the_first_run_stays_and_a_new_row_has_its_command(out, monkeypatch):
    result = run(out, monkeypatch, SECOND_ROW)
    assert result["packed"] == {"losses": [1.0]}
    assert result["command"] == "the first run's"
    assert "--rows" in result["ablation"][1]["command"]


def test_a_row_that_no_longer_runs_is_removed_from_the_figures(out, monkeypatch):
    result = run(out, monkeypatch, SECOND_ROW, not_run=SECOND_ROW)
    assert seconds_of(result["ablation"]) == {FIRST_ROW: 1}
    assert result["not_run"] == {SECOND_ROW: "does not fit"}


def test_without_an_earlier_result_rows_make_a_new_file(out, monkeypatch):
    out.unlink()
    out.with_suffix(".jsonl").unlink()
    result = run(out, monkeypatch, SECOND_ROW)
    assert seconds_of(result["ablation"]) == {SECOND_ROW: 2}
    assert result["command"] == "python benchmarks/train.py " + " ".join(sys.argv[1:])


@pytest.mark.parametrize("name", ["device", "shapes", "precision", "pairs"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_rows_of_other_conditions_are_refused_and_the_file_is_unchanged(suffix, name, out, monkeypatch):
    file = out.with_suffix(suffix)
    lines = [json.loads(text) | {name: "another"} for text in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = file.read_text()
    with pytest.raises(SystemExit) as refused:
        run(out, monkeypatch, SECOND_ROW)
    assert str(file) in str(refused.value)
    assert name in str(refused.value)
    assert file.read_text() == before


def test_a_line_that_a_kill_cut_off_is_dropped(out, monkeypatch):
    with out.with_suffix(".jsonl").open("a") as file:
        file.write('{"name": "to')
    run(out, monkeypatch, SECOND_ROW)
    assert [line["name"] for line in lines_of(out)] == [FIRST_ROW, SECOND_ROW]
