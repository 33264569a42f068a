import hashlib
import re
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE, RECORD_SCHEMA, SAMPLE_SCHEMA, SPLITS
from m3diff.settings.section import ParamsError
from m3diff.stages.convert import stage
from m3diff.stages.convert.mixture import id_keys, random_bits, uniform
from m3diff.stages.convert.params import Convert
from m3diff.stages.convert.stage import ConvertReport, convert, load_questions
from tests.layouts import make_entry

QUESTIONS = Path("profiles/questions.yaml")
READERS = {"edits": "iedit", "birds": "birds_to_words"}
"""Readers of datasets that are called so; `pairs` of all others."""


def record(name: str, split: str = "train", references: tuple[str, ...] = ("it moved",), types=("color",), dataset="d"):
    return {
        "id": f"{dataset}/{name}",
        "dataset": dataset,
        "split": split,
        "scene": f"{dataset}/{name}",
        "before": f"{name}.png",
        "after": f"{name}_2.png",
        "before_sha256": hashlib.sha256(f"{name}.png".encode()).digest(),
        "after_sha256": hashlib.sha256(f"{name}_2.png".encode()).digest(),
        "references": list(references),
        "change_types": list(types),
        "source": f"row {name}",
    }


def run(folder: Path, records: list[dict], **changes) -> tuple[pl.DataFrame, ConvertReport]:
    """Convert records; the samples of all splits in the shards' order, and the report."""
    (folder / "clean").mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records, schema=RECORD_SCHEMA), folder / "clean/records.parquet")
    fields = {"seed": 7, "questions": QUESTIONS, "references_per_pair": 5, "no_change_share": 1.0, "sources": {}}
    names = dict.fromkeys(record["dataset"] for record in records)
    entries = {name: make_entry(READERS.get(name, "pairs"), folder) for name in names}
    report = convert(Convert.model_validate(fields | changes), entries, folder / "clean", folder / "mixture")
    shards = [shard for split in SPLITS for shard in sorted((folder / "mixture" / split).iterdir())]
    assert all(pq.read_schema(shard).equals(SAMPLE_SCHEMA) for shard in shards)
    samples = pl.concat([pl.read_parquet(shard) for shard in shards])
    assert all((samples["split"] == split).all() for split, samples in split_frames(folder / "mixture").items())
    assert samples.height == report.rows_out == sum(report.samples.values())
    assert samples["id"].is_unique().all()
    changes_of_pair = (samples["pair"] != samples["pair"].shift()).sum()
    assert changes_of_pair == samples["pair"].n_unique() - 1 or any("x1" in name for name in samples["id"])
    return samples, report


def split_frames(mixture: Path) -> dict[str, pl.DataFrame]:
    return {
        split: pl.read_parquet(mixture / split / "*.parquet") for split in SPLITS if any((mixture / split).iterdir())
    }


def test_a_source_may_have_a_limit_of_references_of_its_own(tmp_path):
    names, references = ("all", "three", "one", "plain"), tuple(f"r{n}" for n in range(6))
    records = [record(f"{name}/{n}", references=references, dataset=name) for name in names for n in range(4)]
    own = {"all": {"references_per_pair": "all"}, "three": {"references_per_pair": 3}}
    sources = own | {"one": {"samples": "one", "references_per_pair": 5}}
    _, report = run(tmp_path, records, references_per_pair=2, sources=sources)
    assert {name: of.samples["train"] for name, of in report.datasets.items()} == {
        "all": 24,
        "three": 12,
        "one": 4,
        "plain": 8,
    }
    assert report.datasets["three"].left_out["references_over_cap"] == 12
    assert report.datasets["all"].left_out["references_over_cap"] == 0


def test_weights_caps_and_kinds_of_samples_by_source(tmp_path):
    records = [record(str(n), references=("It fell.", "a b"), dataset=name) for name in "abcd" for n in range(100)]
    sources = {
        "a": {"weight": 0.4, "task": "edit"},
        "b": {"weight": 2, "samples": "one"},
        "c": {"max_pairs": 7},
        "d": {"samples": "joined", "task": "detail"},
    }
    samples, report = run(tmp_path, records, sources=sources)
    assert 25 < report.datasets["a"].pairs["train"] < 55
    assert report.datasets["a"].left_out["pairs_not_sampled"] == 100 - report.datasets["a"].pairs["train"]
    assert report.datasets["b"].samples["train"] == 200
    assert set(samples.filter(dataset="b")["reference"]) == {"It fell.", "a b"}
    assert report.datasets["c"].pairs["train"] == 7
    assert samples.filter(dataset="d")["reference"].to_list() == ["It fell. a b."] * 100
    assert set(samples.filter(dataset="a")["question"]) <= set(load_questions(QUESTIONS)["edit"])


