"""The stage `convert`: every draw depends only on seed and id, and the report counts everything that is left out."""

import hashlib
import json
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from m3diff.command_line.report_lines import format_report
from m3diff.records.errors import DataError, ParamsError
from m3diff.records.schemas import NO_CHANGE, RECORD_SCHEMA, SAMPLE_SCHEMA, SPLITS
from m3diff.stages.convert import stage
from m3diff.stages.convert.params import Convert
from m3diff.stages.convert.stage import PAPER_DATASETS, ConvertReport, convert, load_questions, require_test_pairs
from tests.errors import raises
from tests.layouts import make_entry, write_record_table

QUESTIONS = Path("profiles/questions.yaml")
LIMITS = {"seed": 7, "questions": QUESTIONS, "references_per_question": 5, "no_change_share": 1.0, "sources": {}}
SPLIT_OF_FOLDER = {"retention": "test"}
READERS = {"edits": "iedit", "birds": "birds_to_words"}  # of datasets of these names; `pairs` of all others


def record(name: str, split: str = "train", references: tuple[str, ...] = ("it moved",), types=("color",), dataset="d"):
    values: dict[str, Any] = dict.fromkeys(("id", "scene"), f"{dataset}/{name}") | {"dataset": dataset, "split": split}
    uris = (f"{name}.png", f"{name}_2.png")
    values["images"] = [{"uri": uri, "sha256": hashlib.sha256(uri.encode()).digest()} for uri in uris]
    return values | {"references": [*references], "change_types": [*types], "source": f"row {name}"}


def run(folder: Path, records: list[dict], **changes) -> tuple[pl.DataFrame, ConvertReport]:
    """Convert records. Return the samples of all splits in the order of the shards, and the report."""
    (folder / "clean").mkdir(exist_ok=True)
    write_record_table(folder / "clean/records", records)
    names = dict.fromkeys(record["dataset"] for record in records)
    entries = {}
    for name in names:
        fields = {"train_on": ()} if name == "tested" else {"role": "retention"} if name == "kept" else {}
        entries[name] = make_entry(READERS.get(name, "pairs"), folder, **fields)
    report = convert(Convert.model_validate(LIMITS | changes), entries, folder / "clean", folder / "mixture")
    frames = split_frames(folder / "mixture")
    assert all((frame["split"] == SPLIT_OF_FOLDER.get(name, name)).all() for name, frame in frames.items())
    assert all(pq.read_schema(shard).equals(SAMPLE_SCHEMA) for shard in (folder / "mixture").glob("*/*"))
    samples = pl.concat(frames.values())
    assert samples.height == report.rows_out == sum(report.samples.values())
    assert samples["id"].is_unique().all()
    changes_of_pair = (samples["record"] != samples["record"].shift()).sum()
    assert changes_of_pair == samples["record"].n_unique() - 1 or any("x1" in name for name in samples["id"])
    return samples, report


def split_frames(mixture: Path) -> dict[str, pl.DataFrame]:
    full = [name for name in (*SPLITS, *SPLIT_OF_FOLDER) if any((mixture / name).iterdir())]
    return {split: pl.read_parquet(mixture / split / "*.parquet") for split in full}


def mixed(count: int, *splits: str) -> list[dict]:
    """Return `count` records per split. The splits alternate, and the ids are numbered."""
    records = []
    for index in range(count):
        for split in splits:
            records.append(record(str(index), split) | {"id": f"d/{len(records)}"})
    return records


SOURCES = {
    "half": {"weight": 0.4, "task": "edit"},
    "twice": {"weight": 2, "samples": "one", "references_per_question": 5},
    "few": {"max_pairs": 7},
    "joined": {"samples": "joined", "task": "detail", "weight": 2},
    "all": {"references_per_question": "all"},
    "three": {"references_per_question": 3},
    "none": {"weight": 0},
    "nothing": {"max_pairs": 0},
}


