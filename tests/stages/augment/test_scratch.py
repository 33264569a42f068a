"""The scratch folder: edits are kept by what decides them and nothing else; no run touches another's folder."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from m3diff.models.device import Device
from m3diff.provenance.code import ROOT
from m3diff.records.files import sha256_of_folder
from m3diff.stages.augment import stage
from m3diff.stages.augment import stage as module
from m3diff.stages.augment.editors import DrawnEditor, Pix2PixEditor
from m3diff.stages.augment.params import InstructPix2Pix
from m3diff.stages.augment.stage import augment, kept_edits, own_folder
from tests.chat import chat_server
from tests.stages.augment.small import compute, draw, edits, entry

SCENES = 8

# Edits


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("scratch") / "raw", scenes={"train": 4, "val": 2, "test": 2})


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the editor is asked."""
    asked: list[tuple[Any, ...]] = []
    real = DrawnEditor.edit
    monkeypatch.setattr(DrawnEditor, "edit", lambda self, *rest: asked.append(rest) or real(self, *rest))
    return asked


def test_what_was_edited_once_is_edited_for_no_entry_again(raw: Path, tmp_path: Path, edited: list[Any]):
    """Not after a success, nor for other paraphrases, another writer, more edits, or an entry of another name."""

    def run(name: str, **changes: Any) -> int:
        edited.clear()
        augment(name, edits(raw, tmp_path / name, **changes), compute(tmp_path / "runs"))
        return len(edited)

    assert run("made") == 2 * SCENES
    assert run("made") == 0
    assert run("made", paraphrases={"val": 1}) == 0
    assert run("other") == 0
    with chat_server('["one", "two"]') as server:
        assert run("made", writer={"kind": "endpoint", "url": server.url, "model": "m"}, paraphrases={"val": 2}) == 0
    assert run("made", edits=3) == SCENES
    assert run("made", seed=4) == 2 * SCENES


def key(folder: Path, content: str = "weights", **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(content)
    cfg = InstructPix2Pix(**({"kind": "instruct_pix2pix", "model": folder} | changes))
    return kept_edits(cfg, Pix2PixEditor(cfg, Device(gpu=False, precision="fp32")), Path("runs")).name


def test_edits_are_known_by_settings_and_weights_wherever_these_lie(tmp_path: Path):
    first = key(tmp_path / "one")
    assert first.startswith("instruct_pix2pix-")
    model = Pix2PixEditor(InstructPix2Pix(kind="instruct_pix2pix", model=tmp_path / "one"), Device(False, "fp32"))
    assert first == key(tmp_path / "two") == key(tmp_path / "one", sha256=model.identity)
    assert len({first, key(tmp_path / "one", steps=3), key(tmp_path / "one", content="others")}) == 3


@pytest.mark.parametrize(
    ("changed", "anew"),
    [
        ("components/stages/augment/editors.py", True),
        ("components/images/open.py", True),
        ("components/stages/augment/writers.py", False),
        ("components/stages/augment/params.py", False),
        ("components/stages/augment/stage.py", False),
        ("components/models/family.py", False),
    ],
)
def test_edits_are_known_by_the_code_of_their_editor_alone(
    changed: str, anew: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert (ROOT / changed).is_file()
    before = key(tmp_path / "model")
    real = module.digests
    other = {changed: "other"}
    monkeypatch.setattr(
        module, "digests", lambda file: {name: other.get(name, old) for name, old in real(file).items()}
    )
    assert (key(tmp_path / "model") != before) == anew


# A run's own folder


def test_a_run_has_a_folder_of_its_own_and_what_a_killed_one_left_goes(tmp_path: Path):
    (tmp_path / "augment/0").mkdir(parents=True)
    (tmp_path / "augment/0/half.png").write_text("half")
    with own_folder(tmp_path) as one, own_folder(tmp_path) as two:
        assert one != two
        for folder in (one, two):
            assert not folder.exists()
            folder.mkdir()
    assert sorted(path.name for path in (tmp_path / "augment").iterdir()) == ["0.lock", "1.lock"]


def test_an_error_removes_the_folder_too(tmp_path: Path):
    def fail() -> None:
        with own_folder(tmp_path) as folder:
            folder.mkdir()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not (tmp_path / "augment/0").exists()


def parquet(root: Path, count: int = 4) -> dict[str, Any]:
    """A source whose images stand in a Parquet file."""
    root.mkdir()
    rows = []
    for number in range(count):
        data = io.BytesIO()
        Image.new("RGB", (8, 8), (number, 0, 0)).save(data, "PNG")
        image = {"bytes": data.getvalue(), "path": f"{number}.png"}
        rows.append({"id": str(number), "split": "train", "image": image, "caption": f"text {number}"})
    pq.write_table(pa.Table.from_pylist(rows), root / "pairs.parquet")
    columns = {"before": "image", "after": "image", "captions": "caption"}
    return {"reader": "pairs", "root": root, "options": {"manifest": "pairs.parquet", "columns": columns}}


def test_two_runs_that_make_the_same_entry_at_once_touch_nothing_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The second, as from another worktree, begins and ends while the first has its images unpacked."""
    source = parquet(tmp_path / "raw")
    cfg = entry("coupled_samples", source["root"], tmp_path / "one", source=source)
    runs, real = compute(tmp_path / "runs"), stage.make_coupled_samples
    reports = []

    def beside(*arguments: Any) -> Any:
        monkeypatch.setattr(stage, "make_coupled_samples", real)
        reports.append(augment("made", cfg.model_copy(update={"root": tmp_path / "two"}), runs))
        return real(*arguments)

    monkeypatch.setattr(stage, "make_coupled_samples", beside)
    reports.append(augment("made", cfg, runs))
    assert reports[0] == reports[1]
    assert reports[0].pairs == Counter(train=2)
    assert sha256_of_folder(tmp_path / "one") == sha256_of_folder(tmp_path / "two")
    assert not [path for path in (tmp_path / "runs/augment").iterdir() if path.is_dir()]