def test_old_shards_do_not_survive(tmp_path):
    run(tmp_path, [record("a")])
    (tmp_path / "mixture/train/00009.parquet").write_bytes(b"old")
    samples, _ = run(tmp_path, [record("a")])
    assert samples.height == 1


def test_unknown_sources_and_tasks_are_named_together(tmp_path):
    sources = {"nobody": {}, "d": {"task": "poem"}}
    with pytest.raises(ParamsError, match=r"(?s)nobody: no such dataset; there are d.*d: no questions for task 'poem'"):
        run(tmp_path, [record("a")], sources=sources)


def test_random_numbers_are_fixed_for_ever_and_even():
    keys = id_keys(11093, ["minichange/000000.png", "minichange/000001.png"])
    assert keys.to_list() == [14029301721840921230, 2976796702615297249]
    many = id_keys(1, map(str, range(20_000)))
    parts = uniform(random_bits(many, 3))
    assert 0 <= parts.min() < 0.001 < 0.999 < parts.max() < 1
    assert abs(parts.mean() - 0.5) < 0.01
    assert abs(((random_bits(many, 1).to_numpy() % 6) == 0).mean() - 1 / 6) < 0.01


def test_the_papers_datasets_are_counted_beside_the_published_figures(tmp_path, capsys):
    names = ("omnidiff_real", "omnidiff_render", "spot_the_diff", "iedit", "birds_to_words", "clevr_change", "clevr_dc")
    _, report = run(tmp_path, [record("a", dataset=name) for name in names])
    assert report.published["clevr_dc"].train_val == (43_200, None)
    assert sum(given.train_val[0] for given in report.published.values()) == 145_377
    told = capsys.readouterr().out
    assert re.search(r"iedit +1 +1 +3,061 / 3,061 +3,444 / 4,210\n", told)
    assert told.endswith("145k / 896k\n")
    _, report = run(tmp_path, [record("a", dataset="iedit")])
    assert report.published == {}
    assert capsys.readouterr().out == ""


def plain_bits(seed: int, name: str, *numbers: int) -> int:
    """What `random_bits` promises, in whole numbers of Python: blake2b keyed by the seed, then splitmix64's steps."""
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


QUESTION, NO_CHANGE_KEPT, EXTRA_COPY, MAX_PAIRS, ORDER, REFERENCE = range(6)
"""The numbers that decide: changing one changes the mixture that a seed gives."""


def test_every_choice_follows_from_seed_and_id_as_written_down(tmp_path):
    """Questions, kept no-change pairs, second uses, order and references, each computed by hand from the definition."""
    names = [f"d/{n}" for n in range(40)]
    records = [record(str(n), references=tuple("abcde"), types=(NO_CHANGE,) if n % 2 else ()) for n in range(40)]
    settings = {"seed": 3, "references_per_pair": 2, "no_change_share": 0.4, "sources": {"d": {"weight": 1.3}}}
    samples, _ = run(tmp_path, records, **settings)
    uses = []
    for number, name in enumerate(names):
        if number % 2 and plain_share(3, name, NO_CHANGE_KEPT) >= 0.4:
            continue
        copies = 1 + (plain_share(3, name, EXTRA_COPY) < 0.3)
        uses += [(plain_bits(3, name, ORDER, copy), name, copy) for copy in range(copies)]
    questions, wanted = load_questions(QUESTIONS)["difference"], []
    for _, name, copy in sorted(uses):
        question = questions[plain_bits(3, name, QUESTION) % len(questions)]
        by_bits = sorted(range(5), key=lambda k, name=name, copy=copy: plain_bits(3, name, REFERENCE, k + 2**32 * copy))
        for k in sorted(by_bits[:2]):
            wanted.append((f"{name}#{k}" + ("x1" if copy else ""), name, question, "abcde"[k]))
    assert samples.select("id", "pair", "question", "reference").rows() == wanted
    assert any(name.endswith("x1") for name in samples["id"])
    assert len(wanted) < 2 * 1.3 * 40


def test_the_pairs_of_a_limited_source_are_those_of_the_lowest_numbers(tmp_path):
    samples, report = run(tmp_path, [record(str(n)) for n in range(30)], sources={"d": {"max_pairs": 4}})
    wanted = sorted((f"d/{n}" for n in range(30)), key=lambda name: plain_bits(7, name, MAX_PAIRS))[:4]
    assert set(samples["pair"]) == set(wanted)
    assert report.datasets["d"].left_out["pairs_not_sampled"] == 26


