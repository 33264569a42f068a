"""`make experiment`: the files of experiments, the runs of their variants, what these cost, and the table's figures."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from dvc.utils.hydra import apply_overrides

from benchmarks.experiments import __main__ as engine
from benchmarks.experiments import page, runs
from benchmarks.experiments.runs import Budget, Targets, over_seeds, read, score_of, setting
from m3diff.records.errors import ParamsError
from m3diff.records.files import sha256_of_folder
from m3diff.scoring.bootstrap import resampled_scores
from m3diff.scoring.metrics import METRICS
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from tests import toy
from tests.errors import raises
from tests.tiers import slow_except


@pytest.fixture
def toy_that_ran(trained_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy project with every stage run and committed, as the current folder; git knows who commits."""
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "toy")
        monkeypatch.setenv(f"{name}_EMAIL", "toy@localhost")
    root = Path(shutil.copytree(trained_once, tmp_path / "toy", symlinks=True))
    toy.commit(root, "run")
    monkeypatch.chdir(root)
    return root


PROTOCOL = "toy/total"
SYN = "minichange_edits"
BUDGET = Budget(pairs=6484, epochs=2.7, steps=1097, captions=35056, alignment_pairs=0, alignment_steps=0)
PARAMS = load_params(toy.REPOSITORY / "params.yaml")


ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def scores(cider: list[float], ids: str) -> pa.Table:
    return pa.table({"protocol": [PROTOCOL] * len(cider), "id": list(ids), "CIDEr": cider})


def variant_run(
    name: str, seeds: list[list[float]], same_steps_as: str | None = None, **extra_scores: float
) -> engine.VariantRun:
    """A run whose seeds have these CIDErs of the pairs a, b, ..."""
    tables = [scores(values, ALPHABET) for values in seeds]
    metrics = []
    for values in seeds:
        metrics.append({PROTOCOL: {"pairs": 26, "CIDEr": float(np.mean(values)), "SPICE": None} | extra_scores})
    return engine.VariantRun(
        name=name,
        changes={},
        experiments=[name],
        metrics=metrics,
        pairs={PROTOCOL: engine.sum_over_seeds(tables)},
        budget=BUDGET,
        same_steps_as=same_steps_as,
    )


BASE = [1.0, 2.0] * 13


def plus(gain: float) -> list[float]:
    """The CIDErs of BASE, all raised by a gain."""
    return [value + gain for value in BASE]


@pytest.fixture
def rows() -> list[dict]:
    """Three variants of two seeds: the second is 2 above the first, the third 0.5 below or above the second in turn."""
    third = [value + (0.5 if number % 2 else -0.5) for number, value in enumerate(plus(2))]
    runs = [
        variant_run("first", [BASE, plus(1)]),
        variant_run("second", [plus(2), plus(3)]),
        variant_run("third", [third, third]),
    ]
    return engine.comparison_rows(runs, ["second", "first"], PROTOCOL)


def test_the_statistics_of_a_pair_are_summed_over_the_seeds_in_any_order_of_rows():
    summed = engine.sum_over_seeds([scores([1.0, 2.0, 3.0], "abc"), scores([30.0, 10.0, 20.0], "cab")])
    assert summed["id"].to_pylist() == ["a", "b", "c"]
    assert summed["CIDEr"].to_pylist() == [[11.0, 2.0], [22.0, 2.0], [33.0, 2.0]]
    assert summed.column_names == ["protocol", "id", "CIDEr"]


def test_a_score_has_its_mean_deviation_and_values_over_the_seeds(rows):
    score = rows[1]["scores"]["CIDEr"]
    assert score["mean"] == 4.0
    assert score["values"] == [3.5, 4.5]
    assert score["sd"] == pytest.approx(0.5**0.5)


def test_a_variant_has_its_difference_to_each_reference_with_an_interval(rows):
    score_1, score_2, score_3 = (row["scores"]["CIDEr"] for row in rows)
    gain = pytest.approx(2)
    loss = pytest.approx(-2)
    assert score_2["differences"] == {"first": {"gain": gain, "low": gain, "high": gain}}
    assert score_1["differences"]["second"] == {"gain": loss, "low": loss, "high": loss}
    to_second = score_3["differences"]["second"]
    assert to_second["gain"] == pytest.approx(-0.5)
    assert to_second["low"] < -0.5 < to_second["high"] < 0


