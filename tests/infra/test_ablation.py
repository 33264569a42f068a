"""`make ablation`: rows as DVC's experiments on the toy project, and the table's figures by hand."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from dvc.exceptions import InvalidArgumentError
from dvc.utils.hydra import apply_overrides, to_hydra_overrides

from components.evaluate.bootstrap import resampled_scores
from components.evaluate.metrics import METRICS
from components.files import sha256_of_folder
from components.params import Params, ParamsError, load_params
from components.profiles import differences, resolve
from infra import ablation, experiments
from infra.budget import Budget
from infra.seeds import over_seeds
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


def test_a_score_of_the_controls_stands_in_the_table_without_a_difference():
    """It is of other captions than the pairs' own, so no sums over these pairs give it."""
    known = resampled_scores(METRICS)
    assert [score for score in ablation.SCORES if score not in known] == ["CIDEr_shuffled"]
    rows = [row("first", [BASE]), row("second", [plus(2)])]
    for number, one in enumerate(rows):
        one.protocols[PROTOCOL].scores["CIDEr_shuffled"] = [0.1 + number]
    made = ablation.table(rows, ["first"], PROTOCOL)
    assert made[1]["scores"]["CIDEr_shuffled"] == {**over_seeds([1.1]), "differences": {"first": None}}
    page = "\n".join(ablation.markdown({PROTOCOL: made}, ["first"], 1, {}))
    assert "| second | 350.0 | 110.0 |" in page
    assert "| second | +200.0 (+200.0 to +200.0) |  |" in page


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
        (HEAD + "rows: {one: {}, two: [}", "not valid YAML: while parsing"),
        (HEAD + "rows: {one: {}}", "rows: expected two or more, found 1"),
        (HEAD + "rows: {one: {}, two: 3}", "rows.two: expected a mapping"),
        (HEAD + "rows: {uno: {}, two: {}}", "compare_with: no row is called 'one'; the rows are uno, two"),
        ("compare_with: [one]\nrows: {one: {}, two: {}}", "protocols: missing"),
        (HEAD + "rows: {one: {}, two: {}}\nneed: {}", "need: unknown key; did you mean 'needs'"),
        (
            HEAD + "rows: {one: {}, two: {made: [edits]}}",
            "rows.two.made: expected a list of what profiles/made-data.yaml makes, of minichange_edits, "
            "minichange_neighbours, minichange_coupled; found ['edits']",
        ),
        (HEAD + "rows: {one: {}, two: {made: minichange_edits}}", "rows.two.made: expected a list"),
        (
            HEAD + "rows: {one: {beside: two}, two: {}}",
            "rows.one.beside: expected a row above it, of which there is none; found 'two'",
        ),
        (
            HEAD + "rows: {one: {}, two: {beside: three}}",
            "rows.two.beside: expected a row above it, one; found 'three'",
        ),
        (
            HEAD + "rows: {one: {}, two: {beside: one, train.epochs: 3}}",
            "rows.two.train.epochs: follows from the steps of the row beside; leave one of the two out",
        ),
    ],
)
def test_a_file_of_other_things_than_rows_is_refused(text: str, fault: str, tmp_path: Path):
    (tmp_path / "rows.yaml").write_text(text)
    with pytest.raises(ParamsError, match=f"rows.yaml: {re.escape(fault)}"):
        ablation.read_ablation(tmp_path / "rows.yaml")


FILES = {
    "ablation.yaml": 6,
    "ablation-data.yaml": 4,
    "ablation-onediff.yaml": 4,
    "ablation-diffcap.yaml": 4,
    "ablation-syned.yaml": 6,
}


def rows_of(file: str) -> ablation.Ablation:
    return ablation.read_ablation(ablation.ROWS.with_name(file))


def params_with(changes: Mapping[str, Any], folder: Path) -> Params:
    """params.yaml as `dvc exp run -S` changes it, by DVC's own function; a key that is there already has no plus."""
    file = folder / "params.yaml"
    shutil.copy(toy.REPOSITORY / "params.yaml", file)
    apply_overrides(file, [experiments.setting(key, value) for key, value in changes.items()])
    return load_params(file)


def test_every_file_of_rows_is_looked_at_here():
    assert {path.name for path in ablation.ROWS.parent.glob("ablation*.yaml")} == FILES.keys()


@pytest.mark.parametrize("file", FILES)
def test_a_file_and_the_texts_say_how_it_is_run(file: str):
    command = "make ablation" + (f" ROWS=infra/{file}" if file != ablation.ROWS.name else "")
    texts = [toy.REPOSITORY / name for name in ("README.md", "docs/made-data.md")]
    assert f"`{command}`" in (ablation.ROWS.parent / file).read_text()
    assert any(command.removeprefix("make ablation ") in text.read_text() for text in texts)


