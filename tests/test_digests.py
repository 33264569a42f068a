"""The digests that compare the outputs of two states of the code."""

import json

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save

from benchmarks import digests

FILES = {"m3diff/model/curves.csv": "1", "m3diff/report/metrics.json": "2", "scores/of grid.json": "3"}


@pytest.mark.parametrize(
    ("here", "differs"),
    [(dict(reversed(FILES.items())), ""), (FILES | {"scores/of grid.json": "4"}, "scores/of grid.json")]
    + [(FILES | {"scores/more.json": "1"}, "scores/more.json"), (dict(list(FILES.items())[:2]), "scores/of grid.json")],
    ids=["equal", "changed", "new", "gone"],
)
def test_a_file_that_differs_is_named_below_its_folder_and_fails(here, differs, capsys):
    assert digests.compare(FILES, here) == bool(differs)
    lines = capsys.readouterr().out.splitlines()
    wrong = [number for number, line in enumerate(lines) if line.endswith("NO     scores")]
    assert [lines[place + 1].strip() for place in wrong] == ([differs] if differs else [])


def test_tensors_are_compared_without_their_order_and_notes():
    one, two = np.arange(6, dtype=np.float32), np.ones(2, dtype=np.int64)
    first = digests.tensors(save({"a": one, "b": two}, {"note": "yesterday"}))
    assert first == digests.tensors(save({"b": two, "a": one}))
    assert first != digests.tensors(save({"a": one, "b": two + 1}))
    assert first != digests.tensors(save({"a": one.reshape(2, 3), "b": two}))


def test_pixels_and_values_are_digested_and_places_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "WORK", tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "page.html").write_text("words")
    found = []
    for path, loss, blue, level in (("a", 1.0, 5, 1), ("b", 1.0, 5, 9), ("a", 1.5, 6, 9)):
        (folder / "report.json").write_text(json.dumps({"all": [{"path": path, "loss": loss}]}))
        (folder / "log.csv").write_text(f"loss,seconds\n{loss},{level}\n")
        Image.new("RGB", (4, 4), (0, 0, blue)).save(folder / "image.png", compress_level=level)
        found.append(dict(digests.contents(folder)))
    assert found[0] == found[1]
    assert [name for name in found[0] if found[0][name] != found[2][name]] == [
        "run/log.csv",
        "run/report.json",
        "run/1 images",
    ]