def test_a_sample_has_every_field_of_its_record(tmp_path):
    samples, _ = run(tmp_path, [record("a", "val", ("x", "y"))])
    first, second = samples.rows(named=True)
    assert first == {
        "id": "d/a#0",
        "pair": "d/a",
        "dataset": "d",
        "split": "val",
        "before": "a.png",
        "after": "a_2.png",
        "before_sha256": hashlib.sha256(b"a.png").digest(),
        "after_sha256": hashlib.sha256(b"a_2.png").digest(),
        "question": load_questions(QUESTIONS)["difference"][0],
        "reference": "x",
    }
    assert second == first | {"id": "d/a#1", "reference": "y"}


def test_evaluation_asks_the_first_question_in_the_records_order(tmp_path):
    records = [record(str(n), split, ("x",)) for n in range(9) for split in ("test", "val")]
    for number, each in enumerate(records):
        each["id"] = f"d/{number}"
    samples, _ = run(tmp_path, records, sources={"d": {"max_pairs": 0, "weight": 0}})
    frames = split_frames(tmp_path / "mixture")
    assert frames["test"]["pair"].to_list() == [f"d/{n}" for n in range(0, 18, 2)]
    assert frames["val"]["pair"].to_list() == [f"d/{n}" for n in range(1, 18, 2)]
    assert samples["question"].unique().to_list() == [load_questions(QUESTIONS)["difference"][0]]


def test_a_weight_of_nothing_or_no_pairs_trains_nothing(tmp_path):
    for source in ({"weight": 0}, {"max_pairs": 0}):
        samples, report = run(tmp_path, [record("a"), record("b", "test")], sources={"d": source})
        assert samples["pair"].to_list() == ["d/b"]
        assert report.datasets["d"].left_out["pairs_not_sampled"] == 1


def test_a_share_of_no_change_pairs_of_nothing_or_all(tmp_path):
    records = [record(str(n), types=(NO_CHANGE,)) for n in range(50)] + [record("c")]
    assert run(tmp_path, records, no_change_share=0.0)[1].pairs["train"] == 1
    assert run(tmp_path, records, no_change_share=1.0)[1].pairs["train"] == 51


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
    samples, report = run(tmp_path, records, references_per_pair=2, no_change_share=0.0, sources=sources)
    assert report.model_dump() == {
        "stage": "convert",
        "rows_in": 6,
        "rows_out": 7,
        "pairs": {"train": 2, "val": 1, "test": 1},
        "samples": {"train": 3, "val": 1, "test": 3},
        "datasets": {
            "d": {
                "pairs": {"train": 1, "val": 1, "test": 1},
                "samples": {"train": 2, "val": 1, "test": 3},
                "left_out": {
                    "pairs_not_sampled": 1,
                    "pairs_without_reference": 1,
                    "empty_references": 4,
                    "repeated_references": 1,
                    "references_over_cap": 1,
                },
            },
            "joined": {
                "pairs": {"train": 1, "val": 0, "test": 0},
                "samples": {"train": 1, "val": 0, "test": 0},
                "left_out": {
                    "pairs_not_sampled": 0,
                    "pairs_without_reference": 0,
                    "empty_references": 0,
                    "repeated_references": 0,
                    "references_over_cap": 0,
                },
            },
        },
        "published": {},
    }
    assert ConvertReport.model_validate_json((tmp_path / "mixture/report.json").read_text()) == report
    assert samples.filter(dataset="joined")["reference"].to_list() == ["It fell. It broke."]
    assert samples.filter(dataset="joined")["id"].to_list() == ["joined/f#0"]


def test_joined_references_end_their_sentences_once(tmp_path):
    records = [record("a", references=("a b", "c.", "a b", "", "d...")), record("b", references=("one",))]
    samples, _ = run(tmp_path, records, sources={"d": {"samples": "joined", "weight": 2}})
    joined = {row["id"]: row["reference"] for row in samples.iter_rows(named=True)}
    assert joined == {f"d/{name}#0{use}": text for name, text in (("a", "a b. c. d..."), ("b", "one."))
                      for use in ("", "x1")}  # fmt: skip


