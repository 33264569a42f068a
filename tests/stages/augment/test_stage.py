"""The stage on a small MiniChange: equal bytes twice, every pair counted, no leak past validate, a kill survived."""

import io
import json
import multiprocessing
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from m3diff.command_line.report_lines import format_report
from m3diff.datasets.minichange import read_scenes
from m3diff.datasets.minichange.language import describe_scene
from m3diff.endpoint.answers import OtherServerError
from m3diff.models.device import Device
from m3diff.provenance import code
from m3diff.records.errors import DataError
from m3diff.records.files import sha256, sha256_of_folder
from m3diff.settings.load import load_params
from m3diff.stages.augment import stage
from m3diff.stages.augment.minichange import DrawnEditor, difference
from m3diff.stages.augment.params import Edits, InstructPix2Pix, RawSource
from m3diff.stages.augment.stage import AugmentReport, augment, cached_edits_folder
from m3diff.stages.augment.weights import Pix2PixEditor
from tests import toy
from tests.chat import Server, chat_server
from tests.errors import raises
from tests.layouts import run_ingest, run_validate
from tests.stages.augment.toys import KINDS, SCENES, compute, draw, edits, entry
from tests.test_dependencies import set_params
from tests.toy import REPOSITORY

ONE_IMAGE = {"before": "image", "after": "image", "captions": "caption"}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("stage") / "raw")


