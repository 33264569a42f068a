"""The stage `augment` on a small MiniChange: its outputs, its counts, leaks between splits, and interrupted runs."""

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
from m3diff.stages.augment.minichange import DrawnEditor, describe_difference
from m3diff.stages.augment.params import Edits, InstructPix2Pix, RawSource
from m3diff.stages.augment.stage import AugmentReport, augment, cached_edits_folder
from m3diff.stages.augment.weights import Pix2PixEditor
from tests import toy
from tests.chat import Server, chat_server
from tests.errors import raises
from tests.layouts import run_ingest, run_validate
from tests.stages.augment.toys import KINDS, SCENES, compute, draw, edits_entry, entry
from tests.test_dependencies import set_params
from tests.toy import REPOSITORY

ONE_IMAGE = {"before": "image", "after": "image", "captions": "caption"}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("stage") / "raw")


@pytest.fixture(scope="module")
def datasets(raw: Path) -> dict[str, tuple[Path, AugmentReport]]:
    """Make a dataset of each kind. Return its root and its report."""
    root_and_report = {}
    for kind in KINDS:
        root = raw.parent / "once" / kind / "made"
        report = augment("made", entry(kind, raw, root), compute(root.parent / "runs"))
        root_and_report[kind] = (root, report)
    return root_and_report


