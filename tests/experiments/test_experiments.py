"""`make experiment`: the files of experiments, the runs of their variants, what these cost, and the table's figures."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from dvc.utils.hydra import apply_overrides

from benchmarks.experiments import __main__ as engine
from benchmarks.experiments import cost, page, runs
from benchmarks.experiments.runs import Budget, Targets, over_seeds, read, score_of, setting
from m3diff.records.files import sha256_of_folder
from m3diff.records.schemas import NO_CHANGE
from m3diff.scoring.bootstrap import resampled_scores
from m3diff.scoring.metrics import METRICS
from m3diff.settings.load import load_params
from m3diff.settings.profiles import differences, resolve
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params
from tests import toy
from tests.tiny import noise_image


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


# The table


def scores(cider: list[float], ids: str) -> pa.Table:
    """scores.parquet of one protocol."""
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


# The page


@pytest.mark.parametrize("file", sorted((toy.REPOSITORY / engine.RESULTS).glob("*.md")), ids=lambda file: file.stem)
def test_a_committed_page_is_that_of_the_committed_results(file: Path):
    found = json.loads(file.with_suffix(".json").read_text())
    assert "\n".join(page.markdown(found)) + "\n" == file.read_text()
    cfg = engine.read_experiment(file.stem)
    assert (found["title"], found["note"], found["compare_with"]) == (cfg.title, cfg.note, list(cfg.compare_with))


# The files

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
    """params.yaml as `dvc exp run -S` changes it, by DVC's own function."""
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


def test_a_synthetic_dataset_is_that_of_the_profile_but_of_training_pairs_alone(tmp_path: Path):
    profile = load_params(toy.REPOSITORY / engine.SYNTHETIC_DATA)
    params = params_with(engine.changes_of({"synthetic": list(profile.augment)}), tmp_path)
    for name, theirs in profile.augment.items():
        source = params.augment[name].source
        assert source.splits == ("train",)
        assert params.augment[name] == theirs.model_copy(update={"source": source})
    assert (params.ingest, params.convert) == (profile.ingest, profile.convert)


def test_parameters_that_have_what_only_some_variants_train_on_are_refused(monkeypatch, capsys):
    """The parameters are those after `m3diff profile made-data`, and nothing runs."""
    made = load_params(toy.REPOSITORY / engine.SYNTHETIC_DATA)
    monkeypatch.setattr(engine, "load_params", lambda path: made)
    monkeypatch.setattr(engine, "conduct", lambda *_: pytest.fail("variants were run"))
    assert engine.main(["ablation-syned"]) == 1
    told = capsys.readouterr().err
    assert ".synthetic: params.yaml has 'minichange_edits' already, so that variants without it would" in told
    assert "`m3diff profile embedded`" in told
    engine.check_synthetic(FILES["ablation"], made)
    assert engine.main(["compar"]) == 1
    assert capsys.readouterr().err.startswith("make experiment: NAME: did you mean 'compare'?")


def test_a_model_with_edits_is_that_without_them():
    for name in ("ablation-diffcap", "ablation-syned"):
        variants = FILES[name].variants
        for entry in [entry for entry in variants.values() if "synthetic" in entry]:
            plain = {key: value for key, value in entry.items() if key not in ("synthetic", "same_steps_as")}
            assert plain == variants[entry["same_steps_as"]]


def test_the_control_base_is_the_embedded_one_without_the_tasks_of_two_images():
    values = resolve(toy.REPOSITORY / "infra" / "base-single.yaml")
    found = differences(resolve(toy.REPOSITORY / "profiles" / "embedded.yaml"), values)
    assert [line.split(":")[0] for line in found] == ["paths.base", "pretrain.tasks"]
    assert values["pretrain"]["tasks"] == ["image", "asked for", "sentence"]
    assert FILES["ablation"].needs == {Path(values["paths"]["base"]): "make base-single"}


# The runs


def experiment(**fields: Any) -> engine.Experiment:
    return engine.Experiment(**({"title": "T", "protocols": (PROTOCOL,)} | fields))