@pytest.mark.parametrize("file", FILES)
def test_each_row_of_a_file_makes_parameters_that_are_right_and_others_than_those_before(file: str, tmp_path: Path):
    seen: list[Any] = []
    for row in rows_of(file).rows.values():
        params = params_with(ablation.changes_of(row) | ({"train.epochs": 1.6} if "beside" in row else {}), tmp_path)
        seen.append([params.train, params.models[params.train.model], params.convert, params.ingest])
    assert len(seen) == FILES[file]
    assert all(one not in seen[:number] for number, one in enumerate(seen))


@pytest.mark.parametrize("file", FILES)
def test_the_rows_of_a_file_are_validated_and_tested_on_the_same_pairs(file: str, tmp_path: Path):
    for row in rows_of(file).rows.values():
        params = params_with(ablation.changes_of(row), tmp_path)
        assert all(entry.source.splits == ("train",) for entry in params.augment.values())
        assert params.predict == load_params(toy.REPOSITORY / "params.yaml").predict


def test_a_key_without_its_plus_and_one_with_a_plus_too_many_are_refused(tmp_path: Path):
    for changes in ({"augment.more": {}}, {"+train.epochs": 1}):
        with pytest.raises(InvalidArgumentError):
            params_with(changes, tmp_path)


def test_a_made_dataset_is_that_of_the_profile_but_of_training_pairs_alone(tmp_path: Path):
    profile = load_params(toy.REPOSITORY / ablation.MADE_DATA)
    made = list(profile.augment)
    params = params_with(ablation.changes_of({"made": made}), tmp_path)
    assert made == ["minichange_edits", "minichange_neighbours", "minichange_coupled"]
    for name in made:
        ours, theirs = params.augment[name], profile.augment[name]
        assert ours.source.splits == ("train",)
        assert ours.model_copy(update={"source": theirs.source}) == theirs
    assert (params.ingest, params.convert) == (profile.ingest, profile.convert)
    assert params_with(ablation.changes_of({"made": made[:1]}), tmp_path).convert.sources == {}