def test_a_row_has_its_pairs_and_only_scores_that_every_seed_has(rows):
    assert [row["pairs"] for row in rows] == [26] * 3
    assert rows[0]["scores"].keys() == {"CIDEr"}, "neither counts nor scores that a seed lacks"


def test_a_score_of_a_control_has_no_difference():
    """A control scores captions of other images, so sums over the pairs do not give its score."""
    assert [score for score in page.SCORES if score not in resampled_scores(METRICS)] == ["CIDEr_shuffled"]
    runs = [variant_run("first", [BASE], CIDEr_shuffled=0.1), variant_run("second", [plus(2)], CIDEr_shuffled=1.1)]
    rows = engine.comparison_rows(runs, ["first"], PROTOCOL)
    assert rows[1]["scores"]["CIDEr_shuffled"] == over_seeds([1.1]) | {"differences": {"first": None}}


def test_a_variant_is_compared_with_the_one_of_the_same_steps():
    runs = [
        variant_run("a", [BASE]),
        variant_run("b", [plus(5)]),
        variant_run("a+", [plus(1)], "a"),
        variant_run("b+", [plus(7)], "b"),
    ]
    rows = engine.comparison_rows(runs, [], PROTOCOL)
    assert [list(row["scores"]["CIDEr"]["differences"]) for row in rows] == [[], [], ["a"], ["b"]]


def test_on_a_retention_dataset_each_variant_is_compared_with_the_base():
    answers = engine.BaseAnswers({"CIDEr": float(np.mean(plus(3)))}, engine.sum_over_seeds([scores(plus(3), ALPHABET)]))
    runs = []
    for name, values in (("first", BASE), ("second", plus(2))):
        runs.append(variant_run(name, [values])._replace(of_base={PROTOCOL: answers}))
    rows = engine.comparison_rows(runs, ["first"], PROTOCOL)
    assert [row["row"] for row in rows] == ["the base", "first", "second"]
    assert rows[0]["scores"]["CIDEr"]["mean"] == 4.5
    losses = [row["scores"]["CIDEr"]["differences"]["the base"]["gain"] for row in rows[1:]]
    assert losses == [pytest.approx(-3), pytest.approx(-1)]
    results = {"seeds": [1], "compare_with": ["first"], "left_out": {}}
    lines = list(page.protocol_tables(results, PROTOCOL, rows))
    assert "| first | -300.0 (-300.0 to -300.0) |" in lines
    assert "| second | +200.0 (+200.0 to +200.0) |" in lines
    assert not any(line.startswith("| the base | +") for line in lines), "no variant is compared with itself"


def test_scores_of_retention_are_those_of_the_chosen_model():
    values = {"model": 0.5, "base": 0.75, "change": -0.25, "low": None, "high": None}
    kinds = {"count": {"records": 1, "CIDEr": values}}
    report = {"retention": {PROTOCOL: {"records": 2, "exact_match": values, "by_kind": kinds}}}
    assert engine.scores_of_retention(report, "base") == {PROTOCOL: {"exact_match": 0.75}}
    assert engine.scores_of_retention(report, "model") == {PROTOCOL: {"exact_match": 0.5}}
    assert engine.scores_of_retention({}, "model") == {}


@pytest.mark.parametrize("file", sorted((toy.REPOSITORY / engine.RESULTS).glob("*.md")), ids=lambda file: file.stem)
def test_a_committed_page_is_that_of_the_committed_results(file: Path):
    results = json.loads(file.with_suffix(".json").read_text())
    assert "\n".join(page.markdown(results)) + "\n" == file.read_text()
    cfg = engine.read_experiment(file.stem)
    assert results["title"] == cfg.title
    assert results["note"] == cfg.note
    assert results["compare_with"] == list(cfg.compare_with)


HEAD = "title: T\nprotocols: [toy/total]\ncompare_with: [one]\n"
TWO = HEAD + "variants: {one: {}, two: "
FAULTS_OF_SECTION = {
    HEAD + "variants: {}": "variants",
    TWO + "3}": "variants.two",
    "title: T\ncompare_with: [one]\nvariants: {one: {}}": "protocols",
    HEAD + "variants: {one: {}}\nneed: {}": "need",
}
MADE_DATA = ["minichange_edits", "minichange_neighbours", "minichange_coupled"]
SAME_STEPS_OF_ONE = "variants.one.same_steps_as"
SAME_STEPS_OF_TWO = "variants.two.same_steps_as"
FAULTS_BETWEEN_FIELDS = {
    HEAD + "variants: {uno: {}, two: {}}": ("unknown_variant", "compare_with", "one", None),
    TWO + "{synthetic: [edits]}}": ("not_made_data", "variants.two.synthetic", ["edits"], MADE_DATA),
    TWO + "{synthetic: minichange_edits}}": ("not_made_data", "variants.two.synthetic", MADE_DATA[0], MADE_DATA),
    HEAD + "variants: {one: {same_steps_as: two}, two: {}}": ("no_variant_above", SAME_STEPS_OF_ONE, "two", []),
    TWO + "{same_steps_as: two}}": ("not_a_variant_above", SAME_STEPS_OF_TWO, "two", ["one"]),
}


