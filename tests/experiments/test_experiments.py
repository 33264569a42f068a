"""`make experiment`: the files of experiments, the runs of their variants, what these cost, and the table's figures."""

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
from dvc.utils.hydra import apply_overrides

from benchmarks.experiments import __main__ as engine
from benchmarks.experiments import page, runs
from benchmarks.experiments.runs import Budget, Targets, over_seeds, read, score_of, setting
from m3diff.records.files import sha256_of_folder
from m3diff.scoring.bootstrap import resampled_scores
from m3diff.scoring.metrics import METRICS
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params
from tests import toy


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


def scores(cider: list[float], ids: str) -> pa.Table:
    return pa.table({"protocol": [PROTOCOL] * len(cider), "id": list(ids), "CIDEr": cider})


def ran(name: str, seeds: list[list[float]], same_steps_as: str | None = None, **more: float) -> engine.Run:
    tables = [scores(values, "abcdefghijklmnopqrstuvwxyz") for values in seeds]
    metrics = [{PROTOCOL: {"pairs": 26, "CIDEr": float(np.mean(values)), "SPICE": None} | more} for values in seeds]
    return engine.Run(name, {}, [name], metrics, {PROTOCOL: engine.summed(tables)}, BUDGET, same_steps_as)


BASE = [1.0, 2.0] * 13


def plus(more: float) -> list[float]:
    return [value + more for value in BASE]


@pytest.fixture
def found() -> list[dict]:
    """Three variants of two seeds: the second is 2 above the first, the third 0.5 below or above the second in turn."""
    third = [value + (0.5 if number % 2 else -0.5) for number, value in enumerate(plus(2))]
    runs = [ran("first", [BASE, plus(1)]), ran("second", [plus(2), plus(3)]), ran("third", [third, third])]
    return engine.table(runs, ["second", "first"], PROTOCOL)


def test_the_statistics_of_a_pair_are_added_up_over_the_seeds_whatever_the_order_of_its_rows():
    summed = engine.summed([scores([1.0, 2.0, 3.0], "abc"), scores([30.0, 10.0, 20.0], "cab")])
    assert summed["id"].to_pylist() == ["a", "b", "c"]
    assert summed["CIDEr"].to_pylist() == [[11.0, 2.0], [22.0, 2.0], [33.0, 2.0]]
    assert summed.column_names == ["protocol", "id", "CIDEr"]


def test_a_variant_has_mean_deviation_and_values_and_its_difference_to_each_named_variant_with_an_interval(found):
    first, second, third = (one["scores"]["CIDEr"] for one in found)
    assert (second["mean"], second["values"], second["sd"]) == (4.0, [3.5, 4.5], pytest.approx(0.5**0.5))
    two, minus = pytest.approx(2), pytest.approx(-2)
    assert second["differences"] == {"first": {"gain": two, "low": two, "high": two}}
    assert first["differences"]["second"] == {"gain": minus, "low": minus, "high": minus}
    to_second = third["differences"]["second"]
    assert to_second["gain"] == pytest.approx(-0.5)
    assert to_second["low"] < -0.5 < to_second["high"] < 0
    assert [one["pairs"] for one in found] == [26] * 3
    assert found[0]["scores"].keys() == {"CIDEr"}, "neither counts nor scores that a seed lacks"


def test_a_score_of_the_controls_has_no_difference_and_others_are_compared_with_those_of_as_many_steps():
    """A control's score is of other captions than the pairs' own, so no sums over these pairs give it."""
    assert [score for score in page.SCORES if score not in resampled_scores(METRICS)] == ["CIDEr_shuffled"]
    runs = [ran("first", [BASE], CIDEr_shuffled=0.1), ran("second", [plus(2)], CIDEr_shuffled=1.1)]
    rows = engine.table(runs, ["first"], PROTOCOL)
    assert rows[1]["scores"]["CIDEr_shuffled"] == over_seeds([1.1]) | {"differences": {"first": None}}
    runs = [ran("a", [BASE]), ran("b", [plus(5)]), ran("a+", [plus(1)], "a"), ran("b+", [plus(7)], "b")]
    rows = engine.table(runs, [], PROTOCOL)
    assert [list(one["scores"]["CIDEr"]["differences"]) for one in rows] == [[], [], ["a"], ["b"]]


@pytest.mark.parametrize("file", sorted((toy.REPOSITORY / engine.RESULTS).glob("*.md")), ids=lambda file: file.stem)
def test_a_committed_page_is_that_of_the_committed_results(file: Path):
    found = json.loads(file.with_suffix(".json").read_text())
    assert "\n".join(page.markdown(found)) + "\n" == file.read_text()
    cfg = engine.read_experiment(file.stem)
    assert (found["title"], found["note"], found["compare_with"]) == (cfg.title, cfg.note, list(cfg.compare_with))