def test_the_dataset_s_own_task_is_asked_unless_the_source_names_one(tmp_path):
    records = [record(str(n), dataset=name) for name in ("edits", "birds", "own") for n in range(30)]
    samples, _ = run(tmp_path, records, sources={"birds": {"task": "detail"}})
    questions = load_questions(QUESTIONS)
    for name, task in (("edits", "edit"), ("birds", "detail"), ("own", "difference")):
        assert set(samples.filter(dataset=name)["question"]) == set(questions[task])


def test_every_split_has_a_folder_and_an_empty_one_no_shard(tmp_path):
    run(tmp_path, [record("a", "test")])
    assert sorted(path.name for path in (tmp_path / "mixture").iterdir()) == ["report.json", "test", "train", "val"]
    assert [path.name for path in (tmp_path / "mixture").glob("*/*")] == ["00000.parquet"]


def test_a_dataset_that_is_only_tested_changes_no_byte_of_what_trains(tmp_path):
    records = [record(str(n), split) for n in range(20) for split in ("train", "val", "test")]
    for number, each in enumerate(records):
        each["id"] = f"d/{number}"

    def trained() -> list[bytes]:
        return [(tmp_path / f"mixture/{split}/00000.parquet").read_bytes() for split in ("train", "val")]

    run(tmp_path, records)
    first = trained()
    run(tmp_path, [record(str(n), "test", dataset="another") for n in range(5)] + records)
    assert trained() == first
    assert len(first) == 2


def test_shards_hold_whole_pairs_and_about_as_many_samples_as_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "SHARD_SAMPLES", 4)
    run(tmp_path, [record(str(n), "val", ("a",) * 3) for n in range(5)])
    shards = sorted((tmp_path / "mixture/val").iterdir())
    assert [path.name for path in shards] == [f"0000{number}.parquet" for number in range(4)]
    pairs = [pl.read_parquet(path)["pair"].to_list() for path in shards]
    assert pairs == [["d/0"] * 3 + ["d/1"] * 3, ["d/2"] * 3, ["d/3"] * 3, ["d/4"] * 3]


MARK = r"edit: 'What is new in <image>\?' has <image>, the mark of an image's place"


@pytest.mark.parametrize(
    ("text", "words"),
    [(text, "expected questions by task") for text in ("", "difference: []", "- a", "a: [", "difference: ['']")]
    + [("difference:\n- What changed?\nedit:\n- What is new in <image>?\n", MARK)],
)
def test_a_file_without_questions_or_with_an_image_in_one_is_refused(tmp_path, text, words):
    (tmp_path / "questions.yaml").write_text(text)
    with pytest.raises(ParamsError, match=rf"questions\.yaml: {words}"):
        run(tmp_path, [record("a")], questions=tmp_path / "questions.yaml")


def half(file: Path) -> None:
    file.write_bytes(b"half")


def other_columns(file: Path) -> None:
    pl.DataFrame({"id": ["a"]}).write_parquet(file)


def empty(file: Path) -> None:
    pq.write_table(RECORD_SCHEMA.empty_table(), file)


@pytest.mark.fault("14")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (half, r"(?s:cannot be read.*; run `m3diff validate` again)"),
        (other_columns, "not the columns that validate writes; run `m3diff validate` again"),
        (empty, r"holds no record, all are in quarantine\.parquet"),
        (lambda file: None, r"has records of old, not in ingest\.datasets"),
    ],
    ids=["half", "columns", "empty", "dataset"],
)
def test_records_that_validate_did_not_write_for_these_datasets_are_refused(tmp_path, damage, words):
    run(tmp_path, [record("a", dataset="old"), record("a", dataset="d")])
    damage(tmp_path / "clean/records.parquet")
    with pytest.raises(DataError, match=rf"records\.parquet: {words}"):
        convert(Convert(**LIMITS), {"d": make_entry("pairs", tmp_path)}, tmp_path / "clean", tmp_path / "mixture")


LIMITS = {"seed": 1, "questions": QUESTIONS, "references_per_pair": 1, "no_change_share": 1, "sources": {}}


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("references_per_pair", {"references_per_pair": 0}),
        ("no_change_share", {"no_change_share": -0.1}),
        ("no_change_share", {"no_change_share": 1.1}),
        *((next(iter(source)), {"sources": {"d": source}})
          for source in ({"weight": -1}, {"max_pairs": -1}, {"samples": "two"}, {"weigth": 1})),
    ],
)  # fmt: skip
def test_a_section_that_means_nothing_is_refused(field, given):
    Convert.model_validate(LIMITS)
    with pytest.raises(ValueError, match=field):
        Convert.model_validate(LIMITS | given)
