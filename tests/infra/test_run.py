"""`make run`: a line for each stage, the log with all the rest, and the summary at the end."""

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra import run as make_run
from infra.run import run, summary
from tests.toy import REPOSITORY

SAID = """
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


def shown(tmp_path: Path, text: str, code: int = 0) -> tuple[int, str]:
    out = io.StringIO()
    given = run(saying(text, code), tmp_path / "logs" / "run.log", out)
    return given, re.sub(r"\d+ s\b", "N s", out.getvalue())


def test_each_stage_and_warning_has_a_line_and_the_log_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = shown(tmp_path, SAID)
    assert code == 0
    lines = [
        f"{'synthesize@minichange':<28} restored",
        f"{'ingest@minichange':<28} unchanged",
        f"{'validate':<28} ran in N s",
        "  train: warning: the module changes nothing",
        f"{'train':<28} ran in N s",
    ]
    assert text.splitlines() == lines
    log = (tmp_path / "logs" / "run.log").read_text().splitlines()
    assert [line[9:] for line in log] == [line for line in SAID.splitlines() if line]
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in log)
    monkeypatch.setattr(make_run, "EVERY_S", 0.0)
    monkeypatch.setattr("flows.dvc.PROGRESS_EVERY_S", 0.0)
    _, text = shown(tmp_path, f"{SAID}Writing model shards:   0%|   | 0/1\ntrain: 1,395,000 parameters, 12 % train")
    said = SAID.splitlines()
    assert text.splitlines() == [*lines[:2], f"  {said[6]}", lines[2], f"  {said[8]}", *lines[3:]]


def test_a_failure_shows_the_end_of_the_log_and_names_it(tmp_path: Path) -> None:
    many = "".join(f"line {number}\n" for number in range(40))
    code, text = shown(tmp_path, f"Running stage 'train':\n{many}ERROR: failed to reproduce 'train'", 3)
    assert code == 3
    for words, there in (
        (f"{'train':<28} failed in N s", True),
        ("  ERROR: failed to reproduce 'train'\n", True),
        ("line 20\n", False),
        ("line 39\n", True),
    ):
        assert (words in text) == there
    assert text.endswith(f"all that was said: {tmp_path}/logs/run.log\n")


TOTAL = {"pairs": 480, "published_pairs": None, "CIDEr": 4.67036, "METEOR": None, "no_change_recall": 1, "by_type": {}}
TOTAL |= {"intervals": {"CIDEr": {"low": 4.5, "high": 4.81}}}
OTHER = {"pairs": 240, "published_pairs": 3985, "CIDEr": 6.6, "intervals": {}}
PROTOCOLS = {"a/total": TOTAL, "a/semantic": OTHER, "b/semantic": OTHER}
SCORES = """
scores on a/total, 480 pairs; times 100, with 95 % intervals over pairs
  CIDEr                   467.0   450.0 to 481.0
  no_change_recall        100.0

scores on b/semantic, 240 pairs of 3985 that papers score; times 100, with 95 % intervals over pairs
  CIDEr                   660.0

"""


@pytest.mark.parametrize(
    ("vocabulary", "warnings"), [(597, ["the module changes nothing."]), (152_000, []), (597, None)]
)
def test_the_summary_says_scores_places_gate_warnings_and_limits(
    tmp_path: Path, vocabulary: int, warnings: list[str] | None
) -> None:
    """A model that was trained before there were warnings has none."""
    config = {"text_config": {"vocab_size": vocabulary}, "vision_config": {"image_size": 100}}
    report = {} if warnings is None else {"warnings": warnings}
    for name, content in (("config", config), ("metrics", {"protocols": PROTOCOLS}), ("report", report)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    params = SimpleNamespace(
        paths=SimpleNamespace(report=tmp_path, predictions=tmp_path, model=tmp_path),
        train=SimpleNamespace(base=tmp_path),
        register_=SimpleNamespace(tracking_uri="store"),
    )
    text = summary(params, SimpleNamespace(uri="models:/m/2", outcome="registered"), "m version 2 refused: why")
    assert text.startswith(SCORES)
    assert f"report       {tmp_path}/report.html\n" in text
    assert "model        models:/m/2 (registered) in store\n" in text
    warned = "\nwarning      training: the module changes nothing.\n" if warnings else "\n"
    assert f"gate         m version 2 refused: why{warned}" in text
    drawn = "MiniChange's scenes, drawn at 100 px\nnot good for other images or words: its base knows 597 tokens."
    assert (drawn in text) == (vocabulary == 597)


def test_a_pipeline_that_fails_registers_nothing_and_one_that_ends_is_summed_up(tmp_path, monkeypatch, capsys):
    (tmp_path / "params.yaml").write_text((REPOSITORY / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_run, "finish", lambda params: f"{params.train.model} is registered")
    for code, told in ((3, False), (0, True)):
        monkeypatch.setattr(make_run, "DVC", saying("", code))
        assert make_run.main() == code
        assert ("m3diff is registered" in capsys.readouterr().out) == told

    def refuse(params: object) -> str:
        raise ConnectionError("no server")

    monkeypatch.setattr(make_run, "finish", refuse)
    assert make_run.main() == 1
    assert capsys.readouterr().err == "make run: no server\n"