@pytest.mark.parametrize("file", [file for file in FILES if "made" in str(rows_of(file).rows)])
def test_rows_are_refused_where_the_parameters_make_what_only_some_of_them_train_on(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As after `m3diff profile made-data`; before anything runs."""
    rows = ablation.ROWS.with_name(file)
    made = load_params(toy.REPOSITORY / ablation.MADE_DATA)
    monkeypatch.setattr(ablation, "load_params", lambda path: made)
    monkeypatch.setattr(ablation, "run_rows", lambda *_: pytest.fail("rows were run"))
    assert ablation.main(["1", "--rows", str(rows), "--out", str(tmp_path / "out.json")]) == 1
    told = capsys.readouterr().err
    assert re.search(r"\.made: params.yaml has 'minichange_\w+' already, so that the rows without it would train", told)
    assert "`m3diff profile embedded`" in told
    ablation.check_made(ablation.read_ablation(ablation.ROWS), made, ablation.ROWS)


def test_table_2_of_onediff_has_the_module_or_not_and_the_alignment_or_not(tmp_path: Path):
    found = {name: params_with(ablation.changes_of(row), tmp_path) for name, row in rows_of(ONEDIFF).rows.items()}
    models = {name: params.models["onediff"] for name, params in found.items()}
    assert {params.train.model for params in found.values()} == {"onediff"}
    assert {name: (model.module is not None, model.align is not None) for name, model in models.items()} == {
        "neither": (False, False),
        "CST": (False, True),
        "VDM": (True, False),
        "both": (True, True),
    }
    for name, params in found.items():
        align = models[name].align
        assert params.train == found["neither"].train
        assert set(params.ingest.datasets) - set(align.datasets if align else ()) == LEVELS, "what is fine-tuned on"
        if align:
            trained = {part: rate for part, rate in align.rates.items() if rate is not None}
            assert trained.keys() == {"projector"} | ({"module"} if models[name].module else set())
            assert trained.items() <= dict(models[name].rates).items()


ONEDIFF, LEVELS = "ablation-onediff.yaml", {"minichange", "minichange_free", "minichange_shifted"}
SYN, REAL = "minichange_edits", "minichange_neighbours"


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        (
            "ablation-diffcap.yaml",
            {
                "Coll": ("onediff", [], None),
                "Coll and Syn": ("onediff", [SYN], "Coll"),
                "Coll and Real": ("onediff", [REAL], "Coll"),
                "Coll, Syn and Real": ("onediff", [SYN, REAL], "Coll"),
            },
        ),
        (
            "ablation-syned.yaml",
            {
                "m3diff": ("m3diff", [], None),
                "m3diff with edits": ("m3diff", [SYN], "m3diff"),
                "onediff": ("onediff", [], None),
                "onediff with edits": ("onediff", [SYN], "onediff"),
                "blip2idc": ("blip2idc", [], None),
                "blip2idc with edits": ("blip2idc", [SYN], "blip2idc"),
            },
        ),
    ],
)
def test_a_row_with_made_data_stands_beside_the_same_model_without(file: str, wanted: dict[str, Any]):
    rows = rows_of(file).rows
    assert {name: (row["train.model"], row.get("made", []), row.get("beside")) for name, row in rows.items()} == wanted
    assert all(row.keys() <= {"train.model", "train.base", "made", "beside"} for row in rows.values())
    bases = {row["train.model"]: row.get("train.base") for row in rows.values()}
    assert all(row.get("train.base") == bases[row["train.model"]] for row in rows.values())
    assert set(bases.values()) - {None} == {str(folder) for folder in rows_of(file).needs}


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


def test_a_row_beside_one_that_is_left_out_is_left_out(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = ablation.Ablation(
        protocols=(PROTOCOL,),
        rows={
            "plain": {},
            "single": {"train.base": "data/single"},
            "more": {"beside": "single"},
            "x": {"beside": "plain"},
        },
        needs={"data/single": "make base-single"},
    )
    assert list(ablation.left_out(rows)) == ["single", "more"]
    assert ablation.left_out(rows)["more"] == "left out: more: single, which it stands beside, is left out"


def test_a_row_beside_another_is_run_in_the_epochs_of_as_many_steps_after_it(monkeypatch):
    """Of 100 steps of the row above; its changes are those of the file, its made data written out, and the epochs."""
    ran: list[tuple[str, dict[str, Any], list[Path]]] = []
    asked: list[Any] = []

    def run_row(name: str, changes: dict[str, Any], seeds: Any, ablation_: Any, paths: Any) -> ablation.Row:
        ran.append((name, changes, ablation.given(changes, ablation_)))
        return row(name, [BASE])._replace(budget=BUDGET._replace(steps=100 + len(ran) - 1))

    def epochs_for(*arguments: Any) -> float:
        asked.append(arguments)
        return 1.25

    monkeypatch.setattr(ablation, "run_row", run_row)
    monkeypatch.setattr(ablation, "epochs_for", epochs_for)
    rows = {
        "plain": {"train.base": "data/other"},
        "apart": {},
        "gone": {"train.base": "data/gone"},
        "More, edits": {"train.base": "data/other", "made": [SYN], "beside": "plain"},
    }
    needs = {"data/other": "make other", "data/gone": "make gone"}
    cfg = ablation.Ablation(protocols=(PROTOCOL,), rows=rows, needs=needs)
    found = ablation.run_rows(cfg, {"gone": "left out"}, [7], PATHS)
    made = {"train.base": "data/other"} | ablation.made_dataset(SYN)
    assert ran == [
        ("plain", rows["plain"], [Path("data/other")]),
        ("apart", {}, []),
        ("More, edits", made | {"train.epochs": 1.25}, [Path("data/other")]),
    ]
    (one,) = asked
    assert one[:2] == (100, "ablation-more-edits-data")
    assert one[2:] == (made, [Path("data/other")], PATHS)
    assert [each.beside for each in found] == [None, None, "plain"]


BUDGET = Budget(pairs=6484, epochs=2.7, steps=1097, captions=35056, alignment_pairs=0, alignment_steps=0)
PATHS = load_params(toy.REPOSITORY / "params.yaml").paths


def test_the_table_of_budgets_has_the_steps_of_each_phase_where_any_row_has_two():
    other = BUDGET._replace(pairs=10884, epochs=1.610132, alignment_pairs=3300, alignment_steps=207)
    assert list(ablation.budget_table({"one": BUDGET._asdict()})) == [
        "| trained on | pairs that train | epochs | optimizer steps | captions trained on |",
        "|---|---|---|---|---|",
        "| one | 6,484 | 2.700 | 1,097 | 35,056 |",
    ]
    head, _, *rows = ablation.budget_table({"one": BUDGET._asdict(), "two": other._asdict()})
    assert head.endswith("| captions trained on | pairs of the alignment before | its steps |")
    assert rows == [
        "| one | 6,484 | 2.700 | 1,097 | 35,056 | 0 | 0 |",
        "| two | 10,884 | 1.610 | 1,097 | 35,056 | 3,300 | 207 |",
    ]


def test_rows_beside_each_other_are_compared_and_no_others():
    rows = [row("a", [BASE]), row("b", [plus(5)]), row("a+", [plus(1)]), row("b+", [plus(7)])]
    rows = [*rows[:2], rows[2]._replace(beside="a"), rows[3]._replace(beside="b")]
    found = ablation.table(rows, [], PROTOCOL)
    differences = [one["scores"]["CIDEr"]["differences"] for one in found]
    one, two = pytest.approx(1), pytest.approx(2)
    of_a, of_b = {"gain": one, "low": one, "high": one}, {"gain": two, "low": two, "high": two}
    assert differences == [{}, {}, {"a": of_a}, {"b": of_b}]
    assert list(ablation.markdown({PROTOCOL: found}, [], 1, {}))[-5:] == [
        "| difference on as many steps (95 % interval over pairs) | CIDEr |",
        "|---|---|",
        "| a+, to *a* | +100.0 (+100.0 to +100.0) |",
        "| b+, to *b* | +200.0 (+200.0 to +200.0) |",
        "",
    ]


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


@pytest.mark.parametrize(
    "value",
    [
        {"kind": "edits", "source": {"root": "data/01_raw/x", "splits": ["train"]}, "band": [0.75, -1], "none": None},
        {"separator": "; ", "words": ['say "no"', "a, b", "it's", "x: {y}", "", "null", "3"], "on": True, "empty": {}},
        [[], [1e-05, 2.0, 3]],
    ],
)
def test_a_mapping_is_written_as_hydra_reads_it(value: Any):
    (read,) = to_hydra_overrides([experiments.setting("+some.key", value)])
    assert read.value() == value
    assert not read.is_sweep_override()


def test_stages_that_are_asked_for_alone_are_named_behind_the_changes(monkeypatch):
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(experiments, "dvc", lambda *arguments, check=True: calls.append(arguments))
    experiments.run_experiment("name", {"a": 1}, targets=["convert"])
    assert calls[-1] == ("exp", "run", "--temp", "--name", "name", "-S", "a=1", "convert")


def test_a_protocol_that_was_not_scored_is_named():
    with pytest.raises(ParamsError, match="protocols: toy/hard was not scored; metrics.json has toy/total"):
        ablation.scored([{PROTOCOL: {}}], [scores(BASE, "abcdefghijklmnopqrstuvwxyz")], "toy/hard")


@pytest.mark.parametrize("file", FILES)
def test_the_protocols_of_the_rows_are_of_datasets_that_the_embedded_run_scores(file: str):
    scored = load_params(toy.REPOSITORY / "params.yaml").ingest.datasets
    assert {name.partition("/")[0] for name in rows_of(file).protocols} <= set(scored)


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


@pytest.mark.slow(90)
def test_a_row_with_made_data_takes_as_many_steps_as_the_one_beside(
    toy_that_ran: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Three pairs, four with the made one, a pair a batch: nine steps are 2.7 epochs of three and 2.125 of four."""
    root = toy_that_ran
    overrides = ["train.global_batch=1", "compute.micro_batch=1", "compute.workers=0"]
    apply_overrides(root / "params.yaml", overrides)
    toy.run(root, "dvc", "repro", "-q")
    toy.commit(root, "a batch is a pair")
    rows = {"plain": {}, "more": {"made": [SYN], "beside": "plain"}}
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump({"protocols": [toy.TOTAL], "rows": rows}, sort_keys=False))
    out = tmp_path / "ablation.json"
    assert ablation.main(["1", "--rows", str(tmp_path / "rows.yaml"), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    plain, more = (found["budgets"][name] for name in rows)
    assert (plain["pairs"], plain["epochs"], plain["steps"]) == (3, 2.7, 9)
    assert (more["pairs"], more["epochs"], more["steps"]) == (4, 2.125, 9)
    assert [one["beside"] for one in found["protocols"][toy.TOTAL]] == [None, "plain"]
    assert "| more | 4 | 2.125 | 9 | 9 |" in out.with_suffix(".md").read_text()
    said = capfd.readouterr().out
    assert "more, its data: dvc exp run --name ablation-more-data " in said
    assert said.count("Running stage 'augment@minichange_edits'") == 1, "made once, then found in the run cache"
    assert "ablation-more-data" not in toy.run(root, "dvc", "exp", "list", "--name-only")
    assert toy.run(root, "git", "status", "--porcelain") == ""
