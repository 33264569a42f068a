"""`make run`'s lines: a stage each, how far it is, and the log with all the rest."""

import io
import re
import sys
from pathlib import Path

import pytest

from infra import run as make_run
from infra.run import how_far, run

SAID = """
'data/01_raw/birds.dvc' didn't change, skipping
Stage 'synthesize@minichange' is cached - skipping run, checking out outputs
Stage 'ingest@minichange' didn't change, skipping
Running stage 'validate':
> python -m components validate
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