def test_weights_caps_and_kinds_of_samples_by_source(tmp_path):
    references = ("It fell.", "a b", "c", "d...", "It fell.", "")
    count = 60
    names = [*SOURCES, "edits", "birds"]
    records = [record(str(n), references=references, dataset=name) for name in names for n in range(count)]
    samples, report = run(tmp_path, records, references_per_question=2, sources=SOURCES)
    half = report.datasets["half"].pairs["train"]
    assert 10 < half < 38
    counts = {name: (count.pairs["train"], count.samples["train"]) for name, count in report.datasets.items()}
    plain = {"few": (7, 14), "edits": (60, 120), "birds": (60, 120), "none": (0, 0), "nothing": (0, 0)}
    weighted = {"half": (half, 2 * half), "twice": (60, 120), "joined": (60, 120), "all": (60, 240), "three": (60, 180)}
    assert counts == plain | weighted
    omissions = {name: count.left_out for name, count in report.datasets.items()}
    over_cap = {name: omissions[name]["references_over_cap"] for name in ("all", "three", "twice", "joined")}
    assert over_cap == {"all": 0, "three": 60, "twice": 360, "joined": 0}
    not_sampled = {name: omission["pairs_not_sampled"] for name, omission in omissions.items()}
    not_sampled = {name: pairs for name, pairs in not_sampled.items() if pairs}
    assert not_sampled == {"half": 60 - half, "few": 53, "none": 60, "nothing": 60}
    assert samples.filter(dataset="joined")["answer"].to_list() == ["It fell. a b. c. d..."] * 120
    assert samples.filter(record="joined/0")["id"].sort().to_list() == ["joined/0#0", "joined/0#0x1"]
    questions = load_questions(QUESTIONS)
    for name, task in (("half", "edit"), ("edits", "edit"), ("joined", "detail"), ("all", "difference")):
        assert set(samples.filter(dataset=name)["question"]) == set(questions[task]), name
    lowest = sorted((f"few/{n}" for n in range(count)), key=lambda name: plain_bits(7, name, MAX_PAIRS))[:7]
    assert set(samples.filter(dataset="few")["record"]) == set(lowest), "the pairs with the lowest random numbers"


def test_captions_keep_the_draws_and_the_order_of_earlier_releases(tmp_path):
    """The digest is that of the release before records had questions of their own."""
    references = ("It fell.", "a b", "c", "d...", "It fell.", "")
    records = []
    for name in (*SOURCES, "edits", "birds"):
        for number in range(9):
            records += [record(f"{number}{split}", split, references, dataset=name) for split in ("train", "val")]
    samples, _ = run(tmp_path, records, references_per_question=2, sources=SOURCES)
    rows = samples.select("id", "record", "dataset", "split", "images", "question", "answer").rows()
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    assert digest == "097aade98027347fff1a6129955c9ac5e1d65300eaf0c4abb93245aca175d77f"


def questions_about(name: str, count: int, split: str = "train", **changes: Any) -> list[dict]:
    """Return questions about one image set."""
    records = []
    for number in range(count):
        fields = {"id": f"d/{name}?{number}", "image_set": f"d/{name}", "question": f"{number}?", "kind": "count"}
        records.append(record(name, split, (f"{name} {number}", "both")) | fields | changes)
    return records


def test_own_questions_are_asked_and_those_about_the_same_images_stay_together(tmp_path):
    records = []
    for number in range(5):
        for split in SPLITS:
            records += questions_about(f"{split}{number}", 3, split)
    # the questions of an image set need not be adjacent in the table
    samples, report = run(tmp_path, records[::2] + records[1::2])
    assert report.pairs == {"train": 5, "val": 5, "test": 5}
    assert report.samples == {"train": 30, "val": 30, "test": 30}
    for frame in split_frames(tmp_path / "mixture").values():
        image_sets = frame["image_set"].to_list()
        assert sum(name != next_name for name, next_name in pairwise(image_sets)) == 4
    by_record = dict(samples.select("record", "question").iter_rows())
    assert {record["id"]: record["question"] for record in records} == by_record


