"""`make compare`: which models run with what, how seconds are made equal, and what is measured of a model."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from components.params import ParamsError, load_params
from components.records import NO_CHANGE
from infra import ablation, compare, compare_speed
from tests.infra.test_ablation import PROTOCOL, found, plus, row
from tests.tiny import noise_image
from tests.toy import REPOSITORY

assert found  # a fixture

CFG = compare.Comparison(protocols=(PROTOCOL,), beside="m3diff", bases={"other": Path("bases/other")})


def params() -> Any:
    return load_params(REPOSITORY / "params.yaml")


def test_the_committed_file_names_models_and_protocols_that_are_there() -> None:
    cfg = compare.read_comparison(compare.SETTINGS, params())
    assert cfg.beside in params().models
    assert {protocol.partition("/")[0] for protocol in cfg.protocols} <= set(params().ingest.datasets)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("protocols: [a]\nbeside: nobody\n", "no model is called 'nobody'; expected one of blip2idc, .*m3diff"),
        ("protocols: [a]\nbeside: m3diff\nbases: {nobody: x}\n", "no model is called 'nobody'"),
        ("protocols: [a]\nbeside: m3diff\nwith: 1\n", "with"),
        ("protocols: [a\nbeside: m3diff\n", r"^\S+compare\.yaml: not valid YAML: while parsing"),
    ],
)
def test_a_file_that_is_wrong_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "compare.yaml").write_text(text)
    with pytest.raises(ParamsError, match=words):
        compare.read_comparison(tmp_path / "compare.yaml", params())


def test_a_model_that_is_asked_for_by_a_wrong_name_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(compare, "compare", lambda *_: pytest.fail("models were run"))
    assert compare.main(["--models", "m3diff", "onedif"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("make compare: --models: no model is called 'onedif'; did you mean 'onediff'? ")


def test_a_model_trains_on_its_base_and_is_left_out_where_that_is_not_here(tmp_path: Path) -> None:
    assert compare.changes_of("m3diff", CFG) == {"train.model": "m3diff"}
    assert compare.changes_of("other", CFG) == {"train.model": "other", "train.base": "bases/other"}
    assert compare.left_out("m3diff", CFG) is None
    assert compare.left_out("other", CFG) == "left out: other: bases/other is not there; make it with `make base`"
    there = CFG.model_copy(update={"bases": {"other": tmp_path}})
    assert compare.left_out("other", there) is None


def test_what_takes_longer_gets_fewer_epochs_and_what_is_about_as_quick_is_not_trained_again() -> None:
    steps = {"m3diff": 0.2, "quick": 0.1, "alike": 0.219, "slow": 0.4}
    assert compare.shorter_epochs(steps, CFG, 3.0) == {"slow": 1.5}


def test_every_model_runs_the_compared_one_first_and_the_slow_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, dict[str, Any]]] = []

    def run_row(name: str, changes: dict[str, Any], seeds: list[int], cfg: Any, report: Path) -> ablation.Row:
        ran.append((name, dict(changes)))
        assert (seeds, cfg.protocols) == ([params().train.seed], CFG.protocols)
        return row(name, [plus(len(ran))])

    seconds = {"m3diff": 0.2, "no_module": 0.1, "onediff": 0.4}

    def measure(one: ablation.Row, cfg: Any, params: Any) -> compare.Measured:
        return compare.Measured(5, 1.5, 70.0, seconds[one.name], {PROTOCOL: 0.9}, CURVE)

    monkeypatch.setattr(compare, "dvc", lambda *asked: ran.append((" ".join(asked), {})))
    monkeypatch.setattr(compare, "run_row", run_row)
    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(compare, "scores_of", lambda name, cfg, params: {PROTOCOL: {"of": name}})
    made = compare.compare(CFG, params(), ["no_module", "m3diff", "onediff"])
    half = {"train.epochs": params().train.epochs / 2}
    data, *ran = ran
    assert data == ("repro convert", {}), "the measurements read the data of this checkout"
    assert ran == [
        ("m3diff", {"train.model": "m3diff"}),
        ("no_module", {"train.model": "no_module"}),
        ("onediff", {"train.model": "onediff"}),
        ("onediff, equal seconds", {"train.model": "onediff"} | half),
    ]
    assert made["command"] == 'make compare MODELS="m3diff no_module onediff"'
    rows = made["protocols"][PROTOCOL]
    assert [one["row"] for one in rows] == [name for name, _ in ran]
    assert rows[2]["scores"]["CIDEr"]["differences"]["m3diff"]["gain"] == pytest.approx(2)
    assert made["scores"] == {name: {PROTOCOL: {"of": name}} for name, _ in ran}
    assert made["epochs"] == {"equal pairs": params().train.epochs, "equal seconds": {"onediff": half["train.epochs"]}}


CURVE = [{"step": step, "loss": 2 / step, "val_loss": 0.5 if step == 30 else None} for step in range(10, 50, 10)]


def test_the_learning_curve_is_a_running_mean_at_every_tenth_step_and_the_validations() -> None:
    rows = [
        {"step": str(n), "loss": "1" if n < 20 else "2", "val_loss": "0.7" if n == 13 else ""} for n in range(1, 26)
    ]
    assert compare.learning_curve(rows) == [
        {"step": 10, "loss": 1.0, "val_loss": None},
        {"step": 13, "loss": 1.0, "val_loss": 0.7},
        {"step": 20, "loss": 1.03, "val_loss": None},
        {"step": 25, "loss": round(2 - 0.97**6, 4), "val_loss": None},
    ]


SCORES = {
    "METEOR": {"score": 0.6011, "low": None, "high": None},
    "CIDEr": {"score": 4.411, "low": 4.18, "high": 4.642},
}


def test_a_model_s_scores_are_read_from_its_experiment_with_their_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "CIDEr": 4.411,
        "METEOR": 0.6011,
        "SPICE": None,
        "change_exact_accuracy": 0.8,
        "intervals": {"CIDEr": {"low": 4.18, "high": 4.642}},
    }

    def read(experiment: str, path: Path) -> bytes:
        assert (experiment, path.name) == (f"ablation-other-equal-seconds-{params().train.seed}", "metrics.json")
        return json.dumps({"protocols": {PROTOCOL: told, "another": {}}}).encode()

    monkeypatch.setattr(compare, "read", read)
    assert compare.scores_of("other, equal seconds", CFG, params()) == {PROTOCOL: SCORES}


def test_the_page_has_what_each_model_takes_the_scores_and_both_plots(found: list[dict], tmp_path: Path) -> None:
    one = compare.Measured(1_234_567, 0.5, 71.6, 0.25, {PROTOCOL: 0.9876}, CURVE)
    facts = {
        "command": "make compare",
        "seed": 7,
        "epochs": {"equal pairs": 2.7, "equal seconds": {"second": 1.35}},
        "left_out": {},
        "scores": {"first": {PROTOCOL: SCORES}, "second": {PROTOCOL: {"CIDEr": SCORES["CIDEr"]}}},
        "measured": {"first": one._asdict(), "second": one._asdict()},
        "protocols": {PROTOCOL: found},
    }
    cfg = CFG.model_copy(update={"beside": "first"})
    compare.write(facts, cfg, tmp_path / "compare.json")
    text = (tmp_path / "compare.md").read_text()
    assert "| first | 1,234,567 | 0.50 | 72 | 0.250 | 2.7 | 98.8 |" in text
    assert "| second | 1,234,567 | 0.50 | 72 | 0.250 | 1.35 | 98.8 |" in text
    assert f"| `{PROTOCOL}`, times 100 (95 % interval over pairs) | METEOR | CIDEr |" in text
    assert "| first | 60.1 | 441.1 (418.0 to 464.2) |" in text
    assert "| second |  | 441.1 (418.0 to 464.2) |" in text
    assert "difference to *first* (95 % interval over pairs)" in text
    for plot in ("compare.svg", "compare_curves.svg"):
        assert plot in text
        assert (tmp_path / plot).stat().st_size > 1000
    assert json.loads((tmp_path / "compare.json").read_text())["measured"]["first"]["curve"] == CURVE


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
    """Of 4 references with a first token `n` three say so, of 2 with `s` one: 0.75 P(n) + 0.5 P(s)."""
    texts = [("no", NO_CHANGE), ("none", NO_CHANGE), ("nil", NO_CHANGE), ("new", "addition")]
    texts += [("same", NO_CHANGE), ("star", "removal"), ("ball", "removal")]
    rows = [{"references": [text], "change_types": [kind]} for text, kind in texts]
    captioner: Any = SimpleNamespace(processor=Words())
    shares = compare_speed.no_change_shares(captioner, rows)
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
    assert compare_speed.area(captioner, test, shares) == 1.0
    swapped = [one | {"change_types": ["color"] if one["change_types"] == [NO_CHANGE] else [NO_CHANGE]} for one in test]
    assert compare_speed.area(captioner, swapped, shares) == 0.0
    for alike in ([test[0], test[3]], test[1:3], []):
        assert compare_speed.area(captioner, alike, shares) is None, "no pair without a change, or none with one"
    assert compare_speed.area(captioner, test, {}) is None, "no reference says that nothing changed"


def test_the_area_is_measured_of_the_protocols_datasets_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise_image(0).save(tmp_path / "0.png")
    image = str(tmp_path / "0.png")
    rows = [
        {"dataset": name, "split": "test", "before": image, "after": image, "references": [], "change_types": []}
        for name in ("a", "b", "c", "b")
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "records.parquet")
    params = SimpleNamespace(paths=SimpleNamespace(clean=tmp_path), predict=SimpleNamespace(max_new_tokens=8))
    captioner = SimpleNamespace(processor=Words(), answer=lambda images, question: [""])
    monkeypatch.setattr(compare_speed, "load_params", lambda path: params)
    monkeypatch.setattr(compare_speed, "load_captioner", lambda checkpoint, tokens: captioner)
    monkeypatch.setattr(compare_speed, "area", lambda captioner, rows, shares: len(rows))
    told = json.loads(compare_speed.main("captions", str(tmp_path), "b", "a", "none"))
    assert told["no_change_auc"] == {"b": 2, "a": 1, "none": 0}


def test_a_model_is_measured_on_the_datasets_of_the_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def in_a_process(arguments: list[str]) -> str:
        asked.append(arguments)
        told = {"captions_per_s": 7, "no_change_auc": {"toy": None, "more": 0.5}}
        return json.dumps(told) if arguments[0] == "captions" else "0.1"

    files = {"report.json": b'{"parameters_trainable": 5}', "curves.csv": b"step,loss,val_loss\n1,2,\n"}
    monkeypatch.setattr(compare, "read", lambda experiment, path: files[path.name])
    monkeypatch.setattr(compare, "copy", lambda *_: None)
    monkeypatch.setattr(compare, "in_a_process", in_a_process)
    monkeypatch.setattr(compare, "caption_flops", lambda changes, params: 1e9)
    cfg = CFG.model_copy(update={"protocols": ("toy/total", "toy/hard", "more/total")})
    one = compare.measure(row("m3diff", [plus(0)]), cfg, params())
    assert asked[0][0] == "captions"
    assert asked[0][2:] == ["toy", "more"]
    assert one.no_change_auc == {"toy/total": None, "toy/hard": None, "more/total": 0.5}
    told = one._asdict() | {"curve": []}
    line = list(compare.measured_table({"one": told}, {"equal pairs": 1, "equal seconds": {}}, cfg.protocols))[-1]
    assert line.endswith("| 1 |  |  | 50.0 |"), "an empty cell where there is no area"


def test_a_measurement_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        compare.in_a_process(["captions", str(tmp_path / "no-checkpoint")])
    assert f"{tmp_path / 'no-checkpoint'}: no manifest.json" in capsys.readouterr().err


def test_so_many_steps_are_that_share_of_an_epoch(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table({"pair": ["a", "a", "b", "c", "d", "e"]}), tmp_path / "train" / "0.parquet")
    assert compare_speed.epochs_of(6, tmp_path, SimpleNamespace(global_batch=2)) == 2.0
