"""`make run`: the stages, a log with everything, and the summary at the end."""

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


@pytest.mark.parametrize("code", [0, 3])
def test_stages_warnings_and_how_far_one_is_are_shown_the_log_has_everything_and_a_failure_its_end(tmp_path, code):
    out, log = io.StringIO(), tmp_path / "logs" / "run.log"
    assert run(saying(SAID, code), log, out) == code
    said = [line for line in SAID.splitlines() if line]
    kept = log.read_text().splitlines()
    assert [line[9:] for line in kept] == said
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in kept)
    shown = out.getvalue().splitlines()
    assert [line[9:] for line in shown[:6]] == [*said[1:4], said[5], said[6], said[8]], "a bar, and no step so soon"
    end = ["", *kept, "", f"make run: failed; all that was said: {log}"]
    assert shown[6:] == (end if code else [])


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
