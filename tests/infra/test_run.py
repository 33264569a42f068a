"""`make run`: its output, and its behaviour after a failure."""

import io
import json
import re
import sys
from types import SimpleNamespace

import pytest

from infra import run as make_run
from infra.run import format_summary, run_dvc
from m3diff.records.errors import Fault
from m3diff.settings.load import load_params
from m3diff.stages.register.stage import Registration
from tests.toy import REPOSITORY

OUTPUT = """
'data/01_raw/birds.dvc' didn't change, skipping
Stage 'synthesize@minichange' is cached - skipping run, checking out outputs
Stage 'ingest@minichange' didn't change, skipping
Running stage 'validate':
> python -m m3diff validate
validate:  45%|####      | 45/100 [00:03<00:04, 12.1it/s]
Running stage 'train':
train: step 20/1810 (1.1%)  loss 1.2345  grad_norm 2.1000  lr_llm 4.00e-05  85 captions/s  ETA 11 min
train: warning: the module changes nothing
Updating lock file 'dvc.lock'
"""


def saying(text: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"]


@pytest.mark.parametrize("code", [0, 3])
def test_make_run_shows_stages_warnings_progress_and_the_end_of_a_failure(tmp_path, code):
    out = io.StringIO()
    log = tmp_path / "logs" / "run.log"
    assert run_dvc(saying(OUTPUT, code), log, out) == code
    output_lines = [line for line in OUTPUT.splitlines() if line]
    logged_lines = log.read_text().splitlines()
    assert [line[9:] for line in logged_lines] == output_lines
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in logged_lines)
    shown = out.getvalue().splitlines()
    assert [line[9:] for line in shown[:7]] == [*output_lines[1:4], *output_lines[5:9]]
    fault = Fault("infra.pipeline_failed", exit_code=code, log=log)
    end = ["", *logged_lines, "", f"make run: {fault}"]
    assert shown[7:] == (end if code else [])


@pytest.mark.parametrize("warnings", [["the module changes nothing."], []])
def test_the_summary_says_scores_places_gate_and_warnings(tmp_path, warnings):
    scores = {"pairs": 480, "published_pairs": 3985, "CIDEr": 4.67036, "no_change_recall": 1}
    protocols = {"a/total": scores | {"intervals": {"CIDEr": {"low": 4.5, "high": 4.81}}}, "a/semantic": {"CIDEr": 9.9}}
    kinds = {"count": {"records": 2, "exact_match": {"model": 0.1, "base": 0.2}}}
    scores_of_both = {"records": 240, "exact_match": {"model": 0.015, "base": 0.99}, "by_kind": kinds}
    retention = {"b/test": scores_of_both | {"CIDEr": {"model": 0.5, "base": 3.0}}, "c/test": {"records": 1}}
    contents = {"metrics": {"protocols": protocols, "retention": retention}, "report": {"warnings": warnings}}
    contents["headline"] = {"a/total": {"CIDEr": 467.04, "no_change_recall": 100}}
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    paths = SimpleNamespace(report=tmp_path, predictions=tmp_path, model=tmp_path)
    params = SimpleNamespace(paths=paths, register_=SimpleNamespace(tracking_uri="store"))
    registration = Registration("registered", "m", 2, "7f3a")
    text = format_summary(params, registration, "m version 2 refused: why")
    numbers = "  CIDEr                   467.0   450.0 to 481.0\n  no_change_recall        100.0\n"
    assert text.startswith("\nscores on a/total, 480 pairs of the 3985 in papers")
    warned = "\nwarning      training: the module changes nothing.\n" if warnings else "\n"
    model = "models:/m/2 registered (MLflow run 7f3a) in store\n"
    kept_line = "what it kept of its base: exact_match 1.5 on b/test, 240 questions; the base had 99.0\n"
    assert text.count("what it kept") == 1, "the first score, and no line without a score"
    for line in (numbers, kept_line, f"{tmp_path}/report.html\n", model, f"refused: why{warned}"):
        assert line in text
    assert "990.0" not in text, "one protocol of a dataset"


def test_a_pipeline_that_fails_registers_nothing_and_one_that_ends_is_summed_up(tmp_path, monkeypatch, capsys):
    (tmp_path / "params.yaml").write_text((REPOSITORY / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("m3diff.stages.register.stage.register", lambda params: SimpleNamespace(version=7))
    monkeypatch.setattr("m3diff.registry.promote.promote", lambda params, rescore, version: (rescore.__name__, version))
    monkeypatch.setattr(
        make_run,
        "format_summary",
        lambda params, registration, decision: f"{registration.version} is registered, {decision}",
    )
    for code, is_summed_up in ((3, False), (0, True)):
        monkeypatch.setattr(make_run, "DVC_COMMAND", saying("", code))
        assert make_run.main() == code
        assert ("7 is registered, ('rescore', 7)" in capsys.readouterr().out) == is_summed_up

    def refuse(params: object) -> str:
        raise ConnectionError("no server")

    monkeypatch.setattr(make_run, "register_and_promote", refuse)
    assert make_run.main() == 1
    assert capsys.readouterr().err == "make run: no server\n"


def test_a_pipeline_that_fails_without_a_base_model_says_how_to_get_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "params.yaml").write_text((REPOSITORY / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_run, "DVC_COMMAND", saying("ERROR: [Errno 2] No such file or directory", 255))
    assert make_run.main() == 255
    base = load_params(tmp_path / "params.yaml").train.base
    hints = [line for line in capsys.readouterr().out.splitlines() if line.startswith("make run: the training")]
    assert str(base / "config.json") in hints[0]
    assert "`make base`" in hints[0]