def test_images_are_weighted_with_all_of_their_questions(tmp_path):
    records = list(chain.from_iterable(questions_about(str(number), 3) for number in range(40)))
    sources = {"d": {"weight": 1.5, "max_pairs": 20, "references_per_question": 1}}
    samples, report = run(tmp_path, records, sources=sources)
    assert report.pairs["train"] == 20
    uses = samples.with_columns(copy=pl.col("id").str.extract(r"x(\d+)$").fill_null("0"))
    assert uses.group_by("image_set", "copy").agg(pl.len())["len"].unique().to_list() == [3]
    assert uses["copy"].unique().sort().to_list() == ["0", "1"]
    same_images = {f"d/{number}": f"d/{number}" for number in range(40)}
    captions = [record(str(number)) | {"id": name} for number, name in enumerate(same_images)]
    captioned, _ = run(tmp_path, captions, sources=sources)
    assert set(captioned["image_set"]) == set(samples["image_set"]), "as captions of the same images are drawn"


def test_a_dialogue_and_its_images_are_carried_to_every_sample(tmp_path):
    history = [{"question": "A?", "answer": "yes"}]
    no_image = {"images": [], "id": "d/z", "image_set": "d/z"}
    records = questions_about("a", 1, history=history) + questions_about("z", 1, **no_image)
    samples, _ = run(tmp_path, records)
    rows = samples.sort("id").rows(named=True)
    assert [row["history"] for row in rows] == [history, history, [], []]
    assert [len(row["images"]) for row in rows] == [2, 2, 0, 0]


def test_the_papers_datasets_are_counted_beside_the_published_figures(tmp_path):
    _, report = run(tmp_path, [record("a", dataset=name) for name in PAPER_DATASETS])
    assert report.published["clevr_dc"] == {"train": (40_800, None), "train_val": (43_200, None)}
    assert report.published["clevr_change"]["train"] == (67_660, 419_640), "estimated from the share of pairs"
    assert report.published["iedit"]["train_val"] == (3_444, 4_210)
    assert sum(counts["train_val"][0] for counts in report.published.values()) == 145_377
    assert run(tmp_path, [record("a", dataset="iedit")])[1].published == {}


