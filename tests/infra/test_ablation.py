"""`make ablation`: rows as DVC's experiments on the toy project, and the table's figures by hand."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

from components.files import sha256_of_folder
from components.params import ParamsError, load_params
from components.profiles import differences, resolve
from infra import ablation, experiments
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
    values = {"CIDEr": [float(np.mean(values)) for values in seeds]}
    return ablation.Row(name, {}, {PROTOCOL: ablation.Scored(values, ablation.summed(tables))})


BASE = [1.0, 2.0] * 13


def plus(more: float) -> list[float]:
    return [value + more for value in BASE]


@pytest.fixture
def found() -> list[dict]:
    """Three rows of two seeds: the second is 2 above the first, the third 0.5 below the second or above it, in turn."""
    third = [value + (0.5 if number % 2 else -0.5) for number, value in enumerate(plus(2))]
    rows = [row("first", [BASE, plus(1)]), row("second", [plus(2), plus(3)]), row("third", [third, third])]
    return ablation.table(rows, ["second", "first"], PROTOCOL)


def test_a_row_has_mean_and_deviation_over_seeds_and_its_difference_to_each_named_row_with_an_interval(found):
    first, second, third = (one["scores"]["CIDEr"] for one in found)
    assert (second["mean"], second["values"], second["sd"]) == (4.0, [3.5, 4.5], pytest.approx(0.5**0.5))
    two, minus = pytest.approx(2), pytest.approx(-2)
    assert second["differences"] == {"first": {"gain": two, "low": two, "high": two}}
    assert first["differences"]["second"] == {"gain": minus, "low": minus, "high": minus}
    assert third["differences"].keys() == {"first", "second"}
    to_second = third["differences"]["second"]
    assert to_second["gain"] == pytest.approx(-0.5)
    assert to_second["low"] < -0.5 < to_second["high"] < 0
    assert [one["pairs"] for one in found] == [26] * 3


def test_the_text_names_what_a_difference_is_to(found):
    text = "\n".join(ablation.lines(found, PROTOCOL, 2))
    assert text.startswith(
        "toy/total, 26 pairs, 2 seeds, times 100\nfirst\n  CIDEr                     200.0  sd 70.7\n"
        "    -200.0  (-200.0 to -200.0)  to second\n"
        "second\n  CIDEr                     400.0  sd 70.7\n    +200.0  (+200.0 to +200.0)  to first\nthird\n"
    )


def test_the_markdown_has_a_table_of_scores_and_one_for_each_row_to_compare_with(found):
    absent = {"fourth": "left out: fourth: there is no base"}
    assert list(ablation.markdown({PROTOCOL: found[:2]}, ["first", "fourth"], 2, absent)) == [
        "| `toy/total`, 26 pairs, 2 seeds, mean ± standard deviation, times 100 | CIDEr |",
        "|---|---|",
        "| first | 200.0 ± 70.7 |",
        "| second | 400.0 ± 70.7 |",
        "",
        "| difference to *first* (95 % interval over pairs) | CIDEr |",
        "|---|---|",
        "| second | +200.0 (+200.0 to +200.0) |",
        "",
        "- left out: fourth: there is no base",
    ]


def test_shares_are_written_in_percent_and_what_a_row_has_not_is_left_empty():
    gain = {"gain": 0.051, "low": 0.0104, "high": 0.09}
    cell = {"mean": 0.8614, "sd": None, "values": [0.8614], "differences": {"first": gain}}
    rows = [{"row": name, "pairs": 9, "scores": of} for name, of in (("two", {}), ("one", {"no_change_recall": cell}))]
    assert list(ablation.markdown({PROTOCOL: rows}, ["first"], 1, {}))[:-1] == [
        "| `toy/total`, 9 pairs, 1 seed, times 100 | no change seen as such, % |",
        "|---|---|",
        "| two |  |",
        "| one | 86.1 |",
        "",
        "| difference to *first* (95 % interval over pairs) | no change seen as such, % |",
        "|---|---|",
        "| two |  |",
        "| one | +5.1 (+1.0 to +9.0) |",
    ]


def test_the_plot_names_every_row_protocol_and_score_and_is_the_same_twice(tmp_path: Path, found):
    for name in ("a.svg", "b.svg"):
        ablation.plot({PROTOCOL: found, "toy/hard": found[:2]}, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    for word in ("first", "second", "third", "CIDEr", "200.0", "400.0", "toy/total", "toy/hard"):
        assert f"<!-- {word} -->" in text
    assert text.count("<!-- third -->") == 1
    assert (tmp_path / "b.svg").read_text() == text


HEAD = "protocols: [toy/total]\ncompare_with: [one]\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "expected a mapping"),
        (HEAD + "rows: {one: {}}", "rows: expected two or more, found 1"),
        (HEAD + "rows: {one: {}, two: 3}", "rows.two: expected a mapping"),
        (HEAD + "rows: {uno: {}, two: {}}", "compare_with: no row is called 'one'; the rows are uno, two"),
        ("compare_with: [one]\nrows: {one: {}, two: {}}", "protocols: missing"),
        (HEAD + "rows: {one: {}, two: {}}\nneed: {}", "need: unknown key; did you mean 'needs'"),
    ],
)
def test_a_file_of_other_things_than_rows_is_refused(text: str, fault: str, tmp_path: Path):
    (tmp_path / "rows.yaml").write_text(text)
    with pytest.raises(ParamsError, match=f"rows.yaml: {re.escape(fault)}"):
        ablation.read_ablation(tmp_path / "rows.yaml")


@pytest.mark.parametrize(("file", "rows"), [("ablation.yaml", 6), ("ablation-data.yaml", 4)])
def test_each_row_of_a_file_makes_parameters_that_are_right_and_others_than_those_before(
    file: str, rows: int, tmp_path: Path
):
    """As `dvc exp run -S` sets them; a key that is there already is named without a plus."""
    seen = []
    for changes in ablation.read_ablation(ablation.ROWS.with_name(file)).rows.values():
        values = yaml.safe_load((toy.REPOSITORY / "params.yaml").read_text())
        for place, value in changes.items():
            *sections, key = place.removeprefix("+").split(".")
            inside = values
            for section in sections:
                inside = inside.setdefault(section, {}) if place.startswith("+") else inside[section]
            assert (key in inside) != place.startswith("+"), place
            inside[key] = value
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        params = load_params(tmp_path / "params.yaml")
        seen.append([params.train, params.models[params.train.model], params.convert])
    assert len(seen) == rows
    assert all(one not in seen[:number] for number, one in enumerate(seen))


def test_what_is_said_to_be_learnt_is_a_model_that_differs_from_the_first_in_the_modules_rate_alone():
    rows = ablation.read_ablation(ablation.ROWS)
    assert rows.compare_with == ("with MDP", "MDP, never trained")
    assert rows.rows["with MDP"] == {}
    assert rows.rows["MDP, never trained"] == {"models.m3diff.rates.module": None}
    assert load_params(toy.REPOSITORY / "params.yaml").train.model == "m3diff"


def test_a_row_whose_base_is_not_there_is_left_out_and_says_what_makes_it(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = ablation.Ablation(
        protocols=(PROTOCOL,),
        compare_with=(),
        rows={"plain": {}, "single": {"train.base": "data/single"}, "other": {"train.base": "data/other"}},
        needs={"data/single": "make base-single"},
    )
    line = "left out: single: data/single is not there; make it with `make base-single`"
    assert ablation.left_out(rows) == {"single": line}
    (tmp_path / "data/single").mkdir(parents=True)
    assert ablation.left_out(rows) == {}


@pytest.mark.parametrize(
    ("value", "written"), [(None, "null"), ([1, 2], "[1, 2]"), ("no_module", "no_module"), (2.5, "2.5"), (True, "true")]
)
def test_values_are_set_as_yaml_writes_them(value: object, written: str, monkeypatch):
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(experiments, "dvc", lambda *arguments, check=True: calls.append(arguments))
    assert ablation.run_seed("A, row", {"a.b": value}, 3, [Path("data/x")]) == "ablation-a-row-3"
    wanted = ("--copy-paths", "data/x", "-S", "train.seed=3", "-S", f"a.b={written}")
    assert calls == [
        ("exp", "remove", "--quiet", "ablation-a-row-3"),
        ("exp", "run", "--temp", "--name", "ablation-a-row-3", *wanted),
    ]


def test_a_protocol_that_was_not_scored_is_named():
    with pytest.raises(ParamsError, match="protocols: toy/hard was not scored; metrics.json has toy/total"):
        ablation.scored([{PROTOCOL: {}}], [scores(BASE, "abcdefghijklmnopqrstuvwxyz")], "toy/hard")


def test_the_protocols_of_the_rows_are_of_datasets_that_the_embedded_run_scores():
    scored = load_params(toy.REPOSITORY / "params.yaml").ingest.datasets
    assert {name.partition("/")[0] for name in ablation.read_ablation(ablation.ROWS).protocols} <= set(scored)


def test_the_control_base_is_the_embedded_one_without_the_tasks_of_two_images():
    folder = toy.REPOSITORY / "profiles"
    values, _ = resolve(toy.REPOSITORY / "infra" / "base-single.yaml")
    found = differences(resolve(folder / "embedded.yaml")[0], values)
    assert [line.split(":")[0] for line in found] == ["paths.base", "pretrain.tasks"]
    assert values["pretrain"]["tasks"] == ["image", "asked for", "sentence"]
    makes, needed = (toy.REPOSITORY / "Makefile").read_text(), ablation.read_ablation(ablation.ROWS).needs
    assert needed == {Path(values["paths"]["base"]): "make base-single"}
    assert "\nbase-single: install " in makes
    assert "m3diff --params infra/base-single.yaml pretrain\n" in makes


@pytest.mark.slow(105)
def test_rows_are_experiments_beside_the_workspace_and_a_row_that_was_run_is_restored(
    toy_that_ran: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    root = toy_that_ran
    (root / ".gitignore").write_text((root / ".gitignore").read_text() + "/data/other/\n")
    toy.commit(root, "another base is ignored")
    rows = {
        "plain": {},
        "more": {"evaluate.gallery": 74},
        "other": {"train.base": "data/other"},
        "gone": {"a": "data/gone"},
    }
    needs = {"data/other": "make other", "data/gone": "make gone"}
    (root / "data/other").mkdir()
    (root / "data/other/config.json").write_text('{"other": 1}')
    (tmp_path / "rows.yaml").write_text(
        yaml.safe_dump(
            {"protocols": [toy.TOTAL], "compare_with": ["plain"], "rows": rows, "needs": needs}, sort_keys=False
        )
    )
    for _ in range(2):
        out = tmp_path / "ablation.json"
        assert ablation.main(["1", "--rows", str(tmp_path / "rows.yaml"), "--out", str(out)]) == 0
        written = capfd.readouterr().out
        found = json.loads(out.read_text())
        means = [one["scores"]["CIDEr"]["mean"] for one in found["protocols"][toy.TOTAL]]
        assert means == [pytest.approx(1.24), pytest.approx(1.74), pytest.approx(1.24)]
        assert found["made"] == {"data/other": sha256_of_folder(root / "data/other")}
        assert found["left_out"] == {"gone": "left out: gone: data/gone is not there; make it with `make gone`"}
        assert written.count(found["left_out"]["gone"]) == 2, "before the hours, and with the table"
        assert "| more | 174.0 |" in out.with_suffix(".md").read_text()
        assert "dvc exp run --name ablation-more-7407 train.seed=7407 evaluate.gallery=74" in written
        assert out.with_suffix(".svg").is_file()
    assert "Stage 'evaluate' is cached" in written  # the second time nothing runs
    assert toy.run(root, "git", "status", "--porcelain") == ""
    assert set(toy.run(root, "dvc", "exp", "list", "--name-only").split()) == {
        "ablation-plain-7407",
        "ablation-more-7407",
        "ablation-other-7407",
    }
    checkpoint = experiments.read("ablation-other-7407", Path("data/05_model/checkpoint/manifest.json"))
    assert json.loads(checkpoint)["base"] == "data/other"