@pytest.fixture(scope="module")
def made(raw: Path) -> dict[str, tuple[Path, AugmentReport]]:
    """Root and report of each kind, made once."""
    roots = {kind: raw.parent / "once" / kind / "made" for kind in KINDS}
    return {
        kind: (root, augment("made", entry(kind, raw, root), compute(root.parent / "runs")))
        for kind, root in roots.items()
    }


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the editor is asked."""
    asked = []
    real = DrawnEditor.edit
    monkeypatch.setattr(DrawnEditor, "edit", lambda self, *rest: asked.append(rest) or real(self, *rest))
    return asked


def rows_of(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "pairs.jsonl").read_text().splitlines()]


def single_images(root: Path, rows: list[dict[str, Any]], **source: Any) -> dict[str, Any]:
    """A source of images with captions."""
    (root / "pairs.jsonl").write_text("".join(json.dumps({"split": "train"} | row) + "\n" for row in rows))
    return {"reader": "pairs", "root": root, "options": {"manifest": "pairs.jsonl", "columns": ONE_IMAGE}} | source


@pytest.mark.parametrize("kind", KINDS)
def test_equal_settings_give_equal_bytes_and_every_tried_pair_is_made_or_counted(kind, raw, made, tmp_path):
    root, report = made[kind]
    assert augment("made", entry(kind, raw, tmp_path / "made"), compute(tmp_path / "runs")) == report
    assert sha256_of_folder(tmp_path / "made") == sha256_of_folder(root)
    assert (tmp_path / "made.json").read_bytes() == (root.parent / "made.json").read_bytes()
    tried = {"edits": 2 * 2 * SCENES, "neighbours": 4 * 3 * SCENES, "coupled_samples": 3 * SCENES // 2}
    rows = rows_of(root)
    assert report.rows_in == tried[kind]
    assert report.rows_out == len(rows) == tried[kind] - sum(report.rejected.values())
    assert report.pairs == Counter(row["split"] for row in rows)
    assert set(report.pairs) == {"train", "val", "test"}
    assert sum(report.references.values()) == sum(len(row["captions"]) for row in rows)
    assert json.loads((tmp_path / "made.json").read_text()) == report.model_dump(mode="json")
    assert f"rows out {len(rows):,}, pairs {len(rows):,} (train " in format_report(report)
    assert not list((tmp_path / "runs").glob("augment-*")), "nothing is left there"
    augment("made", entry(kind, raw, tmp_path / "other", seed=4), compute(tmp_path / "runs"))
    assert (kind == "neighbours") == (sha256_of_folder(tmp_path / "other") == sha256_of_folder(root))


NAMES = {"a.jpg?w=600": "", "b.v1-2": "", "c": "", "D.JPEG": ".jpeg", "e.png": ".png"}
"""Names of images, by which readers know nothing, and the suffix that each is written with."""


def test_images_of_any_name_are_written_by_content_and_recognized_by_the_next_run(tmp_path, monkeypatch):
    (tmp_path / "raw").mkdir()
    for number, name in enumerate([*NAMES, "f."]):
        Image.new("RGB", (8, 8), (number * 40, 0, 0)).save(tmp_path / "raw" / name, "PNG")
    rows = [{"id": name, "image": name, "caption": f"of {name}"} for name in [*NAMES, "f."]]
    cfg = entry("coupled_samples", tmp_path, tmp_path / "made", source=single_images(tmp_path / "raw", rows))
    names = {sha256(tmp_path / "raw" / name)[:32] + suffix for name, suffix in (NAMES | {"f.": ""}).items()}
    monkeypatch.setattr(stage, "sha256", None)  # no image is hashed again whose digest is known
    for _ in range(2):
        augment("made", cfg, compute(tmp_path / "runs"))
        assert {path.name for path in (tmp_path / "made/images").iterdir()} == names


def test_edits_have_their_references_and_every_image_is_written_once(raw, made):
    root, _ = made["edits"]
    rows = rows_of(root)
    captions = json.loads((raw / "change_captions.json").read_text())
    files = {f"images/{path.name}" for path in (root / "images").iterdir()}
    assert files == {row[side] for row in rows for side in ("before", "after")}
    assert len(files) == SCENES + len(rows)
    for row in rows:
        name = f"CLEVR_default_{row['made']['of']}"
        assert sha256(root / row["before"]) == sha256(raw / "images" / name)
        assert len(row["captions"]) == len(set(row["captions"])) == {"train": 1, "val": 2, "test": 5}[row["split"]]
        assert row["captions"][0] == captions[name][0]


def test_what_neighbours_say_is_true_of_their_scenes(raw, made):
    scenes = read_scenes(raw).of
    rows = rows_of(made["neighbours"][0])
    for row in rows:
        before, after = (describe_scene(scenes[path]) for path in row["id"].split("+"))
        assert row["captions"] == difference(before, after, 2)
        assert 0.75 <= row["made"]["cosine"] <= 0.985
        assert row["scene"] in row["id"], "of one scene each: other scenes are below the band"
    assert len(rows) > 10


@pytest.mark.slow(15)
@pytest.mark.parametrize("kind", KINDS)
def test_no_made_pair_leaks_over_splits(kind, tmp_path):
    """Source and made dataset through ingest and validate, the made one as docs/made-data.md has it ingested."""
    raw = draw(tmp_path / "raw")
    run_ingest(raw, "minichange", "mini")
    augment("made", entry(kind, raw, tmp_path / "made"), compute(tmp_path / "runs"))
    read = run_ingest(tmp_path / "made", "pairs", "made", manifest="pairs.jsonl")
    assert read.faults == read.unread_images == 0
    report = run_validate(tmp_path)
    assert report.quarantined == 0
    assert report.leaks == 0
    assert sum(report.overlaps.values()) == 0
    clean = pl.read_parquet(tmp_path / "clean/records.parquet")
    assert set(clean["dataset"]) == {"mini", "made"}
    images = pl.concat([clean.select("split", "dataset", digest=f"{side}_sha256") for side in ("before", "after")])
    splits = images.group_by("digest").agg(pl.col("split").n_unique(), pl.col("dataset").n_unique())
    assert splits["split"].max() == 1, "no image is in two splits"
    assert splits["dataset"].max() == 2, "no image is in two splits"


def killed(raw: Path, folder: Path, after: int) -> None:
    done = []
    real = DrawnEditor.edit

    def edit(self: DrawnEditor, *arguments: Any) -> Any:
        if len(done) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(arguments)
        return real(self, *arguments)

    DrawnEditor.edit = edit
    augment("made", edits(raw, folder / "made"), compute(folder / "runs"))


@pytest.mark.slow
def test_a_killed_run_continues_and_ends_like_an_undisturbed_one(raw, made, tmp_path, edited):
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(raw, tmp_path, 23))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "made").exists()
    augment("made", edits(raw, tmp_path / "made"), compute(tmp_path / "runs"))
    assert len(edited) == 2 * SCENES - 23
    assert sha256_of_folder(tmp_path / "made") == sha256_of_folder(made["edits"][0])


@pytest.mark.parametrize(
    ("files", "code", "path", "value"),
    [
        ({"made/mine.txt": "mine"}, "augment.foreign_file", "made", "mine.txt"),
        ({"made/pairs.jsonl": '{"id": "1"}\n'}, "augment.foreign_manifest", "made/pairs.jsonl", None),
        ({"made/images/a.png": "an image"}, "augment.foreign_file", "made", "images/a.png"),
        (
            {f"made/images/{'0' * 32}.png": "ours", "made/images/2024/a.png": ""},
            "augment.foreign_file",
            "made",
            "images/2024",
        ),
        ({"made": "mine"}, "augment.root_is_no_folder", "made", None),
        ({"else/mine.txt": "mine"}, "augment.root_is_no_folder", "made", None),
    ],
)
def test_a_root_with_foreign_files_is_refused_before_any_work(files, code, path, value, raw, tmp_path):
    if "else/mine.txt" in files:
        (tmp_path / "made").symlink_to(tmp_path / "else")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with raises(DataError, code, path=tmp_path / path, value=value):
        augment("made", edits(raw, tmp_path / "made"), compute(tmp_path / "runs"))
    assert all((tmp_path / name).read_text() == text for name, text in files.items())
    assert not (tmp_path / "runs").exists()


def test_an_earlier_dataset_is_replaced_whole_or_left(raw, made, tmp_path, monkeypatch):
    root = tmp_path / "made"
    for changes in ({"edits": 3}, {}):
        augment("made", edits(raw, root, **changes), compute(tmp_path / "runs"))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.json", "runs"]
    assert sha256_of_folder(root) == sha256_of_folder(made["edits"][0])
    monkeypatch.setattr("shutil.copyfile", lambda *_: (root / "no/such/file").touch())
    with pytest.raises(OSError, match="No such file"):
        augment("made", edits(raw, root, seed=4), compute(tmp_path / "runs"))
    assert sha256_of_folder(root) == sha256_of_folder(made["edits"][0])


def test_the_first_row_of_a_reason_is_told_and_stands_in_no_file(raw, tmp_path):
    names = ["images/CLEVR_default_000000.png", "gone.png", "images/CLEVR_default_000001.png"]
    rows = [{"id": str(n), "image": name, "caption": f"text {n}"} for n, name in enumerate(names)]
    (tmp_path / "images").symlink_to(raw / "images")
    cfg = entry("coupled_samples", tmp_path, tmp_path / "made", source=single_images(tmp_path, rows, follow_links=True))
    (reason,) = augment("made", cfg, compute(tmp_path / "runs")).reasons()
    assert "image cannot be read; the first: pairs.jsonl, line 2: " in reason
    assert "examples" not in json.loads((tmp_path / "made.json").read_text())
    single_images(tmp_path, rows[1:2])
    with raises(DataError, "augment.no_pair", dataset="made", path=tmp_path) as refused:
        augment("made", cfg, compute(tmp_path / "runs"))
    (reason,) = refused.value.fields["reasons"]
    assert reason.startswith("1: image cannot be read")


def test_answers_of_an_endpoint_are_kept_and_no_question_is_repeated(raw, tmp_path):
    reports = []
    asked = []
    with chat_server('["say it in one way", "or in another"]') as server:
        server.replies = {"ball": [429, 503, '["a ball", "the ball"]'], "arrow": [""]}
        server.replies |= {"box": [{"content": None, "refusal": "I cannot"}], "cone": ['{"texts": 3}']}
        writer = {"kind": "endpoint", "url": server.url, "model": "m"}
        for name in ("one", "two"):
            cfg = edits(raw, tmp_path / name, writer=writer, paraphrases={"train": 2, "val": 2, "test": 2})
            reports.append(augment("made", cfg, compute(tmp_path / "runs")))
            asked.append(len(server.asked))
    assert reports[0] == reports[1]
    assert sha256_of_folder(tmp_path / "one") == sha256_of_folder(tmp_path / "two")
    assert asked == [len(set(server.texts)) + 2] * 2, "again: what was put off twice, and nothing else"
    assert {len(row["captions"]) for row in rows_of(tmp_path / "one")} == {3}
    assert reports[0].rejected["too few paraphrases"] + reports[0].rows_out == 2 * SCENES
    assert reports[0].dropped_texts.keys() == {"refused", "empty", "unreadable"}
    assert reports[0].models["writer"] == "m"


def test_texts_of_another_writer_are_refused_unless_the_entry_allows_them(raw, tmp_path):
    def make(server: Server, name: str, **changes: Any) -> Any:
        writer = {"kind": "endpoint", "url": server.url, "model": "m", **changes}
        cfg = edits(raw, tmp_path / name, writer=writer, paraphrases={"train": 1})
        return augment("made", cfg, compute(tmp_path / "runs"))

    with chat_server('["of the first"]') as first, chat_server('["of the second"]') as second:
        report = make(first, "one")
        with pytest.raises(OtherServerError):
            make(second, "refused")
        assert second.asked == []
        assert not (tmp_path / "refused").exists()
        assert make(second, "two", reuse_answers=True) == report
        make(second, "three", reuse_answers=False)
    assert second.asked
    assert sha256_of_folder(tmp_path / "one") == sha256_of_folder(tmp_path / "two")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes(), "no time in it"
    captions = [row["captions"][-1] for row in rows_of(tmp_path / "three") if row["split"] == "train"]
    assert set(captions) == {"of the second"}


def key(folder: Path, content: str = "weights", **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(content)
    cfg = InstructPix2Pix(**({"kind": "instruct_pix2pix", "model": folder} | changes))
    edits = Edits.model_construct(editor=cfg)
    return cached_edits_folder(edits, Pix2PixEditor(cfg, Device(gpu=False, precision="fp32")), Path("runs")).name


def test_cached_edits_are_identified_by_settings_weights_and_code(tmp_path, monkeypatch):
    first = key(tmp_path / "one")
    identity = sha256_of_folder(tmp_path / "one")
    assert first.startswith("instruct_pix2pix-")
    assert first == key(tmp_path / "two") == key(tmp_path / "one", sha256=identity)
    assert len({first, key(tmp_path / "one", steps=3), key(tmp_path / "one", content="others")}) == 3
    real = code.digests
    for changed, anew in {
        "stages/augment/weights.py": True,
        "images/open.py": True,
        "stages/augment/writers.py": False,
        "stages/augment/stage.py": False,
    }.items():
        assert (code.ROOT / "components" / changed).is_file()
        other = {f"components/{changed}": "other"}
        monkeypatch.setattr(code, "digests", lambda *of: {n: other.get(n, old) for n, old in real(*of).items()})  # noqa: B023
        assert (key(tmp_path / "one") != first) == anew


def test_two_simultaneous_runs_of_one_entry_do_not_disturb_each_other(tmp_path, monkeypatch):
    """The second, as from another worktree, begins and ends while the first has its images unpacked."""
    root = tmp_path / "raw"
    rows = []
    root.mkdir()
    for number in range(4):
        data = io.BytesIO()
        Image.new("RGB", (8, 8), (number, 0, 0)).save(data, "PNG")
        image = {"bytes": data.getvalue(), "path": f"{number}.png"}
        rows.append({"id": str(number), "split": "train", "image": image, "caption": f"text {number}"})
    pq.write_table(pa.Table.from_pylist(rows), root / "pairs.parquet")
    source = {"reader": "pairs", "root": root, "options": {"manifest": "pairs.parquet", "columns": ONE_IMAGE}}
    cfg = entry("coupled_samples", root, tmp_path / "one", source=source)
    runs = compute(tmp_path / "runs")
    real = stage.make_coupled_samples
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
    assert not list((tmp_path / "runs").glob("augment-*")), "what was unpacked is gone"


SOURCE = {"reader": "minichange", "root": "data/01_raw/minichange"}
MADE = {"kind": "edits", "source": SOURCE, "root": "data/01_raw/made", "seed": 3, "edits": 2, "paraphrases": {}}
MADE |= {"editor": {"kind": "drawn"}, "writer": {"kind": "grammar"}}
INGESTED = {"reader": "pairs", "root": "data/01_raw/made", "options": {"manifest": "pairs.jsonl"}}
LATER = ["ingest@made", "validate", "convert", "train", "predict", "evaluate"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = toy.build(tmp_path / "toy")
    set_params(root, "augment.made", MADE)
    set_params(root, "ingest.datasets.made", INGESTED)
    return root


def ran(root: Path, place: str | None = None, value: Any = None) -> list[str]:
    """The stages that run, after a change of params.yaml where one is named."""
    if place:
        assert toy.status(root) == {}
        set_params(root, place, value)
    return re.findall(r"Running stage '(.+)'", toy.run(root, "dvc", "repro"))


@pytest.mark.slow(30)
def test_a_made_dataset_follows_its_source_and_its_entry(project):
    order = ran(project)
    assert order.index("synthesize@minichange") < order.index("augment@made") < order.index("ingest@made")
    outs = yaml.safe_load((project / "dvc.lock").read_text())["stages"]["augment@made"]["outs"]
    assert {"data/01_raw/made.json": "md5"}.items() <= {out["path"]: out["hash"] for out in outs}.items()
    assert ran(project, "augment.made.edits", 3) == ["code", "augment@made"], "what it made is the same"
    assert ran(project, "augment.made.seed", 4) == ["code", "augment@made", *LATER]
    again = ran(project, "synthesize.minichange.seed", 4)
    assert "augment@made" in again
    assert "ingest@made" not in again, "the source has the same splits, so what is made is the same"
    (project / "data/01_raw/note.txt").write_text("no part of it")
    assert toy.status(project) == {}


PAGE = (REPOSITORY / "docs" / "made-data.md").read_text("utf-8")
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def test_the_documented_entry_is_valid_and_the_profile_makes_one_of_each_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    values = yaml.safe_load((REPOSITORY / "profiles" / "embedded.yaml").read_text())
    values["augment"] = BLOCKS[0]["augment"]
    values["ingest"]["datasets"] |= BLOCKS[0]["ingest"]["datasets"]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (entry,) = load_params(tmp_path / "params.yaml").augment.values()
    assert isinstance(entry, Edits)
    assert entry.edits == 8
    assert entry.paraphrases == {"val": 4}
    assert entry.source.splits == ("val",)
    made = load_params(REPOSITORY / "profiles" / "made-data.yaml").augment
    assert [entry.kind for entry in made.values()] == ["edits", "neighbours", "coupled_samples"]
    assert all(f"`{name}`" in PAGE for name in made)
    for block in BLOCKS[1:]:
        assert RawSource.model_validate(block["source"]).options["columns"]["captions"] in ("conversations", "caption")