def plain_bits(seed: int, name: str, *numbers: int) -> int:
    """Compute `random_bits` with Python's integers: BLAKE2b with the seed as its key, then the steps of splitmix64."""
    mask = 2**64 - 1
    z = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, key=str(seed).encode()).digest(), "little")
    for number in numbers:
        z = (z + (number + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
    return z


def plain_share(seed: int, name: str, number: int) -> float:
    return (plain_bits(seed, name, number) >> 11) / 2**53


QUESTION, NO_CHANGE_KEPT, EXTRA_COPY, MAX_PAIRS, ORDER, REFERENCE = range(6)  # changing one changes a seed's mixture


def test_every_choice_follows_from_seed_and_id_as_written_down(tmp_path):
    """The test computes questions, pairs without a change, copies, order and references from their definitions."""
    names = [f"d/{n}" for n in range(40)]
    records = [record(str(n), references=tuple("abcde"), types=(NO_CHANGE,) if n % 2 else ()) for n in range(40)]
    settings = {"seed": 3, "references_per_question": 2, "no_change_share": 0.4, "sources": {"d": {"weight": 1.3}}}
    samples, _ = run(tmp_path, records, **settings)
    uses = []
    for number, name in enumerate(names):
        if number % 2 and plain_share(3, name, NO_CHANGE_KEPT) >= 0.4:
            continue
        copies = 1 + (plain_share(3, name, EXTRA_COPY) < 0.3)
        uses += [(plain_bits(3, name, ORDER, copy), name, copy) for copy in range(copies)]
    questions = load_questions(QUESTIONS)["difference"]
    expected = []
    for _, name, copy in sorted(uses):
        question = questions[plain_bits(3, name, QUESTION) % len(questions)]
        bits = [plain_bits(3, name, REFERENCE, number + 2**32 * copy) for number in range(5)]
        sampled_numbers = sorted(range(5), key=lambda number, bits=bits: bits[number])[:2]
        for number in sorted(sampled_numbers):
            suffix = "x1" if copy else ""
            expected.append((f"{name}#{number}{suffix}", name, question, "abcde"[number]))
    assert samples.select("id", "record", "question", "answer").rows() == expected
    assert any(name.endswith("x1") for name in samples["id"])
    assert len(expected) < 2 * 1.3 * 40
    assert run(tmp_path, records, no_change_share=0.0)[1].pairs["train"] == 20
    assert run(tmp_path, records, no_change_share=1.0)[1].pairs["train"] == 40


def test_the_answers_to_each_question_about_a_pair_are_drawn_for_that_question(tmp_path):
    questions = questions_about("a", 12, references=[*"abcde"])
    samples, _ = run(tmp_path, questions, seed=3, references_per_question=1)
    expected = {}
    for question in questions:
        name = question["id"]
        expected[name] = "abcde"[min(range(5), key=lambda number: plain_bits(3, name, REFERENCE, number))]
    assert dict(samples.select("record", "answer").iter_rows()) == expected
    assert len(set(expected.values())) > 1


def test_a_sample_has_every_field_of_its_record(tmp_path):
    samples, _ = run(tmp_path, [record("a", "val", ("x", "y"))])
    sample_of_x, sample_of_y = samples.rows(named=True)
    values = record("a", "val")
    assert sample_of_x == {
        "id": "d/a#0",
        "record": "d/a",
        "image_set": "d/a",
        "dataset": "d",
        "split": "val",
        "images": values["images"],
        "history": [],
        "question": load_questions(QUESTIONS)["difference"][0],
        "answer": "x",
    }
    assert sample_of_y == sample_of_x | {"id": "d/a#1", "answer": "y"}


def test_evaluation_asks_the_first_question_in_the_records_order(tmp_path):
    samples, _ = run(tmp_path, mixed(9, "test", "val"), sources={"d": {"max_pairs": 0, "weight": 0}})
    frames = split_frames(tmp_path / "mixture")
    for split, start in (("test", 0), ("val", 1)):
        assert frames[split]["record"].to_list() == [f"d/{n}" for n in range(start, 18, 2)]
    assert samples["question"].unique().to_list() == [load_questions(QUESTIONS)["difference"][0]]


def test_every_count_of_the_report(tmp_path):
    records = [
        record("a", references=("x", "", "x", "y", "z", "")),
        record("b", references=("", "")),
        record("c", references=("p",), types=(NO_CHANGE,)),
        record("d", "test", ("x", "x", "")),
        record("e", "val", ("x",)),
        record("f", references=("It fell.", "It broke."), dataset="joined"),
    ]
    sources = {"joined": {"samples": "joined"}}
    _, report = run(tmp_path, records, references_per_question=2, no_change_share=0.0, sources=sources)
    kinds = ("pairs_not_sampled", "pairs_without_reference", "empty_references", "repeated_references")
    reasons = (*kinds, "references_over_cap")
    counts_of_d = {
        "pairs": {"train": 1, "val": 1, "test": 1},
        "samples": {"train": 2, "val": 1, "test": 3},
        "left_out": dict.fromkeys(reasons, 1) | {"empty_references": 4},
    }
    counts_of_joined = {
        "pairs": {"train": 1, "val": 0, "test": 0},
        "samples": {"train": 1, "val": 0, "test": 0},
        "left_out": dict.fromkeys(reasons, 0),
    }
    assert report.model_dump() == {
        "stage": "convert",
        "rows_in": 6,
        "rows_out": 7,
        "pairs": {"train": 2, "val": 1, "test": 1},
        "samples": {"train": 3, "val": 1, "test": 3},
        "datasets": {"d": counts_of_d, "joined": counts_of_joined},
        "published": {},
    }
    assert ConvertReport.model_validate_json((tmp_path / "mixture/report.json").read_text()) == report


def test_the_report_counts_questions_by_kind_images_and_turns(tmp_path):
    history = [{"question": "A?", "answer": "yes"}]
    one_image = {"images": record("x")["images"][:1]}
    records = questions_about("a", 2) + questions_about("b", 1, kind=None, history=history, **one_image)
    records += questions_about("c", 1, images=[]) + questions_about("d", 3, "test")
    _, report = run(tmp_path, [*records, record("e", dataset="captions")])
    counts = report.datasets["d"]
    assert list(counts.samples_by_kind.items()) == [("count", 6), ("no kind", 2)], "the most common kind first"
    assert list(counts.samples_by_images.items()) == [("0 images", 2), ("1 image", 2), ("2 images", 4)]
    assert list(counts.samples_by_turns.items()) == [("1 turn", 6), ("2 turns", 2)]
    assert "images 8 (0 images 2, 1 image 2, 2 images 4)" in format_report(report)
    captions = json.loads((tmp_path / "mixture/report.json").read_text())["datasets"]["captions"]
    assert captions.keys() == {"pairs", "samples", "left_out"}


def test_kinds_of_one_count_are_listed_by_name_and_images_and_turns_by_number(tmp_path):
    image = record("x")["images"][0]
    turn = {"question": "A?", "answer": "yes"}
    records = []
    for number in (7, 2, 9, 1, 8, 3, 6, 0, 5, 4):
        fields = {"kind": f"kind {number}", "images": [image] * number, "history": [turn] * number}
        records += questions_about(str(number), 1, **fields)
    _, report = run(tmp_path, records)
    counts = report.datasets["d"]
    assert list(counts.samples_by_kind) == [f"kind {number}" for number in range(10)]
    assert [int(name.partition(" ")[0]) for name in counts.samples_by_images] == list(range(10))
    assert [int(name.partition(" ")[0]) for name in counts.samples_by_turns] == list(range(1, 11))


def test_the_report_lists_the_datasets_by_name_in_any_order_of_the_records(tmp_path):
    names = [f"set{number}" for number in (7, 2, 9, 1, 8, 3, 6, 0, 5, 4)]
    run(tmp_path, [record("a", dataset=name) for name in names])
    assert list(json.loads((tmp_path / "mixture/report.json").read_text())["datasets"]) == sorted(names)


def test_every_split_has_a_folder_and_old_shards_do_not_survive(tmp_path):
    for _ in range(2):
        run(tmp_path, [record("a", "test")])
        assert sorted(path.name for path in (tmp_path / "mixture").iterdir()) == [
            "report.json",
            "retention",
            "test",
            "train",
            "val",
        ]
        assert [path.name for path in (tmp_path / "mixture").glob("*/*")] == ["00000.parquet"]
        (tmp_path / "mixture/test/00009.parquet").write_bytes(b"old")


def test_a_dataset_that_is_only_tested_changes_no_byte_of_what_trains(tmp_path):
    records = mixed(20, *SPLITS)
    tested_records = []
    for number in range(5):
        tested_records += [record(f"{number}{split}", split, dataset="tested") for split in SPLITS]
    shard = tmp_path / "mixture/train/00000.parquet"
    run(tmp_path, records)
    shard_without_tested_records = shard.read_bytes()
    run(tmp_path, tested_records + records)
    assert shard.read_bytes() == shard_without_tested_records


def test_shards_hold_whole_pairs_and_about_as_many_samples_as_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "SHARD_SAMPLES", 4)
    run(tmp_path, [record(str(n), "val", ("a",) * 3) for n in range(5)])
    pairs = {path.name: pl.read_parquet(path)["record"].to_list() for path in (tmp_path / "mixture/val").iterdir()}
    shards = [["d/0"] * 3 + ["d/1"] * 3, ["d/2"] * 3, ["d/3"] * 3, ["d/4"] * 3]
    assert pairs == {f"0000{number}.parquet": shard for number, shard in enumerate(shards)}


@pytest.mark.parametrize("text", ["", "difference: []", "- a", "a: [", "difference: ['']"])
def test_a_file_without_questions_is_refused(tmp_path, text):
    file = tmp_path / "questions.yaml"
    file.write_text(text)
    with raises(ParamsError, "convert.no_questions_by_task", path=file):
        run(tmp_path, [record("a")], questions=file)


def test_a_question_with_the_mark_of_an_image_is_refused(tmp_path):
    file = tmp_path / "questions.yaml"
    file.write_text("difference:\n- What changed?\nedit:\n- What is new in <image>?\n")
    fields = {"path": file, "value": "What is new in <image>?", "mark": "<image>"}
    with raises(ParamsError, "convert.image_mark_in_question", **fields):
        run(tmp_path, [record("a")], questions=file)


@pytest.mark.fault("14")
@pytest.mark.parametrize(
    ("damage", "code", "fields"),
    [
        (pl.DataFrame({"id": ["a"]}).write_parquet, "files.other_columns", {"writer": "validate"}),
        (lambda file: pq.write_table(RECORD_SCHEMA.empty_table(), file), "convert.no_clean_record", {}),
        (lambda file: None, "convert.foreign_datasets", {"names": ["old"]}),
        (Path.unlink, "files.unreadable_stage_output", {"writer": "validate"}),
    ],
    ids=["columns", "empty", "dataset", "gone"],
)
def test_records_of_other_datasets_or_programs_are_refused(tmp_path, damage, code, fields):
    run(tmp_path, [record("a", dataset="old"), record("a", dataset="d")])
    damage(tmp_path / "clean/records/00000.parquet")
    with raises(DataError, code, path=tmp_path / "clean/records", **fields):
        convert(Convert(**LIMITS), {"d": make_entry("pairs", tmp_path)}, tmp_path / "clean", tmp_path / "mixture")


@pytest.mark.parametrize(
    "section",
    [{"references_per_question": 0}, {"no_change_share": -0.1}, {"no_change_share": 1.1}, {"seed": -1}]
    + [{"sources": {"d": fault}} for fault in ({"weight": -1}, {"max_pairs": -1}, {"samples": "two"}, {"weigth": 1})],
)
def test_a_section_that_means_nothing_is_refused(section):
    Convert.model_validate(LIMITS)
    (field,) = section["sources"]["d"] if "sources" in section else section
    with pytest.raises(ValueError, match=field):
        Convert.model_validate(LIMITS | section)


def test_a_mixture_without_test_pairs_of_the_gates_dataset_is_refused(tmp_path):
    run(tmp_path, [record("1"), record("2", "test", dataset="other")])
    require_test_pairs(tmp_path / "mixture", "other/test")
    folder = tmp_path / "mixture/test"
    with raises(DataError, "ingest.no_test_pair", path=folder, dataset="d", protocol="d/test"):
        require_test_pairs(tmp_path / "mixture", "d/test")


def test_a_training_is_refused_by_a_mixture_without_any_test_pair(tmp_path):
    run(tmp_path, [record("1"), record("2", "val")])
    with raises(DataError, "ingest.no_test_pair", dataset="d"):
        require_test_pairs(tmp_path / "mixture", "d/test")


def test_a_machine_that_has_only_the_training_split_may_train(tmp_path):
    (tmp_path / "mixture/train").mkdir(parents=True)
    require_test_pairs(tmp_path / "mixture", "d/test")


def test_the_test_split_of_a_retention_dataset_has_a_folder_of_its_own(tmp_path):
    records = [record(f"{split}{number}", split) for split in SPLITS for number in range(2)]
    records += [record(f"{split}{number}", split, dataset="kept") for split in SPLITS for number in range(3)]
    samples, report = run(tmp_path, records)
    frames = split_frames(tmp_path / "mixture")
    assert frames["retention"]["record"].to_list() == ["kept/test0", "kept/test1", "kept/test2"]
    assert set(frames["test"]["dataset"]) == set(frames["val"]["dataset"]) == {"d"}
    assert frames["train"]["dataset"].to_list().count("kept") == 3, "it trains, too, unless train_on says otherwise"
    assert report.datasets["kept"].left_out["val_pairs_of_retention"] == 3
    assert report.datasets["kept"].samples == {"train": 3, "val": 0, "test": 3}
    assert "val_pairs_of_retention" not in report.datasets["d"].left_out
    assert samples.height == 6 + 6
