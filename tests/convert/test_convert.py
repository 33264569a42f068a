import re
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.convert import stage
from components.convert.sampling import draw, id_keys, uniform
from components.convert.stage import ConvertReport, convert, load_tasks
from components.convert.params import Convert
from components.section import ParamsError
from components.records import NO_CHANGE, RECORD_SCHEMA, SAMPLE_SCHEMA, DataError

TEMPLATES = Path("profiles/questions.yaml")


def record(name: str, split: str = "train", captions: tuple[str, ...] = ("it moved",), types=("color",), dataset="d"):
    return {
        "id": f"{dataset}/{name}",
        "dataset": dataset,
        "split": split,
        "scene": f"{dataset}/{name}",
        "before": f"{name}.png",
        "after": f"{name}_2.png",
        "captions": list(captions),
        "change_types": list(types),
        "source": f"row {name}",
    }


def run(folder: Path, records: list[dict], **changes) -> tuple[pl.DataFrame, ConvertReport]:
    """Convert records; the samples of all splits in the shards' order, and the report."""
    (folder / "clean").mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records, schema=RECORD_SCHEMA), folder / "clean/records.parquet")
    fields = {"seed": 7, "templates": TEMPLATES, "captions_per_pair": 5, "no_change_share": 1.0, "sources": {}}
    report = convert(Convert.model_validate(fields | changes), folder / "clean", folder / "mixture")
    shards = sorted((folder / "mixture/samples").iterdir())
    assert all(pq.read_schema(shard).equals(SAMPLE_SCHEMA) for shard in shards)
    samples = pl.concat([pl.read_parquet(shard) for shard in shards])
    assert samples.height == report.rows_out == sum(report.samples.values())
    assert samples["id"].is_unique().all()
    changes_of_pair = (samples["pair"] != samples["pair"].shift()).sum()
    assert changes_of_pair == samples["pair"].n_unique() - 1 or any("x1" in name for name in samples["id"])
    return samples, report


def test_training_leaves_out_empty_and_repeated_captions_and_evaluation_keeps_all(tmp_path):
    captions = ("a", "", "a", "b")
    samples, report = run(tmp_path, [record(split, split, captions) for split in ("train", "val", "test")])
    answers = {key: list(rows["answer"]) for (key,), rows in samples.group_by("split", maintain_order=True)}
    assert answers == {"train": ["a", "b"], "val": list(captions), "test": list(captions)}
    assert samples.filter(split="train")["id"].to_list() == ["d/train#0", "d/train#3"]
    left_out = report.datasets["d"].left_out
    assert (left_out["empty_captions"], left_out["repeated_captions"]) == (1, 1)


def test_a_pair_with_only_empty_captions_is_tested_but_trains_nothing(tmp_path):
    samples, report = run(tmp_path, [record("a", "train", ("",)), record("b", "test", ("",))])
    assert samples.select("id", "answer").rows() == [("d/b#0", "")]
    assert report.datasets["d"].left_out["pairs_without_caption"] == 1
    assert report.pairs == {"train": 0, "val": 0, "test": 1}


def test_the_cap_draws_different_captions_of_different_pairs(tmp_path):
    captions = tuple("abcdefgh")
    samples, report = run(tmp_path, [record(str(n), captions=captions) for n in range(50)], captions_per_pair=2)
    per_pair = samples.group_by("pair", maintain_order=True).agg("answer")["answer"].to_list()
    assert {len(answers) for answers in per_pair} == {2}
    assert all(answers == sorted(answers) for answers in per_pair)
    assert {letter for answers in per_pair for letter in answers} == set(captions)
    assert report.datasets["d"].left_out["captions_over_cap"] == 300


def test_no_change_pairs_are_thinned_in_training_only(tmp_path):
    records = [record(f"{split}{n}", split, types=(NO_CHANGE,)) for split in ("train", "test") for n in range(400)]
    records += [record(f"change{n}") for n in range(100)]
    samples, report = run(tmp_path, records, no_change_share=0.3)
    kept = samples.filter(pl.col("pair").str.starts_with("d/train"))
    assert 90 < kept.height < 150
    assert report.pairs == {"train": 100 + kept.height, "val": 0, "test": 400}


def test_seed_decides_everything_and_other_records_nothing(tmp_path):
    records = [record(str(n), captions=tuple("abcdefgh"), types=(NO_CHANGE,)) for n in range(60)]
    settings = {"captions_per_pair": 3, "no_change_share": 0.5}
    first, _ = run(tmp_path, records, **settings)
    again, _ = run(tmp_path, records, **settings)
    other, _ = run(tmp_path, records, seed=8, **settings)
    fewer, _ = run(tmp_path, records[:30], **settings)
    assert first.equals(again)
    assert not first.equals(other)
    names = [row["id"] for row in records[:30]]
    assert first.filter(pl.col("pair").is_in(names)).equals(fewer)


