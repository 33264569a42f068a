"""`make run`: a line for each stage, the log with all the rest, and the summary at the end."""

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra import run as make_run
from infra.run import headlines, how_far, hushed, limits, run, summary
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def saying(text: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"]


def shown(tmp_path: Path, text: str, code: int = 0, out: io.StringIO | None = None) -> tuple[int, str]:
    out = out or io.StringIO()
    given = run(saying(text, code), tmp_path / "logs" / "run.log", out)
    return given, re.sub(r"\d+ s\b", "N s", out.getvalue())


def test_each_stage_has_a_line_in_order_and_a_warning_its_own(tmp_path: Path) -> None:
    code, text = shown(tmp_path, SAID)
    assert code == 0
    assert text.splitlines() == [
        f"{'synthesize@minichange':<28} restored",
        f"{'ingest@minichange':<28} unchanged",
        f"{'validate':<28} ran in N s",
        "  train: warning: the module changes nothing",
        f"{'train':<28} ran in N s",
    ]


def test_the_log_has_all_that_was_said_with_its_time(tmp_path: Path) -> None:
    shown(tmp_path, SAID)
    lines = (tmp_path / "logs" / "run.log").read_text().splitlines()
    assert [line[9:] for line in lines] == [line for line in SAID.splitlines() if line]
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)


def test_on_a_terminal_the_line_is_written_over(tmp_path: Path) -> None:
    _, text = shown(tmp_path, SAID, out=Terminal())
    assert f"\r\x1b[K{'train':<28}   1%  step 20 of 1810, loss 1.2345, 11 min left\r" in text
    assert f"\r\x1b[K{'validate':<28}  45%  00:04 left\r" in text
    assert text.endswith(f"\r\x1b[K{'train':<28} ran in N s\n")


def test_in_a_log_how_far_a_stage_is_comes_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_run, "EVERY_S", 0.0)
    _, text = shown(tmp_path, SAID)
    assert f"{'train':<28}   1%  step 20 of 1810, loss 1.2345, 11 min left\n" in text


def test_a_failure_shows_the_end_of_the_log_and_names_it(tmp_path: Path) -> None:
    many = "".join(f"line {number}\n" for number in range(40))
    code, text = shown(tmp_path, f"Running stage 'train':\n{many}ERROR: failed to reproduce 'train'", 3)
    assert code == 3
    assert f"{'train':<28} failed in N s" in text
    assert "  ERROR: failed to reproduce 'train'\n" in text
    assert "line 20\n" not in text
    assert "line 39\n" in text
    assert text.endswith(f"all that was said: {tmp_path}/logs/run.log\n")


def test_a_line_that_tells_no_progress_tells_none() -> None:
    assert how_far("train: 1,395,000 parameters, 12 % train") is None
    assert how_far("predict: 100%|##########| 30/30 [00:40<00:00,  1.3s/it]") == "100%  00:00 left"


TOTAL = {
    "pairs": 480,
    "published_pairs": None,
    "CIDEr": 4.67036,
    "METEOR": None,
    "no_change_recall": 1,
    "intervals": {"CIDEr": {"low": 4.5, "high": 4.81}},
    "by_type": {},
}
OTHER = {"pairs": 240, "published_pairs": 3985, "CIDEr": 6.6, "intervals": {}}


def test_the_headline_protocol_of_each_dataset_is_shown_with_its_intervals():
    lines = list(headlines({"a/total": TOTAL, "a/semantic": OTHER, "b/semantic": OTHER}))
    assert lines == [
        "scores on a/total, 480 pairs; times 100, with 95 % intervals over pairs",
        "  CIDEr                   467.0   450.0 to 481.0",
        "  no_change_recall        100.0",
        "",
        "scores on b/semantic, 240 pairs of 3985 that papers score; times 100, with 95 % intervals over pairs",
        "  CIDEr                   660.0",
        "",
    ]


def write_base(folder, vocabulary):
    config = {"text_config": {"vocab_size": vocabulary}, "vision_config": {"image_size": 100}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_of_the_embedded_base_is_said_to_be_for_drawn_scenes_alone(tmp_path):
    text = "\n".join(limits(write_base(tmp_path, 597)))
    assert "MiniChange's scenes, drawn at 100 px" in text
    assert "its base knows 597 tokens. Your pairs need a real one" in text
    assert list(limits(write_base(tmp_path, 152_000))) == []


def summary_of(folder, report):
    write_base(folder, 597)
    (folder / "metrics.json").write_text('{"protocols": {"a/total": {"pairs": 3, "CIDEr": 1.5, "intervals": {}}}}')
    (folder / "report.json").write_text(report)
    params = SimpleNamespace(
        paths=SimpleNamespace(report=folder, predictions=folder, model=folder),
        train=SimpleNamespace(base=folder),
        register_=SimpleNamespace(tracking_uri="store"),
    )
    registration = SimpleNamespace(uri="models:/m/2", outcome="registered")
    return summary(params, registration, "m version 2 refused: why")


def test_the_summary_says_scores_places_and_the_gates_words(tmp_path):
    text = summary_of(tmp_path, '{"warnings": []}')
    assert "  CIDEr                   150.0\n" in text
    assert f"report       {tmp_path}/report.html\n" in text
    assert "model        models:/m/2 (registered) in store\n" in text
    assert "gate         m version 2 refused: why\n" in text
    assert "warning" not in text
    assert "good for     showing that" in text


def test_the_summary_says_what_training_warned_of(tmp_path):
    text = summary_of(tmp_path, '{"warnings": ["the module changes nothing: why."]}')
    assert "gate         m version 2 refused: why\nwarning      training: the module changes nothing: why.\n" in text


def test_a_model_trained_before_there_were_warnings_has_none(tmp_path):
    assert "warning" not in summary_of(tmp_path, "{}")


def test_what_tools_say_is_shown_only_where_they_fail(capsys):
    with hushed():
        print("a bar", file=sys.stderr)

    def fail():
        print("why", file=sys.stderr)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), hushed():
        fail()
    assert capsys.readouterr().err == "why\n"


def test_a_pipeline_that_fails_registers_nothing_and_one_that_ends_is_summed_up(tmp_path, monkeypatch, capsys):
    (tmp_path / "params.yaml").write_text((REPOSITORY / "params.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_run, "repair_rwlock", lambda tell: None)
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