@pytest.fixture
def experiment_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(engine, "FOLDER", tmp_path)
    return tmp_path / "rows.yaml"


@pytest.mark.parametrize("text", ["", TWO + "[}"], ids=["empty", "not closed"])
def test_a_file_that_is_no_mapping_is_refused(text: str, experiment_file: Path):
    experiment_file.write_text(text)
    with raises(ParamsError, "experiments.not_a_mapping", path=experiment_file):
        engine.read_experiment("rows")


@pytest.mark.parametrize("text", FAULTS_OF_SECTION)
def test_a_key_that_is_wrong_is_named(text: str, experiment_file: Path):
    experiment_file.write_text(text)
    with raises(ParamsError, "experiments.invalid_file", path=experiment_file) as refused:
        engine.read_experiment("rows")
    (fault,) = refused.value.fields["faults"]
    assert str(fault).startswith(f"{FAULTS_OF_SECTION[text]}: ")


@pytest.mark.parametrize("text", FAULTS_BETWEEN_FIELDS)
def test_a_fault_between_fields_is_named_with_key_value_and_names(text: str, experiment_file: Path):
    code, key, value, names = FAULTS_BETWEEN_FIELDS[text]
    experiment_file.write_text(text)
    with raises(ParamsError, "experiments.invalid_file", path=experiment_file) as refused:
        engine.read_experiment("rows")
    (fault,) = refused.value.fields["faults"]
    assert fault.code == f"experiments.{code}"
    assert fault.fields["key"] == key
    assert fault.fields["value"] == value
    assert fault.fields.get("names") == names


def test_an_unknown_experiment_is_refused_with_the_known_ones(experiment_file: Path):
    experiment_file.touch()
    with raises(ParamsError, "experiments.unknown_experiment", value="row") as refused:
        engine.read_experiment("row")
    assert "rows" in str(refused.value)


def test_made_data_that_all_variants_would_train_on_are_refused(experiment_file: Path):
    experiment_file.write_text(TWO + "{synthetic: [minichange_edits]}}")
    params = load_params(toy.REPOSITORY / "profiles" / "made-data.yaml")
    key = "variants.two.synthetic"
    with raises(ParamsError, "experiments.made_data_in_params", key=key, value="minichange_edits"):
        engine.check_synthetic(engine.read_experiment("rows"), params)


def params_with(changes: Mapping[str, Any], folder: Path) -> Params:
    file = folder / "params.yaml"
    shutil.copy(toy.REPOSITORY / "params.yaml", file)
    apply_overrides(file, [setting(key, value) for key, value in changes.items()])
    return load_params(file)


FILES = {path.stem: engine.read_experiment(path.stem) for path in engine.FOLDER.glob("*.yaml")}


@pytest.mark.parametrize("name", slow_except(FILES, "ablation", "targets", "seeds"))
def test_the_variants_have_different_parameters_and_the_same_test_pairs(name, tmp_path):
    variants: list[Any] = []
    cfg = FILES[name]
    for entry in cfg.variants.values():
        changes = engine.changes_of(entry) | ({"train.epochs": 1.6} if "same_steps_as" in entry else {})
        params = params_with(changes, tmp_path)
        variants.append([params.train, params.models[params.train.model], params.convert, params.ingest])
        assert all(synthetic.source.splits == ("train",) for synthetic in params.augment.values())
        assert params.predict == PARAMS.predict
        assert params.train.base == PARAMS.train.base or params.train.base in cfg.needs
    assert all(variant not in variants[:number] for number, variant in enumerate(variants))
    assert {protocol.partition("/")[0] for protocol in cfg.protocols} <= set(PARAMS.ingest.datasets)