def test_a_variant_without_its_base_is_left_out_and_so_is_one_compared_with_it(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variants = {"plain": {}, "single": {"train.base": "data/single"}, "other": {"train.base": "data/other"}}
    variants |= {"more": {"same_steps_as": "single"}, "x": {"same_steps_as": "plain"}}
    cfg = experiment(variants=variants, needs={"data/single": "make base-single"})
    assert engine.left_out(cfg) == {
        "single": "left out: single: data/single is not there; make it with `make base-single`",
        "more": "left out: more: single, with which it is compared, is left out",
    }
    (tmp_path / "data/single").mkdir(parents=True)
    assert engine.left_out(cfg) == {}


class Runs:
    """Fake runs of DVC, whose CIDEr is their seed and whose number of steps grows; `fails` names one that fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails = fails
        for name in ("run", "read", "budget_of", "epochs_for", "dvc"):
            monkeypatch.setattr(engine, name, getattr(self, name))

    def run(self, name: str, changes: Mapping[str, Any], folders: list[Path]) -> None:
        self.calls.append((name, dict(changes), folders))
        if name == self.fails:
            raise engine.subprocess.CalledProcessError(75, ["dvc", "exp", "run"])

    def read(self, name: str, path: Path) -> bytes:
        if path.suffix == ".json":
            of = {"pairs": 26, "CIDEr": float(name.rpartition("-")[2]), "intervals": {}}
            return json.dumps({"protocols": {PROTOCOL: of}}).encode()
        sink = pa.BufferOutputStream()
        pq.write_table(scores(BASE, "abcdefghijklmnopqrstuvwxyz"), sink)
        return sink.getvalue().to_pybytes()

    def budget_of(self, name: str, paths: Any) -> Budget:
        return BUDGET._replace(steps=100 + len(self.calls))

    def epochs_for(self, steps: int, name: str, changes: Mapping[str, Any], folders: list[Path], paths: Any) -> float:
        return 1.25

    def dvc(self, *arguments: str) -> None:
        self.calls.append(arguments)


def test_slower_variants_run_once_more_in_as_many_seconds(monkeypatch):
    runs = Runs(monkeypatch)
    seconds = {"m3diff": 0.2, "quick": 0.1, "alike": 0.219, "slow": 0.4}
    monkeypatch.setattr(cost, "measure", lambda name, changes, *_: {"step_s": seconds[name.split("-")[1]]})
    cfg = experiment(
        variants={name: {"train.model": name} for name in seconds}, compare_with=("m3diff",), equal_seconds=0.1
    )
    found = engine.conduct("toy", cfg, PARAMS)
    half = PARAMS.train.epochs / 2
    assert ("repro", "convert") in runs.calls, "the measurements read the data of this checkout"
    assert runs.calls[-1] == (
        "toy-slow-equal-seconds-7407",
        {"train.seed": 7407, "train.model": "slow", "train.epochs": half},
        [],
    )
    assert found["epochs"] == {"equal pairs": PARAMS.train.epochs, "equal seconds": {"slow": half}}
    assert list(found["scores"]) == [*seconds, "slow, equal seconds"]
    assert found["scores"]["slow"][PROTOCOL] == {"CIDEr": {"score": 7407.0, "low": None, "high": None}}


def test_the_results_and_their_page_are_written_unless_a_run_fails(tmp_path, monkeypatch, capsys):
    shutil.copy(toy.REPOSITORY / "params.yaml", tmp_path)
    (tmp_path / "toy.yaml").write_text("title: T\nprotocols: [toy/total]\nvariants: {plain: {}, more: {a.b: 1}}\n")
    monkeypatch.chdir(tmp_path)
    for name in ("HERE", "RESULTS"):
        monkeypatch.setattr(engine, name, tmp_path)
    Runs(monkeypatch, fails="toy-more-7407")
    assert engine.main(["toy"]) == 75
    assert capsys.readouterr().err == "make experiment: `dvc exp run` ended with 75\n"
    assert not (tmp_path / "toy.json").exists()
    Runs(monkeypatch)
    assert engine.main(["toy", "--seeds", "2"]) == 0
    found = json.loads((tmp_path / "toy.json").read_text())
    assert (found["command"], found["seeds"]) == ("make experiment NAME=toy N=2", [7407, 7408])
    text = (tmp_path / "toy.md").read_text()
    assert "| more | 740750.0 ± 70.7 |" in text
    assert text in capsys.readouterr().out


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


# Runs of DVC, and targets on new scenes


def test_changes_folders_and_stages_are_given_to_dvc(monkeypatch) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(runs, "dvc", lambda *arguments, check=True: calls.append(arguments))
    runs.run("name", {"train.seed": 3, "a.b": None, "c": "no_module"}, [Path("data/x")], ["convert"])
    wanted = ("--copy-paths", "data/x", "-S", "train.seed=3", "-S", "a.b=null", "-S", "c=no_module", "convert")
    assert calls == [("exp", "remove", "--quiet", "name"), ("exp", "run", "--temp", "--name", "name", *wanted)]


SCORES = {
    "CIDEr": 2.0,
    "CIDEr_shuffled": 0.5,
    "exact": 0.75,
    "by_type": {"size": {"exact": 0.25}, "color": {"exact": 0.5}, "ocr": {"pairs": 3}},
}


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
    wanted = Targets(
        profile=Path("p.yaml"),
        at_least={"d/total": {"exact": 0.7, "CIDEr": 3.0}},
        at_most={"d/total": {"exact": 0.7, "CIDEr_shuffled": 0.5}},
    )
    rows = list(runs.compare(wanted, [{"d/total": SCORES}, {"d/total": SCORES | {"exact": 0.65}}]))
    assert [(row["score"], row["mean"], row["reached"]) for row in rows] == [
        ("exact", pytest.approx(0.7), True),
        ("CIDEr", 2.0, False),
        ("exact", pytest.approx(0.7), True),
        ("CIDEr_shuffled", 0.5, True),
    ]


def test_the_fresh_scenes_are_of_seeds_that_the_embedded_run_does_not_use():
    embedded, fresh = (load_params(toy.REPOSITORY / name) for name in ("params.yaml", "benchmarks/fresh.yaml"))
    used = {each.seed for each in embedded.synthesize.values()} | {embedded.pretrain.seed}
    drawn = fresh.synthesize.values()
    assert len({each.seed for each in drawn}) == len(drawn) == 2
    assert not used & {each.seed for each in drawn}
    assert {each.level for each in drawn} == {"grid", "free"}
    assert {(each.scenes["train"], each.scenes["val"]) for each in drawn} == {(0, 0)}
    wanted = engine.read_experiment("targets").targets
    assert {name for bound in (wanted.at_least, wanted.at_most) for name in bound} <= {
        f"{name}/total" for name in fresh.ingest.datasets
    }


# The measured cost of a variant


def test_the_learning_curve_is_a_running_mean_at_every_tenth_step_and_the_measured_ones(monkeypatch) -> None:
    lines = [f"{n},{1 if n < 20 else 2},{0.7 if n == 13 else ''},{0.2 if n == 17 else ''}" for n in range(1, 26)]
    text = "\n".join(["step,loss,val_loss,module_score/4", *lines])
    monkeypatch.setattr(cost, "read", lambda experiment, path: text.encode())
    assert cost.learning_curve("name", PARAMS.paths) == [
        {"step": 10, "loss": 1.0},
        {"step": 13, "loss": 1.0, "val_loss": 0.7},
        {"step": 17, "loss": 1.0, "module_score/4": 0.2},
        {"step": 20, "loss": 1.03},
        {"step": 25, "loss": round(2 - 0.97**6, 4)},
    ]


class Words:
    """A processor whose tokens are letters and whose images are their mean."""

    def encode_reference(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def prepare_image(self, image: Any) -> np.ndarray:
        return np.asarray(image.resize((1, 1)), dtype=np.uint8)

    def prompt_inputs(self, questions: list[str]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(len(questions), 3, dtype=torch.long)}

    def image_inputs(self, prepared: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"pixels": prepared.float().mean(dim=(1, 2, 3))}


def test_the_probability_of_no_change_is_of_how_its_references_begin(tmp_path: Path) -> None:
    """Three of 4 references with a first token `n` say so, and one of 2 with `s`: 0.75 P(n) + 0.5 P(s)."""
    texts = [("no", NO_CHANGE), ("none", NO_CHANGE), ("nil", NO_CHANGE), ("new", "addition")]
    texts += [("same", NO_CHANGE), ("star", "removal"), ("ball", "removal")]
    rows = [{"references": [text], "change_types": [kind]} for text, kind in texts]
    captioner: Any = SimpleNamespace(processor=Words())
    shares = cost.no_change_shares(captioner, rows)
    assert shares == {13: 0.75, 18: 0.5}

    images = []
    for number, grey in enumerate((10, 10, 200, 60)):
        noise_image(number).point(lambda _, grey=grey: grey).save(tmp_path / f"{number}.png")
        images.append(str(tmp_path / f"{number}.png"))
    pairs = [(0, 1, NO_CHANGE), (0, 2, "color"), (1, 3, "color"), (2, 2, NO_CHANGE)]
    test = [{"before": images[a], "after": images[b], "change_types": [kind]} for a, b, kind in pairs]

    def model(input_ids: torch.Tensor, pixels: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        """Says `n` of equal images, `b` of others; the more they differ, the surer."""
        logits = torch.zeros(len(input_ids), 3, 26)
        logits[:, -1, 1] = (pixels[1::2] - pixels[0::2]).abs() / 10
        logits[:, -1, 13] = 2.0
        return SimpleNamespace(logits=logits)

    captioner.model = model
    assert cost.area(captioner, test, shares) == 1.0
    swapped = [one | {"change_types": ["color"] if one["change_types"] == [NO_CHANGE] else [NO_CHANGE]} for one in test]
    assert cost.area(captioner, swapped, shares) == 0.0
    for alike in ([test[0], test[3]], test[1:3], []):
        assert cost.area(captioner, alike, shares) is None, "no pair without a change, or none with one"
    assert cost.area(captioner, test, {}) is None, "no reference says that nothing changed"


def test_a_variant_is_measured_with_its_own_base_and_model_for_so_many_steps(tmp_path: Path) -> None:
    train, settings = cost.changed({"train.model": "onediff", "train.base": "data/other"}, PARAMS)
    assert (train.base, settings) == (Path("data/other"), PARAMS.models["onediff"])
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table({"pair": ["a", "a", "b", "c", "d", "e"]}), tmp_path / "train" / "0.parquet")
    assert cost.epochs_of(6, tmp_path, SimpleNamespace(global_batch=2)) == 2.0
