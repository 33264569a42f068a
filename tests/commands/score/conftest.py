from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from m3diff.__main__ import main
from m3diff.scoring import run
from m3diff.scoring.metrics import choose_metrics
from tests.commands.score import traps

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`m3diff score` on a file of captions: exit code and all that is printed. CIDEr alone is scored, without Java."""
    monkeypatch.setitem(run.TOKENIZERS, "ptb", run.split_at_white_space)
    monkeypatch.setattr("m3diff.commands.score.metrics_of", lambda *_: choose_metrics(["CIDEr"]))
    monkeypatch.setattr("m3diff.commands.score.require_java", lambda: 17)

    def score(
        captions: Any, references: Mapping[str, Any] | Any = None, *options: str, name: str = "captions.json"
    ) -> tuple[int, str]:
        path = tmp_path / name
        if isinstance(captions, str):
            path.write_text(captions, encoding="utf-8")
        elif captions is not None:
            traps.write(path, captions)
        known = references if "images" in references else traps.coco(references)
        against = traps.write(tmp_path / "references.json", known)
        code = main(["score", str(path), "--references", str(against), *options])
        told = capsys.readouterr()
        return code, told.out + told.err

    return score