@pytest.mark.slow(75)
def test_variants_are_experiments_of_dvc(toy_that_ran: Path, tmp_path: Path, monkeypatch, capfd):
    """Four pairs, five with the synthetic one, one a batch: eleven steps are 2.7 epochs of four and 2.1 of five."""
    root = toy_that_ran
    (root / ".gitignore").write_text((root / ".gitignore").read_text() + "/data/other/\n")
    apply_overrides(root / "params.yaml", ["train.global_batch=1", "compute.micro_batch=1", "compute.workers=0"])
    toy.run(root, "dvc", "repro", "-q")
    toy.commit(root, "a batch is a pair, and another base is ignored")
    (root / "data/other").mkdir()
    (root / "data/other/config.json").write_text('{"other": 1}')
    variants = {"plain": {}, "other": {"train.base": "data/other"}, "gone": {"a": "data/gone"}}
    variants["more"] = {"synthetic": [SYN], "same_steps_as": "plain"}
    needs = {"data/other": "make other", "data/gone": "make gone"}
    file = {"title": "T", "protocols": [toy.TOTAL], "compare_with": ["plain"], "variants": variants, "needs": needs}
    (tmp_path / "rows.yaml").write_text(yaml.safe_dump(file, sort_keys=False))
    monkeypatch.setattr(engine, "FOLDER", tmp_path)
    monkeypatch.setattr(engine, "RESULTS", tmp_path)
    for is_repeated in (False, True):
        assert engine.main(["rows"]) == 0
        output = capfd.readouterr().out
        assert ("Running stage 'augment@minichange_edits'" in output) != is_repeated
        results = json.loads((tmp_path / "rows.json").read_text())
        plain = results["budgets"]["plain"]
        assert [plain[key] for key in ("pairs", "epochs", "steps")] == [4, 2.7, 11]
        synthetic = results["budgets"]["more"]
        assert [synthetic[key] for key in ("pairs", "epochs", "steps")] == [5, 2.1, 11]
        assert results["bases"] == {"data/other": sha256_of_folder(root / "data/other")}
        assert output.count(results["left_out"]["gone"]) == 2, "before the hours, and with the table"
        assert "dvc exp run --name rows-other-7407 train.seed=7407 train.base=data/other" in output
    assert "Stage 'evaluate' is cached" in output
    assert toy.run(root, "git", "status", "--porcelain") == ""
    listed = set(toy.run(root, "dvc", "exp", "list", "--name-only").split())
    assert listed == {f"rows-{name}-7407" for name in ("plain", "other", "more")}
    checkpoint = read("rows-other-7407", Path("data/05_model/checkpoint/manifest.json"))
    assert json.loads(checkpoint)["base"] == "data/other"


BY_TYPE = {"size": {"exact": 0.25}, "color": {"exact": 0.5}, "ocr": {"pairs": 3}}
SCORES = {"CIDEr": 2.0, "CIDEr_shuffled": 0.5, "exact": 0.75, "by_type": BY_TYPE}


def test_a_score_is_plain_or_that_of_the_worst_type_or_a_ratio():
    assert score_of(SCORES, "exact") == 0.75
    assert score_of(SCORES, "by_type/*/exact") == 0.25
    assert score_of(SCORES, "CIDEr_shuffled/CIDEr") == 0.25


def test_an_unknown_score_is_refused():
    with raises(ParamsError, "experiments.unknown_score", key="CIDER"):
        score_of(SCORES, "CIDER")


def test_an_absent_score_is_refused_with_the_cause_that_evaluate_wrote():
    absent = {"reversal": None, "absent": {"reversal": "no swapped images"}}
    with raises(ParamsError, "experiments.absent_score", key="reversal", cause="no swapped images"):
        score_of(SCORES | absent, "reversal")


def test_a_score_that_no_type_of_change_has_is_refused():
    with raises(ParamsError, "experiments.no_type_has_score", key="by_type/*/right"):
        score_of(SCORES, "by_type/*/right")


def test_the_mean_over_the_seeds_reaches_a_target_or_does_not():
    targets = Targets(
        profile=Path("p.yaml"),
        at_least={"d/total": {"exact": 0.7, "CIDEr": 3.0}},
        at_most={"d/total": {"exact": 0.7, "CIDEr_shuffled": 0.5}},
    )
    rows = list(runs.compare(targets, [{"d/total": SCORES}, {"d/total": SCORES | {"exact": 0.65}}]))
    assert [row["score"] for row in rows] == ["exact", "CIDEr", "exact", "CIDEr_shuffled"]
    assert [row["mean"] for row in rows] == [pytest.approx(0.7), 2.0, pytest.approx(0.7), 0.5]
    assert [row["reached"] for row in rows] == [True, False, True, True]