HEAD = "title: T\nprotocols: [toy/total]\ncompare_with: [one]\n"
TWO = HEAD + "variants: {one: {}, two: "
FAULTS = {
    "": "not a valid YAML mapping",
    TWO + "[}": "not a valid YAML mapping: while parsing",
    HEAD + "variants: {}": "variants: ",
    TWO + "3}": "variants.two: Input should be a valid dictionary",
    HEAD + "variants: {uno: {}, two: {}}": "compare_with: expected one of two, uno (found 'one')",
    "title: T\ncompare_with: [one]\nvariants: {one: {}}": "protocols: missing",
    HEAD + "variants: {one: {}}\nneed: {}": "need: unknown key; did you mean 'needs'",
    TWO + "{synthetic: [edits]}}": "variants.two.synthetic: expected a list of datasets of profiles/made-data.yaml: "
    "minichange_edits, minichange_neighbours, minichange_coupled; found ['edits']",
    TWO + "{synthetic: minichange_edits}}": "variants.two.synthetic: expected a list",
    HEAD + "variants: {one: {same_steps_as: two}, two: {}}": "variants.one.same_steps_as: expected a variant above it:",
    TWO + "{same_steps_as: two}}": "variants.two.same_steps_as: expected a variant above it:",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_file_that_is_no_experiment_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rows.yaml").write_text(text)
    monkeypatch.setattr(engine, "HERE", tmp_path)
    with pytest.raises(ParamsError, match=f"rows.yaml: {re.escape(FAULTS[text])}"):
        engine.read_experiment("rows")


def params_with(changes: Mapping[str, Any], folder: Path) -> Params:
    file = folder / "params.yaml"
    shutil.copy(toy.REPOSITORY / "params.yaml", file)
    apply_overrides(file, [setting(key, value) for key, value in changes.items()])
    return load_params(file)


FILES = {path.stem: engine.read_experiment(path.stem) for path in engine.HERE.glob("*.yaml")}


@pytest.mark.parametrize("name", FILES)
def test_each_variant_makes_valid_parameters_other_than_those_before_and_is_tested_on_the_same_pairs(name, tmp_path):
    seen: list[Any] = []
    cfg = FILES[name]
    for entry in cfg.variants.values():
        params = params_with(
            engine.changes_of(entry) | ({"train.epochs": 1.6} if "same_steps_as" in entry else {}), tmp_path
        )
        seen.append([params.train, params.models[params.train.model], params.convert, params.ingest])
        assert all(made.source.splits == ("train",) for made in params.augment.values())
        assert params.predict == PARAMS.predict
        assert params.train.base == PARAMS.train.base or params.train.base in cfg.needs
    assert all(one not in seen[:number] for number, one in enumerate(seen))
    assert {protocol.partition("/")[0] for protocol in cfg.protocols} <= set(PARAMS.ingest.datasets)


@pytest.mark.slow(150)
def test_variants_are_experiments_of_dvc(toy_that_ran: Path, tmp_path: Path, monkeypatch, capfd):
    """Three pairs, four with the synthetic one, one a batch: nine steps are 2.7 epochs of three and 2.125 of four."""
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
    monkeypatch.setattr(engine, "HERE", tmp_path)
    monkeypatch.setattr(engine, "RESULTS", tmp_path)
    for again in (False, True):
        assert engine.main(["rows"]) == 0
        said = capfd.readouterr().out
        assert ("Running stage 'augment@minichange_edits'" in said) != again
        found = json.loads((tmp_path / "rows.json").read_text())
        plain, more = (found["budgets"][name] for name in ("plain", "more"))
        assert (plain["pairs"], plain["epochs"], plain["steps"]) == (3, 2.7, 9)
        assert (more["pairs"], more["epochs"], more["steps"]) == (4, 2.125, 9)
        assert found["bases"] == {"data/other": sha256_of_folder(root / "data/other")}
        assert said.count(found["left_out"]["gone"]) == 2, "before the hours, and with the table"
        assert "dvc exp run --name rows-other-7407 train.seed=7407 train.base=data/other" in said
    assert "Stage 'evaluate' is cached" in said
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
    with pytest.raises(ParamsError, match=r"^CIDER: no score of evaluate has this name$"):
        score_of(SCORES, "CIDER")
    with pytest.raises(ParamsError, match=r"^reversal: no swapped images$"):
        score_of(SCORES | {"reversal": None, "absent": {"reversal": "no swapped images"}}, "reversal")
    with pytest.raises(ParamsError, match=r"by_type/\*/right: no type of change has this score"):
        score_of(SCORES, "by_type/*/right")


def test_the_mean_over_the_seeds_reaches_a_target_or_does_not():
    least, most = {"d/total": {"exact": 0.7, "CIDEr": 3.0}}, {"d/total": {"exact": 0.7, "CIDEr_shuffled": 0.5}}
    wanted = Targets(profile=Path("p.yaml"), at_least=least, at_most=most)
    rows = list(runs.compare(wanted, [{"d/total": SCORES}, {"d/total": SCORES | {"exact": 0.65}}]))
    exact = ("exact", pytest.approx(0.7), True)
    found = [(row["score"], row["mean"], row["reached"]) for row in rows]
    assert found == [exact, ("CIDEr", 2.0, False), exact, ("CIDEr_shuffled", 0.5, True)]
