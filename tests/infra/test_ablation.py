"""`make ablation`: rows as DVC's experiments on the toy project, and the table's figures by hand."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from components.params import ParamsError
from infra import ablation
from tests import toy

PROTOCOL = "toy/total"


def scores(cider: list[float], ids: str) -> pa.Table:
    """scores.parquet of one protocol."""
    return pa.table({"protocol": [PROTOCOL] * len(cider), "id": list(ids), "CIDEr": cider})


def test_the_statistics_of_a_pair_are_added_up_over_the_seeds_whatever_the_order_of_its_rows():
    found = ablation.summed([scores([1.0, 2.0, 3.0], "abc"), scores([30.0, 10.0, 20.0], "cab")])
    assert found["id"].to_pylist() == ["a", "b", "c"]
    assert found["CIDEr"].to_pylist() == [[11.0, 2.0], [22.0, 2.0], [33.0, 2.0]]
    assert found.column_names == ["protocol", "id", "CIDEr"]


def row(name: str, seeds: list[list[float]]) -> ablation.Row:
    tables = [scores(values, "abcdefghijklmnopqrstuvwxyz") for values in seeds]
    return ablation.Row(name, {}, {"CIDEr": [float(np.mean(values)) for values in seeds]}, ablation.summed(tables))


def test_a_row_has_mean_and_deviation_over_seeds_and_its_difference_to_the_first_with_an_interval():
    base = [1.0, 2.0] * 13
    first = row("first", [base, [value + 1 for value in base]])
    more = row("more", [[value + 2 for value in base], [value + 3 for value in base]])
    (of_first, of_more) = ablation.table([first, more], PROTOCOL)
    assert of_first["scores"]["CIDEr"]["difference"] is None
    cell = of_more["scores"]["CIDEr"]
    assert (cell["mean"], cell["values"], cell["sd"]) == (4.0, [3.5, 4.5], pytest.approx(0.5**0.5))
    assert cell["difference"] == {"gain": pytest.approx(2), "low": pytest.approx(2), "high": pytest.approx(2)}
    text = "\n".join(ablation.lines([of_first, of_more], PROTOCOL, 2))
    assert "toy/total, 26 pairs, 2 seeds; differences to the first row" in text
    assert "  CIDEr                      4.0000  sd 0.7071   +2.0000  (+2.0000 to +2.0000)" in text


def test_the_plot_names_every_row_and_is_the_same_twice(tmp_path: Path):
    found = ablation.table([row("first", [[1.0] * 26]), row("more", [[2.0] * 26])], PROTOCOL)
    for name in ("a.svg", "b.svg"):
        ablation.plot(found, PROTOCOL, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- {word} -->" in text for word in ("first", "more", "CIDEr", "2"))
    assert (tmp_path / "b.svg").read_text() == text


@pytest.mark.parametrize("text", ["{}", "one: {}", "one: {}\ntwo: 3\n", "- a\n- b\n"])
def test_a_file_that_holds_no_two_rows_is_refused(text: str, tmp_path: Path):
    (tmp_path / "rows.yaml").write_text(text)
    with pytest.raises(ParamsError, match="rows.yaml: expected two rows or more"):
        ablation.read_rows(tmp_path / "rows.yaml")


def test_the_rows_of_the_file_are_parameters_that_there_are():
    rows = ablation.read_rows(ablation.ROWS)
    assert len(rows) == 4
    assert next(iter(rows.values())) == {}
    assert {key for changes in rows.values() for key in changes} == {
        "train.model",
        "+convert.sources.minichange.max_pairs",
    }


@pytest.mark.slow
def test_rows_are_experiments_beside_the_workspace_and_a_row_that_was_run_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "toy")
        monkeypatch.setenv(f"{name}_EMAIL", "toy@localhost")
    root = toy.build(tmp_path / "toy")
    toy.run(root, "dvc", "repro", "-q")
    toy.commit(root, "run")
    monkeypatch.chdir(root)
    (tmp_path / "rows.yaml").write_text("plain: {}\nmore: {evaluate.gallery: 74}\n")
    for _ in range(2):
        out = tmp_path / "ablation.json"
        assert ablation.main(["1", "--rows", str(tmp_path / "rows.yaml"), "--out", str(out)]) == 0
        written = capfd.readouterr().out
        found = json.loads(out.read_text())
        assert [one["scores"]["CIDEr"]["mean"] for one in found["rows"]] == [pytest.approx(1.24), pytest.approx(1.74)]
        assert "dvc exp run --name ablation-more-7407 train.seed=7407 evaluate.gallery=74" in written
        assert out.with_suffix(".svg").is_file()
    assert "Stage 'evaluate' is cached" in written  # the second time nothing runs
    assert toy.run(root, "git", "status", "--porcelain") == ""
    assert set(toy.run(root, "dvc", "exp", "list", "--name-only").split()) == {
        "ablation-plain-7407",
        "ablation-more-7407",
    }