def test_all_captions_of_a_pair_share_one_of_many_questions(tmp_path):
    samples, _ = run(tmp_path, [record(str(n), captions=("a", "b")) for n in range(80)])
    assert samples.group_by("pair").agg(pl.col("question").n_unique())["question"].unique().to_list() == [1]
    assert set(samples["question"]) == set(load_tasks(TEMPLATES)["difference"])


def test_weights_caps_and_kinds_of_samples_by_source(tmp_path):
    records = [record(str(n), captions=("It fell.", "a b"), dataset=name) for name in "abcd" for n in range(100)]
    sources = {
        "a": {"weight": 0.4, "task": "edit"},
        "b": {"weight": 2, "samples": "one"},
        "c": {"max_pairs": 7},
        "d": {"samples": "joined", "task": "detail"},
    }
    samples, report = run(tmp_path, records, sources=sources)
    assert 25 < report.datasets["a"].pairs["train"] < 55
    assert report.datasets["a"].left_out["pairs_not_drawn"] == 100 - report.datasets["a"].pairs["train"]
    assert report.datasets["b"].samples["train"] == 200
    assert set(samples.filter(dataset="b")["answer"]) == {"It fell.", "a b"}
    assert report.datasets["c"].pairs["train"] == 7
    assert samples.filter(dataset="d")["answer"].to_list() == ["It fell. a b."] * 100
    assert set(samples.filter(dataset="a")["question"]) <= set(load_tasks(TEMPLATES)["edit"])


def test_shards_are_cut_between_pairs_and_read_by_duckdb_and_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(stage, "SHARD_SAMPLES", 10)
    samples, _ = run(tmp_path, [record(str(n), captions=("a", "b", "c")) for n in range(20)] + [record("t", "test")])
    shards = sorted((tmp_path / "mixture/samples").glob("train-*.parquet"))
    assert len(shards) == 6
    pairs = [set(pl.read_parquet(shard)["pair"]) for shard in shards]
    assert sum(map(len, pairs)) == len(set.union(*pairs)) == 20
    pattern = f"{tmp_path}/mixture/samples/train-*.parquet"
    assert duckdb.sql(f"select count(*), count(distinct pair) from '{pattern}'").fetchall() == [(60, 20)]
    loaded = datasets.load_dataset(str(tmp_path / "mixture/samples"), cache_dir=str(tmp_path / "cache"))
    assert {split: loaded[split].num_rows for split in loaded} == {"train": 60, "test": 1}
    assert loaded["train"]["id"][:] == samples.filter(split="train")["id"].to_list()


def test_old_shards_do_not_survive(tmp_path):
    run(tmp_path, [record("a")])
    (tmp_path / "mixture/samples/train-00009.parquet").write_bytes(b"old")
    samples, _ = run(tmp_path, [record("a")])
    assert samples.height == 1


def test_unknown_sources_and_tasks_are_named_together(tmp_path):
    sources = {"nobody": {}, "d": {"task": "poem"}}
    with pytest.raises(ParamsError, match=r"(?s)nobody: no such dataset; there are d.*d: no questions for task 'poem'"):
        run(tmp_path, [record("a")], sources=sources)


@pytest.mark.parametrize("text", ["", "difference: []", "difference: [1]", "- a", "a: [", "difference: ['']"])
def test_a_template_file_without_questions_is_refused(tmp_path, text):
    (tmp_path / "templates.yaml").write_text(text)
    with pytest.raises(ParamsError, match=r"templates\.yaml"):
        run(tmp_path, [record("a")], templates=tmp_path / "templates.yaml")


def test_records_that_validate_did_not_write_are_refused(tmp_path):
    run(tmp_path, [record("a")])
    (tmp_path / "clean/records.parquet").write_bytes(b"half")
    with pytest.raises(DataError, match="run `m3diff validate` again"):
        convert(
            Convert(seed=1, templates=TEMPLATES, captions_per_pair=1, no_change_share=1, sources={}),
            tmp_path / "clean",
            tmp_path / "mixture",
        )


def test_a_clean_set_without_records_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no record, all are in quarantine\.parquet"):
        run(tmp_path, [])


def test_draws_are_fixed_for_ever_and_even():
    keys = id_keys(11093, ["minichange/000000.png", "minichange/000001.png"])
    assert keys.to_list() == [14029301721840921230, 2976796702615297249]
    many = id_keys(1, map(str, range(20_000)))
    parts = uniform(draw(many, 3))
    assert 0 <= parts.min() < 0.001 < 0.999 < parts.max() < 1
    assert abs(parts.mean() - 0.5) < 0.01
    assert abs(((draw(many, 1).to_numpy() % 6) == 0).mean() - 1 / 6) < 0.01


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
