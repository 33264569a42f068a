"""docs/notebook.ipynb runs from its first cell to its last, on a checkpoint and records made here."""

import json
import re
import tempfile
from pathlib import Path

import nbformat
import polars as pl
import pytest
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

from tests.tiny import noise_image, tiny_base, tiny_checkpoint
from tests.toy import REPOSITORY

NOTEBOOK = REPOSITORY / "docs" / "notebook.ipynb"
PAIRS = 14


def outputs(cell: nbformat.NotebookNode) -> str:
    """Outputs of a cell, as text."""
    return "".join(out.get("text", "") or str(out.get("data", {}).get("text/plain", "")) for out in cell.outputs)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in small as `make run` leaves it."""
    root = tmp_path_factory.mktemp("project")
    (root / "params.yaml").touch()
    tiny_checkpoint(tiny_base(root / "base"), root / "data/05_model/checkpoint")
    rows = []
    for number in range(PAIRS):
        sides = [root / f"{number}-{side}.png" for side in (0, 1)]
        for side, path in enumerate(sides):
            noise_image(2 * number + side, (64, 48)).save(path)
        rows.append(
            {
                "id": f"mini/{number:02d}.png",
                "split": "test" if number else "train",
                "before": str(sides[0]),
                "after": str(sides[1]),
                "references": ["a noise became another", f"noise {number}"],
                "change_types": ["none"] if number == 1 else ["colour"],
            }
        )
    (root / "data/03_clean").mkdir(parents=True)
    pl.DataFrame(rows).write_parquet(root / "data/03_clean/records.parquet")
    (root / "docs").mkdir()
    return root


@pytest.mark.slow(35)
def test_every_cell_runs_and_gives_captions_an_overlay_and_scores(project):
    notebook = nbformat.read(NOTEBOOK, 4)
    kernel = AsyncKernelManager(transport="ipc", ip=str(project / "kernel"))  # sockets there; no port is opened
    NotebookClient(notebook, km=kernel, timeout=200, resources={"metadata": {"path": str(project / "docs")}}).execute()
    said = {cell.id: outputs(cell) for cell in notebook.cells if cell.cell_type == "code"}
    table, scores = (next(text for text in said.values() if word in text) for word in ("first reference", "CIDEr"))
    captions = json.loads((project / "runs/notebook/predictions.json").read_text())
    assert len(captions) == 12
    assert not {"mini/00.png"} & captions.keys(), "a pair that trains"
    assert all(name in table for name in captions)
    assert table.count("a noise became another") == 12
    assert "pairs 12; references a pair 2.00" in scores
    shown = [out.data for cell in notebook.cells for out in cell.get("outputs", []) if "data" in out]
    assert sum("image/png" in data for data in shown) == 1
    sheets = sorted(str(path.relative_to(project / "runs/notebook")) for path in project.rglob("notebook/**/*.png"))
    assert sheets == sorted(f"{name}.png" for name in captions)


def test_the_notebook_as_it_is_kept_shows_outputs_and_no_place_of_a_machine():
    text = NOTEBOOK.read_text("utf-8")
    cells = [cell for cell in nbformat.reads(text, 4).cells if cell.cell_type == "code"]
    assert sum(bool(cell.outputs) for cell in cells) == 4
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    for cell in cells:
        shown = [
            str(data)
            for out in cell.outputs
            for kind, data in out.get("data", {}).items()
            if not kind.startswith("image/")
        ]
        for part in (cell.source, outputs(cell), *shown):
            assert not re.search(r"(?<![\w.<])/\w+/", part), "an absolute path"
    assert all(place not in text for place in ("/home/", "/root/", str(Path.home()), tempfile.gettempdir() + "/"))
