"""The stage on a small MiniChange: equal bytes twice, every pair counted, no leak past validate, a kill survived."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image

from m3diff.commands.counts import told_of_made
from m3diff.datasets.minichange.generate import read_scenes
from m3diff.datasets.minichange.language import describe_scene
from m3diff.records.errors import DataError
from m3diff.records.files import sha256, sha256_of_folder
from m3diff.stages.augment import stage
from m3diff.stages.augment.editors import DrawnEditor
from m3diff.stages.augment.stage import augment
from m3diff.stages.augment.words import difference
from m3diff.stages.augment.writers import Written
from tests.chat import CUT_BODY, Server, chat_server
from tests.layouts import emu_row, run_ingest, run_validate, write_shards
from tests.stages.augment.small import SCENES, compute, draw, edits, entry
from tests.stages.augment.tiny import BASE
from tests.stages.augment.toys import ToyWriter

NEIGHBOURS = {
    "features": {"kind": "encoder", "model": BASE},
    "writer": {"kind": "grammar"},
    "candidates": 4,
    "band": (0.75, 0.985),
    "max_text_similarity": 0.99,
    "references": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "edits": {"editor": {"kind": "drawn"}, "writer": {"kind": "grammar"}, "edits": 2, "paraphrases": {"test": 4}},
    "neighbours": NEIGHBOURS,
    "coupled_samples": {},
}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("stage") / "raw")


def rows_of(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "pairs.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_settings_give_equal_bytes_and_every_pair_that_was_tried_is_made_or_counted(
    kind: str, raw: Path, tmp_path: Path
):
    reports = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        cfg = entry(kind, raw, folder / "made", **KINDS[kind])
        reports.append(augment("made", cfg, compute(folder / "runs")))
    assert reports[0] == reports[1]
    assert sha256_of_folder(tmp_path / "one/made") == sha256_of_folder(tmp_path / "two/made")
    assert (tmp_path / "one/made.json").read_bytes() == (tmp_path / "two/made.json").read_bytes()
    tried = {"edits": 2 * 2 * SCENES, "neighbours": 4 * 3 * SCENES, "coupled_samples": 3 * SCENES // 2}
    report, rows = reports[0], rows_of(tmp_path / "one/made")
    assert report.rows_in == tried[kind]
    assert report.rows_out == len(rows) == tried[kind] - sum(report.rejected.values())
    assert report.pairs == Counter(row["split"] for row in rows)
    assert set(report.pairs) == {"train", "val", "test"}
    assert sum(report.references.values()) == sum(len(row["captions"]) for row in rows)
    assert json.loads((tmp_path / "one/made.json").read_text()) == report.model_dump(mode="json")
    lines = list(told_of_made(report))
    assert lines[0].startswith(f"augment: made: {len(rows)} (train ")
    assert len(lines) == 1 + len(report.rejected)
    assert [path.name for path in (tmp_path / "one/runs/augment").iterdir()] == ["0.lock"], "nothing is left there"
    other = entry(kind, raw, tmp_path / "other", **(KINDS[kind] | {"seed": 4}))
    augment("made", other, compute(tmp_path / "runs"))
    assert (kind == "neighbours") == (sha256_of_folder(tmp_path / "other") == sha256_of_folder(tmp_path / "one/made"))


NAMES = {"a.jpg?w=600": ".jpg", "b.v1-2": ".png", "c": ".png", "D.JPEG": ".jpeg", "e.png": ".png", "f.": ""}
"""Names of images, by which reader and server know nothing, and the suffix that each is written with."""


def test_images_of_any_name_are_written_by_content_and_known_as_ours_in_the_next_run(tmp_path: Path):
    (tmp_path / "raw").mkdir()
    rows = []
    for number, (name, suffix) in enumerate(NAMES.items()):
        kind = {".png": "PNG", "": "TIFF"}.get(suffix, "JPEG")
        Image.new("RGB", (8, 8), (number * 40, 0, 0)).save(tmp_path / "raw" / name, kind)
        rows.append({"id": name, "split": "train", "image": name, "caption": f"text {number}"})
    (tmp_path / "raw/pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"before": "image", "after": "image", "captions": "caption"}
    source = {"reader": "pairs", "root": tmp_path / "raw", "options": {"manifest": "pairs.jsonl", "columns": columns}}
    for _ in range(2):
        cfg = entry("coupled_samples", tmp_path, tmp_path / "made", source=source)
        augment("made", cfg, compute(tmp_path / "runs"))
    of = {sha256(tmp_path / "raw" / name)[:32]: suffix for name, suffix in NAMES.items()}
    assert sorted(path.name for path in (tmp_path / "made/images").iterdir()) == sorted(map("".join, of.items()))
    for stem in of:  # as an earlier version called them
        (tmp_path / "made/images" / f"{stem}.jpg?w=600").write_text("an image")
    augment("made", cfg, compute(tmp_path / "runs"))
    assert len(list((tmp_path / "made/images").iterdir())) == len(NAMES)


@pytest.mark.parametrize(("kind", "hashed"), [("edits", 2 * SCENES), ("coupled_samples", 0)])
def test_no_image_is_hashed_again_whose_digest_is_known(
    kind: str, hashed: int, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Path] = []
    monkeypatch.setattr(stage, "sha256", lambda path: asked.append(path) or sha256(path))
    augment("made", entry(kind, raw, tmp_path / "made", **KINDS[kind]), compute(tmp_path / "runs"))
    assert len(asked) == hashed


def test_every_image_is_written_once_and_originals_byte_by_byte(raw: Path, tmp_path: Path):
    augment("made", edits(raw, tmp_path / "made"), compute(tmp_path / "runs"))
    rows = rows_of(tmp_path / "made")
    files = {f"images/{path.name}" for path in (tmp_path / "made/images").iterdir()}
    assert files == {row[side] for row in rows for side in ("before", "after")}
    for row in rows:
        number = row["made"]["of"].removesuffix(".png")
        assert sha256(tmp_path / "made" / row["before"]) == sha256(raw / f"images/CLEVR_default_{number}.png")
    assert len(files) == SCENES + len(rows)


def test_edits_have_one_reference_where_none_is_asked_for_and_five_in_test(raw: Path, tmp_path: Path):
    augment("made", edits(raw, tmp_path / "made"), compute(tmp_path / "runs"))
    captions = json.loads((raw / "change_captions.json").read_text())
    for row in rows_of(tmp_path / "made"):
        assert len(row["captions"]) == (5 if row["split"] == "test" else 1)
        assert len(set(row["captions"])) == len(row["captions"])
        assert row["captions"][0] == captions[f"CLEVR_default_{row['made']['of']}"][0]


def test_what_neighbours_say_is_true_of_their_scenes(raw: Path, tmp_path: Path):
    augment("made", entry("neighbours", raw, tmp_path / "made", **NEIGHBOURS), compute(tmp_path / "runs"))
    scenes = read_scenes(raw).of
    told = {}
    for row in rows_of(tmp_path / "made"):
        before, after = (scenes[path] for path in row["id"].split("+"))
        told[row["id"]] = difference(describe_scene(before), describe_scene(after), 2)
        assert row["captions"] == told[row["id"]]
        assert 0.75 <= row["made"]["cosine"] <= 0.985
        assert row["scene"] in row["id"], "of one scene each: other scenes are below the band"
    assert len(told) > 10


# Leaks


def check(tmp_path: Path, raw: Path, kind: str) -> Any:
    """Source and made dataset through ingest and validate, the made one as docs/made-data.md has it ingested."""
    run_ingest(raw, "minichange", "mini")
    augment("made", entry(kind, raw, raw.parent / "made", **KINDS[kind]), compute(raw.parent / "runs"))
    report = run_ingest(raw.parent / "made", "pairs", "made", manifest="pairs.jsonl")
    assert report.faults == report.unread_images == 0
    return run_validate(raw.parent)


@pytest.mark.slow(15)
@pytest.mark.parametrize("kind", KINDS)
def test_no_made_pair_leaks_over_splits(kind: str, tmp_path: Path):
    raw = draw(tmp_path / "raw")
    report = check(tmp_path, raw, kind)
    assert (report.quarantined, report.leaks, sum(report.overlaps.values())) == (0, 0, 0)
    clean = pl.read_parquet(tmp_path / "clean/records.parquet")
    assert set(clean["dataset"]) == {"mini", "made"}
    images = pl.concat([clean.select("split", "dataset", digest=f"{side}_sha256") for side in ("before", "after")])
    splits = images.group_by("digest").agg(pl.col("split").n_unique(), pl.col("dataset").n_unique())
    assert splits["split"].max() == 1, "no image is in two splits"
    assert splits["dataset"].max() == 2


@pytest.mark.slow(15)
def test_edits_of_a_scene_that_is_in_two_splits_are_of_the_higher_one(tmp_path: Path):
    raw = draw(tmp_path / "raw")
    splits = json.loads((raw / "splits.json").read_text())
    twice = splits["test"][:3]
    splits["train"] += twice
    (raw / "splits.json").write_text(json.dumps(splits))
    check(tmp_path, raw, "edits")
    rows = rows_of(tmp_path / "made")
    of_them = [row["split"] for row in rows if int(row["scene"]) in twice]
    assert of_them == ["test"] * 6
    report = json.loads((tmp_path / "made.json").read_text())
    assert report["rejected"]["scene is in a higher split"] == 2 * 2 * 3
    clean = pl.read_parquet(tmp_path / "clean/records.parquet").filter(dataset="made")
    assert clean.height == len(rows)


# Kills and other ends


def killed(raw: Path, folder: Path, after: int) -> None:
    done = 0
    real = DrawnEditor.edit

    def edit(self: DrawnEditor, *arguments: Any) -> Any:
        nonlocal done
        if done == after:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        return real(self, *arguments)

    DrawnEditor.edit = edit  # type: ignore[method-assign]
    augment("made", edits(raw, folder / "made"), compute(folder / "runs"))


@pytest.mark.parametrize("after", [0, 23])
def test_a_run_that_was_killed_goes_on_and_ends_as_one_that_was_not(
    after: int, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    augment("made", edits(raw, tmp_path / "whole"), compute(tmp_path / "else"))
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(raw, tmp_path, after))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "made").exists()
    edited, real = [], DrawnEditor.edit
    monkeypatch.setattr(DrawnEditor, "edit", lambda self, *rest: edited.append(rest) or real(self, *rest))
    augment("made", edits(raw, tmp_path / "made"), compute(tmp_path / "runs"))
    assert len(edited) == 2 * SCENES - after
    assert sha256_of_folder(tmp_path / "made") == sha256_of_folder(tmp_path / "whole")


def test_a_folder_of_someone_else_stays_as_it_is(raw: Path, tmp_path: Path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made/mine.txt").write_text("mine")
    with pytest.raises(DataError, match=r"made: holds 'mine\.txt', which augment does not write; name another root"):
        augment("made", edits(raw, tmp_path / "made"), compute(tmp_path / "runs"))
    assert (tmp_path / "made/mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"pairs.jsonl": '{"id": "1", "before": "images/a.png"}\n'}, r"made/pairs\.jsonl: its rows say nothing"),
        ({"pairs.jsonl": "before,after\n"}, r"made/pairs\.jsonl: its rows say nothing"),
        ({"images/a.png": "an image"}, r"made/images: holds 'a\.png'"),
        ({f"images/{'0' * 32}.png": "ours", "images/2024/a.png": "an image"}, r"made/images: holds '2024'"),
    ],
)
def test_a_collection_with_the_same_names_is_not_ours(files: dict[str, str], named: str, raw: Path, tmp_path: Path):
    for name, text in files.items():
        (tmp_path / "made" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made" / name).write_text(text)
    with pytest.raises(DataError, match=f"{named}.*name another root"):
        augment("made", edits(raw, tmp_path / "made"), compute(tmp_path / "runs"))
    assert all((tmp_path / "made" / name).read_text() == text for name, text in files.items())


def test_a_run_that_was_killed_while_it_wrote_is_made_anew(raw: Path, tmp_path: Path):
    (tmp_path / "made/images").mkdir(parents=True)
    (tmp_path / f"made/images/{'0' * 32}.png").write_text("half")
    augment("made", edits(raw, tmp_path / "made"), compute(tmp_path / "runs"))
    assert not (tmp_path / f"made/images/{'0' * 32}.png").exists()


def test_an_earlier_dataset_is_replaced_whole(raw: Path, tmp_path: Path):
    augment("made", edits(raw, tmp_path / "made", edits=3), compute(tmp_path / "runs"))
    augment("made", edits(raw, tmp_path / "made"), compute(tmp_path / "runs"))
    augment("made", edits(raw, tmp_path / "else"), compute(tmp_path / "runs"))
    assert sha256_of_folder(tmp_path / "made") == sha256_of_folder(tmp_path / "else")


def test_an_error_while_the_new_dataset_is_written_leaves_the_earlier_one(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    augment("made", edits(raw, tmp_path / "made"), compute(tmp_path / "runs"))
    before, copied, real = sha256_of_folder(tmp_path / "made"), [], shutil.copyfile

    def copyfile(path: Path, to: Path) -> None:
        copied.append(path)
        if len(copied) == 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, to)

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with pytest.raises(OSError, match="No space left"):
        augment("made", edits(raw, tmp_path / "made", seed=4), compute(tmp_path / "runs"))
    assert sha256_of_folder(tmp_path / "made") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.json", "runs"]


def test_what_runs_that_were_killed_left_beside_the_root_is_gone_when_the_dataset_is_there(raw: Path, tmp_path: Path):
    for name in (".made.new", ".made.old"):
        (tmp_path / name / "images").mkdir(parents=True)
        (tmp_path / name / "images" / f"{'0' * 32}.png").write_text("of a killed run")
    for _ in range(2):
        augment("made", edits(raw, tmp_path / "made"), compute(tmp_path / "runs"))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.json", "runs"]
        assert not (tmp_path / f"made/images/{'0' * 32}.png").exists()


@pytest.mark.parametrize(
    ("kind", "root", "told"),
    [
        ("a link", "made", "made: is a link, .*; name the folder that it leads to"),
        ("a link to nothing", "made", "made: is a link, .*; name the folder that it leads to"),
        ("a file", "made", "made: is no folder; name another root"),
        ("a file", "made/inner", "made: is no folder; name another root"),
    ],
)
def test_a_root_that_is_a_link_or_a_file_is_refused_before_any_work(
    kind: str, root: str, told: str, raw: Path, tmp_path: Path
):
    if kind == "a file":
        (tmp_path / "made").write_text("mine")
    else:
        (tmp_path / "made").symlink_to(tmp_path / "else")
        (tmp_path / "else").mkdir() if kind == "a link" else None
    with pytest.raises(DataError, match=told):
        augment("made", edits(raw, tmp_path / root), compute(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_half_a_character_that_a_writer_says_is_a_question_mark(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Half(ToyWriter):
        def write(self, task: str, facts: Sequence[Mapping[str, str]], n: int) -> list[Written]:
            return [Written((f"a cup \ud83d {number}",), Counter()) for number, _ in enumerate(facts)]

    monkeypatch.setattr(stage, "load_writer", lambda *_: Half())
    augment("made", edits(raw, tmp_path / "made", paraphrases={"val": 1}), compute(tmp_path / "runs"))
    said = {text for row in rows_of(tmp_path / "made") for text in row["captions"][1:]}
    assert said == {f"a cup ? {number}" for number in range(4)}


def test_the_first_row_of_a_reason_is_told_and_stands_in_no_file(raw: Path, tmp_path: Path):
    rows = [
        {"id": str(number), "split": "train", "image": f"images/{name}", "caption": f"text {number}"}
        for number, name in enumerate(["CLEVR_default_000000.png", "gone.png", "CLEVR_default_000001.png"])
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "images").symlink_to(raw / "images")
    columns = {"before": "image", "after": "image", "captions": "caption"}
    options = {"manifest": "pairs.jsonl", "columns": columns}
    source = {"reader": "pairs", "root": tmp_path, "options": options, "follow_links": True}
    cfg = entry("coupled_samples", tmp_path, tmp_path / "made", source=source)
    report = augment("made", cfg, compute(tmp_path / "runs"))
    assert list(told_of_made(report))[1:] == [
        "augment: made: rejected: 1: image cannot be read; the first: "
        f"pairs.jsonl, line 2: {tmp_path}/images/gone.png: is missing; fetch it"
    ]
    assert "examples" not in json.loads((tmp_path / "made.json").read_text())


def test_where_no_pair_can_be_made_the_first_row_and_its_remedy_are_told(tmp_path: Path):
    emu = tmp_path / "emu"
    for split in ("validation", "test"):
        bad = {"bytes": b"none", "path": None}
        write_shards(emu, split, [emu_row(split, 0, "add a cat") | {"image": bad, "edited_image": bad}])
    source = {"reader": "emu_edit", "root": emu}
    (tmp_path / "config.json").write_text("{}")
    editor = {"kind": "instruct_pix2pix", "model": tmp_path}
    told = "rejected: 4: image cannot be read; the first: .*; restore it or save it anew"
    cfg = edits(emu, tmp_path / "made", source=source, editor=editor, paraphrases={})
    with pytest.raises(DataError, match=rf"augment\.made: no pair could be made of {emu}\n  {told}"):
        augment("made", cfg, compute(tmp_path / "runs"))


# With an endpoint


@pytest.fixture
def server() -> Iterator[Server]:
    with chat_server('["say it in one way", "or in another"]') as known:
        yield known


def test_a_writer_behind_an_endpoint_loses_nothing_and_is_asked_nothing_twice(
    server: Server, raw: Path, tmp_path: Path
):
    """Refusals, 429, 5xx, cut JSON and empties, each for one kind of object."""
    server.replies = {
        "ball": [429, 503, '["first of a ball", "second of a ball"]'],
        "box": ["I'm sorry, I cannot help"],
        "cone": [CUT_BODY, '["first of a cone", "second of a cone"]'],
        "star": ['["half a star", "ano'],
        "arrow": [""],
        "doll": [{"content": None, "refusal": "no"}],
        "die": ['["one alone"]'],
    }
    writer = {"kind": "endpoint", "url": server.url, "model": "m"}
    made, asked = [], []
    for name in ("one", "two"):
        cfg = edits(raw, tmp_path / name, writer=writer, paraphrases={"train": 2, "val": 2, "test": 2})
        made.append(augment("made", cfg, compute(tmp_path / "runs")))
        asked.append(len(server.asked))
    assert made[0] == made[1]
    assert sha256_of_folder(tmp_path / "one") == sha256_of_folder(tmp_path / "two")
    tries = Counter(server.texts)
    assert asked == [len(tries) + 3] * 2, "again: what was put off twice and cut once on its way, and nothing else"
    report = made[0]
    assert {len(row["captions"]) for row in rows_of(tmp_path / "one")} == {3}
    assert report.rejected["too few paraphrases"] + report.rows_out == 2 * SCENES
    assert report.dropped_texts.keys() >= {"refused", "unreadable", "empty"}
    assert report.models["writer"] == "m"
    kept = [json.loads(line) for line in (tmp_path / "runs/answers.jsonl").read_text().splitlines()]
    assert len(kept) == len({entry["key"] for entry in kept}) == len(tries)