@pytest.fixture
def edit_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record the arguments with which the editor is called."""
    calls = []
    real_edit = DrawnEditor.edit

    def edit(self: DrawnEditor, *arguments: Any) -> Any:
        calls.append(arguments)
        return real_edit(self, *arguments)

    monkeypatch.setattr(DrawnEditor, "edit", edit)
    return calls


def rows_of(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "pairs.jsonl").read_text().splitlines()]


def single_images(root: Path, rows: list[dict[str, Any]], **source: Any) -> dict[str, Any]:
    """Write a table of images with captions, and return it as a source."""
    (root / "pairs.jsonl").write_text("".join(json.dumps({"split": "train"} | row) + "\n" for row in rows))
    return {"reader": "pairs", "root": root, "options": {"manifest": "pairs.jsonl", "columns": ONE_IMAGE}} | source


@pytest.mark.parametrize("kind", KINDS)
def test_equal_settings_give_equal_bytes_and_every_tried_pair_is_made_or_counted(kind, raw, datasets, tmp_path):
    root, report = datasets[kind]
    assert augment("made", entry(kind, raw, tmp_path / "made"), compute(tmp_path / "runs")) == report
    assert sha256_of_folder(tmp_path / "made") == sha256_of_folder(root)
    assert (tmp_path / "made.json").read_bytes() == (root.parent / "made.json").read_bytes()
    attempted_pairs = {"edits": 2 * 2 * SCENES, "neighbours": 4 * 3 * SCENES, "coupled_samples": 3 * SCENES // 2}
    rows = rows_of(root)
    assert report.rows_in == attempted_pairs[kind]
    assert report.rows_out == len(rows) == attempted_pairs[kind] - sum(report.rejected.values())
    assert report.pairs == Counter(row["split"] for row in rows)
    assert set(report.pairs) == {"train", "val", "test"}
    assert sum(report.references.values()) == sum(len(row["captions"]) for row in rows)
    assert json.loads((tmp_path / "made.json").read_text()) == report.model_dump(mode="json")
    assert f"rows out {len(rows):,}, pairs {len(rows):,} (train " in format_report(report)
    assert not list((tmp_path / "runs").glob("augment-*")), "nothing is left there"
    augment("made", entry(kind, raw, tmp_path / "other", seed=4), compute(tmp_path / "runs"))
    assert (kind == "neighbours") == (sha256_of_folder(tmp_path / "other") == sha256_of_folder(root))


# Names of images, and the suffix of the file to which each image is copied
NAMES = {"a.jpg?w=600": "", "b.v1-2": "", "c": "", "D.JPEG": ".jpeg", "e.png": ".png"}


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


def test_captions_stand_in_the_manifest_letter_by_letter(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    Image.new("RGB", (8, 8), "white").save(tmp_path / "b.png")
    rows = [{"id": name, "image": f"{name}.png", "caption": f"die {name} müde"} for name in "ab"]
    cfg = entry("coupled_samples", tmp_path, tmp_path / "made", source=single_images(tmp_path, rows))
    augment("made", cfg, compute(tmp_path / "runs"))
    assert "müde" in (tmp_path / "made/pairs.jsonl").read_text("utf-8")


def test_edits_have_their_references_and_every_image_is_written_once(raw, datasets):
    root, _ = datasets["edits"]
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


def test_what_neighbours_say_is_true_of_their_scenes(raw, datasets):
    scenes = read_scenes(raw).scene_by_path
    rows = rows_of(datasets["neighbours"][0])
    for row in rows:
        before, after = (describe_scene(scenes[path]) for path in row["id"].split("+"))
        assert row["captions"] == describe_difference(before, after, 2)
        assert 0.75 <= row["made"]["cosine"] <= 0.985
        assert row["scene"] in row["id"], "both images show the same scene; other scenes are below the band"
    assert len(rows) > 10


@pytest.mark.slow(15)
@pytest.mark.parametrize("kind", KINDS)
def test_no_made_pair_leaks_over_splits(kind, tmp_path):
    """Ingest and validate the source and the made dataset, with the settings in docs/made-data.md."""
    raw = draw(tmp_path / "raw")
    run_ingest(raw, "minichange", "mini")
    augment("made", entry(kind, raw, tmp_path / "made"), compute(tmp_path / "runs"))
    ingest_report = run_ingest(tmp_path / "made", "pairs", "made", manifest="pairs.jsonl")
    assert ingest_report.faults == ingest_report.unread_images == 0
    report = run_validate(tmp_path)
    assert report.quarantined == 0
    assert report.leaks == 0
    assert sum(report.overlaps.values()) == 0
    clean = pl.read_parquet(tmp_path / "clean/records")
    assert set(clean["dataset"]) == {"mini", "made"}
    images = clean.explode("images").with_columns(digest=pl.col("images").struct.field("sha256"))
    splits = images.group_by("digest").agg(pl.col("split").n_unique(), pl.col("dataset").n_unique())
    assert splits["split"].max() == 1, "no image is in two splits"
    assert splits["dataset"].max() == 2, "no image is in two splits"


def augment_until_killed(raw: Path, folder: Path, edits_before_kill: int) -> None:
    calls = []
    real_edit = DrawnEditor.edit

    def edit(self: DrawnEditor, *arguments: Any) -> Any:
        if len(calls) == edits_before_kill:
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(arguments)
        return real_edit(self, *arguments)

    DrawnEditor.edit = edit
    augment("made", edits_entry(raw, folder / "made"), compute(folder / "runs"))


@pytest.mark.slow
def test_a_killed_run_continues_and_ends_like_an_undisturbed_one(raw, datasets, tmp_path, edit_calls):
    process = multiprocessing.get_context("spawn").Process(target=augment_until_killed, args=(raw, tmp_path, 23))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "made").exists()
    augment("made", edits_entry(raw, tmp_path / "made"), compute(tmp_path / "runs"))
    assert len(edit_calls) == 2 * SCENES - 23
    assert sha256_of_folder(tmp_path / "made") == sha256_of_folder(datasets["edits"][0])


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
        augment("made", edits_entry(raw, tmp_path / "made"), compute(tmp_path / "runs"))
    assert all((tmp_path / name).read_text() == text for name, text in files.items())
    assert not (tmp_path / "runs").exists()


def test_an_earlier_dataset_is_replaced_whole_or_left(raw, datasets, tmp_path, monkeypatch):
    root = tmp_path / "made"
    for changes in ({"edits": 3}, {}):
        augment("made", edits_entry(raw, root, **changes), compute(tmp_path / "runs"))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.json", "runs"]
    assert sha256_of_folder(root) == sha256_of_folder(datasets["edits"][0])
    monkeypatch.setattr("shutil.copyfile", lambda *_: (root / "no/such/file").touch())
    with pytest.raises(OSError, match="No such file"):
        augment("made", edits_entry(raw, root, seed=4), compute(tmp_path / "runs"))
    assert sha256_of_folder(root) == sha256_of_folder(datasets["edits"][0])


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


def test_only_reasons_that_are_faults_of_the_source_have_an_example():
    rejected = {"too unlike": 1200, "no caption": 1}
    empty_fields = dict.fromkeys(("pairs", "references", "dropped_texts", "models"), {})
    report = AugmentReport(
        stage="augment",
        rows_in=1201,
        rows_out=0,
        dataset="made",
        kind="neighbours",
        rejected=rejected,
        examples={"no caption": "row 7"},
        **empty_fields,
    )
    assert list(report.reasons()) == ["1,200: too unlike", "1: no caption; the first: row 7"]


def test_the_report_lists_reasons_by_name_whichever_occurred_first():
    rejected = Counter({"too unlike": 3, "image cannot be read": 1, "same image": 2, "none of these": 0})
    dropped_texts = Counter({"repeated": 1, "empty": 1, "unreadable": 1})
    report = stage._make_report("made", "edits", stage.AugmentResult(rejected=rejected, dropped_texts=dropped_texts))
    assert list(report.rejected) == ["image cannot be read", "same image", "too unlike"]
    assert list(report.dropped_texts) == ["empty", "repeated", "unreadable"]


def test_answers_of_an_endpoint_are_kept_and_no_question_is_repeated(raw, tmp_path):
    reports = []
    request_counts = []
    with chat_server('["say it in one way", "or in another"]') as server:
        server.replies = {"ball": [429, 503, '["a ball", "the ball"]'], "arrow": [""]}
        server.replies |= {"box": [{"content": None, "refusal": "I cannot"}], "cone": ['{"texts": 3}']}
        writer = {"kind": "endpoint", "url": server.url, "model": "m"}
        for name in ("one", "two"):
            cfg = edits_entry(raw, tmp_path / name, writer=writer, paraphrases={"train": 2, "val": 2, "test": 2})
            reports.append(augment("made", cfg, compute(tmp_path / "runs")))
            request_counts.append(len(server.requests))
    assert reports[0] == reports[1]
    assert sha256_of_folder(tmp_path / "one") == sha256_of_folder(tmp_path / "two")
    expected_requests = len(set(server.texts)) + 2
    assert request_counts == [expected_requests] * 2, "only the two requests that the server delayed are repeated"
    assert {len(row["captions"]) for row in rows_of(tmp_path / "one")} == {3}
    assert reports[0].rejected["too few paraphrases"] + reports[0].rows_out == 2 * SCENES
    assert reports[0].dropped_texts.keys() == {"refused", "empty", "unreadable"}
    assert reports[0].models["writer"] == "m"


def test_texts_of_another_writer_are_refused_unless_the_entry_allows_them(raw, tmp_path):
    def make(server: Server, name: str, **changes: Any) -> Any:
        writer = {"kind": "endpoint", "url": server.url, "model": "m", **changes}
        cfg = edits_entry(raw, tmp_path / name, writer=writer, paraphrases={"train": 1})
        return augment("made", cfg, compute(tmp_path / "runs"))

    with chat_server('["of the first"]') as first_server, chat_server('["of the second"]') as second_server:
        report = make(first_server, "one")
        with pytest.raises(OtherServerError):
            make(second_server, "refused")
        assert second_server.requests == []
        assert not (tmp_path / "refused").exists()
        assert make(second_server, "two", reuse_answers=True) == report
        make(second_server, "three", reuse_answers=False)
    assert second_server.requests
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


def test_cached_edits_are_identified_by_settings_and_weights(tmp_path):
    first_key = key(tmp_path / "one")
    identity = sha256_of_folder(tmp_path / "one")
    assert first_key.startswith("instruct_pix2pix-")
    assert first_key == key(tmp_path / "two") == key(tmp_path / "one", sha256=identity)
    key_of_other_settings = key(tmp_path / "one", steps=3)
    key_of_other_weights = key(tmp_path / "one", content="others")
    assert len({first_key, key_of_other_settings, key_of_other_weights}) == 3


@pytest.mark.parametrize(
    ("changed_file", "changes_key"),
    [
        ("stages/augment/weights.py", True),
        ("images/open.py", True),
        ("stages/augment/writers.py", False),
        ("stages/augment/stage.py", False),
    ],
)
def test_cached_edits_are_identified_by_the_code_of_the_editor(changed_file, changes_key, tmp_path, monkeypatch):
    first_key = key(tmp_path / "one")
    assert (code.ROOT / "components" / changed_file).is_file()
    real_digests = code.digest_code

    def digests(*arguments: Any) -> dict[str, str]:
        digest_of_file = real_digests(*arguments)
        name = f"components/{changed_file}"
        return digest_of_file | {name: "other"} if name in digest_of_file else digest_of_file

    monkeypatch.setattr(code, "digest_code", digests)
    assert (key(tmp_path / "one") != first_key) == changes_key


def test_two_simultaneous_runs_of_one_entry_do_not_disturb_each_other(tmp_path, monkeypatch):
    """The second run begins and ends while the first run has unpacked its images, as in another worktree."""
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
    real_function = stage.make_coupled_samples
    reports = []

    def make_samples_after_second_run(*arguments: Any) -> Any:
        monkeypatch.setattr(stage, "make_coupled_samples", real_function)
        reports.append(augment("made", cfg.model_copy(update={"root": tmp_path / "two"}), runs))
        return real_function(*arguments)

    monkeypatch.setattr(stage, "make_coupled_samples", make_samples_after_second_run)
    reports.append(augment("made", cfg, runs))
    assert reports[0] == reports[1]
    assert reports[0].pairs == Counter(train=2)
    assert sha256_of_folder(tmp_path / "one") == sha256_of_folder(tmp_path / "two")
    assert not list((tmp_path / "runs").glob("augment-*")), "the unpacked images are removed"


SOURCE = {"reader": "minichange", "root": "data/01_raw/minichange"}
MADE_ENTRY = {"kind": "edits", "source": SOURCE, "root": "data/01_raw/made", "seed": 3, "edits": 2, "paraphrases": {}}
MADE_ENTRY |= {"editor": {"kind": "drawn"}, "writer": {"kind": "grammar"}}
INGEST_ENTRY = {"reader": "pairs", "root": "data/01_raw/made", "options": {"manifest": "pairs.jsonl"}}
LATER = ["ingest@made", "validate", "convert", "train", "predict", "evaluate"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = toy.build(tmp_path / "toy")
    set_params(root, "augment.made", MADE_ENTRY)
    set_params(root, "ingest.datasets.made", INGEST_ENTRY)
    return root


def run_stages(root: Path, parameter: str | None = None, value: Any = None) -> list[str]:
    """Set a parameter if one is given, run the pipeline, and return the stages that ran."""
    if parameter:
        assert toy.status(root) == {}
        set_params(root, parameter, value)
    return re.findall(r"Running stage '(.+)'", toy.run(root, "dvc", "repro"))


@pytest.mark.slow(30)
def test_a_made_dataset_follows_its_source_and_its_entry(project):
    order = run_stages(project)
    assert order.index("synthesize@minichange") < order.index("augment@made") < order.index("ingest@made")
    outs = yaml.safe_load((project / "dvc.lock").read_text())["stages"]["augment@made"]["outs"]
    assert {"data/01_raw/made.json": "md5"}.items() <= {out["path"]: out["hash"] for out in outs}.items()
    assert run_stages(project, "augment.made.edits", 3) == ["code", "augment@made"], "the dataset is the same"
    assert run_stages(project, "augment.made.seed", 4) == ["code", "augment@made", *LATER]
    again = run_stages(project, "synthesize.minichange.seed", 4)
    assert "augment@made" in again
    assert "ingest@made" not in again, "the source has the same splits, so what is made is the same"
    (project / "data/01_raw/note.txt").write_text("no part of it")
    assert toy.status(project) == {}


PAGE = (REPOSITORY / "docs" / "made-data.md").read_text("utf-8")
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def test_the_documented_entry_is_valid_and_the_profile_makes_one_of_each_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    values = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    values["augment"] = BLOCKS[0]["augment"]
    values["ingest"]["datasets"] |= BLOCKS[0]["ingest"]["datasets"]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (entry,) = load_params(tmp_path / "params.yaml").augment.values()
    assert isinstance(entry, Edits)
    assert entry.edits == 8
    assert entry.paraphrases == {"val": 4}
    assert entry.source.splits == ("val",)
    entries = load_params(REPOSITORY / "profiles" / "made-data.yaml").augment
    assert [entry.kind for entry in entries.values()] == ["edits", "neighbours", "coupled_samples"]
    assert all(f"`{name}`" in PAGE for name in entries)
    for block in BLOCKS[1:]:
        assert RawSource.model_validate(block["source"]).options["columns"]["captions"] in ("conversations", "caption")
