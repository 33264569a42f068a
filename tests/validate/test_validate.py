import subprocess
import sys
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from components.records import RECORD_SCHEMA, DataError
from tests.layouts import edit_json, run_ingest, run_validate, save_picture, write_clevr

KEY = "CLEVR_default_000005.png"


@pytest.fixture
def raw(tmp_path) -> Path:
    return write_clevr(tmp_path / "raw")


def quarantine(folder: Path) -> dict[str, str]:
    """Reason by id, after checking that no row was lost."""
    frame = pl.read_parquet(folder / "clean/quarantine.parquet")
    clean = pl.read_parquet(folder / "clean/records.parquet")
    assert clean.height + frame.height == pq.read_metadata(folder / "records/records.parquet").num_rows
    return dict(frame.select("id", "reason").iter_rows())


def ingest_and_validate(raw: Path, **changes) -> dict[str, str]:
    run_ingest(raw)
    run_validate(raw.parent, **changes)
    return quarantine(raw.parent)


def test_sound_data_passes_whole_with_the_record_schema(raw):
    assert ingest_and_validate(raw, max_quarantined_share=0.0) == {}
    table = pq.read_table(raw.parent / "clean/records.parquet")
    assert table.schema.equals(RECORD_SCHEMA)
    before = pq.read_table(raw.parent / "records/records.parquet").drop_columns("fault")
    assert table.to_pylist() == before.to_pylist()


def test_a_missing_image_is_quarantined_with_its_path(raw):
    (raw / "sc_images/CLEVR_semantic_000008.png").unlink()
    reasons = ingest_and_validate(raw)
    assert reasons.keys() == {"mini/000008.png"}
    assert reasons["mini/000008.png"].endswith("sc_images/CLEVR_semantic_000008.png is missing; restore the file")


@pytest.mark.parametrize("keep", [0, 20, 60, -13, -1])
def test_a_truncated_png_is_quarantined_with_every_pair_it_serves(raw, keep):
    path = raw / "images" / KEY
    path.write_bytes(path.read_bytes()[:keep])
    reasons = ingest_and_validate(raw)
    assert reasons.keys() == {"mini/000005.png", "mini/000005.png_n"}
    assert all(f"{KEY} " in reason and "restore the file" in reason for reason in reasons.values())


def test_an_empty_caption_is_kept_as_a_reference(raw):
    edit_json(raw / "change_captions.json", lambda captions: captions[KEY].append(""))
    assert ingest_and_validate(raw) == {}
    clean = pl.read_parquet(raw.parent / "clean/records.parquet").filter(id="mini/000005.png")
    assert clean["captions"].to_list() == [["the cube of 000005 turned red", "it became red", ""]]


@pytest.mark.parametrize(
    "separator", ["\u2028", "\u2029", "\r\n", "\v", "\f", "\x85", "\x1c", "\x00", "\ufeff", " \t "]
)
def test_a_separator_in_a_caption_becomes_one_space(raw, separator):
    edit_json(raw / "change_captions.json", lambda captions: captions.update({KEY: [f"the{separator}cube "]}))
    run_ingest(raw)
    report = run_validate(raw.parent)
    assert report.captions_respaced == 1
    assert quarantine(raw.parent) == {}
    clean = pl.read_parquet(raw.parent / "clean/records.parquet").filter(id="mini/000005.png")
    assert clean["captions"].to_list() == [["the cube"]]


def test_a_scene_in_two_splits_stays_in_the_test_set_only(raw):
    edit_json(raw / "splits.json", lambda splits: splits["train"].append(12))
    reasons = ingest_and_validate(raw)
    assert reasons.keys() == {"mini/000012.png", "mini/000012.png_n"}
    assert all("occurs more than once" in r and "also in a higher split" in r for r in reasons.values())
    clean = pl.read_parquet(raw.parent / "clean/records.parquet").filter(scene="mini/000012")
    assert clean["split"].to_list() == ["test", "test"]


def test_markup_and_endless_captions_are_quarantined(raw):
    edit_json(
        raw / "change_captions.json",
        lambda captions: captions.update({KEY: ["see <b>this</b>"], "CLEVR_default_000009.png": ["x" * 10_000_000]}),
    )
    reasons = ingest_and_validate(raw)
    assert reasons == {
        "mini/000005.png": "captions: 1 hold HTML or a special token; write plain text",
        "mini/000009.png": "captions: one has 10000000 characters, more than validate.max_caption_chars = 2000",
    }


def test_above_the_threshold_the_data_is_refused_and_the_quarantine_is_there(raw):
    (raw / "sc_images/CLEVR_semantic_000008.png").unlink()
    run_ingest(raw)
    with pytest.raises(
        DataError, match=r"1 of 12 rows are bad, more than validate.max_quarantined_share = 0.05"
    ) as refused:
        run_validate(raw.parent, max_quarantined_share=0.05)
    assert "CLEVR_default_000008.png: after: " in str(refused.value)
    assert list(quarantine(raw.parent)) == ["mini/000008.png"]
    assert (raw.parent / "clean/docs/results.html").is_file()


def test_declared_counts_are_held_against_the_records(raw):
    run_ingest(raw)
    run_validate(raw.parent, expected_pairs={"mini": {"train": 6, "test": 4}})
    with pytest.raises(DataError, match=r"mini train: 6 pairs, but 7 are declared"):
        run_validate(raw.parent, expected_pairs={"mini": {"train": 7}})


def test_records_of_another_program_are_refused(raw):
    run_ingest(raw)
    path = raw.parent / "records/records.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="run `m3diff ingest` again"):
        run_validate(raw.parent)
    pl.DataFrame({"id": ["a"]}).write_parquet(path)
    with pytest.raises(DataError, match="not the columns that ingest writes"):
        run_validate(raw.parent)


def test_pages_are_private_and_bear_no_time_path_or_random_id(raw):
    save_picture(raw / "images" / KEY, 5).write_bytes(b"no image")
    ingest_and_validate(raw)
    for page in (raw.parent / "clean/docs").iterdir():
        text = page.read_text("utf-8")
        for foreign in ("//", "<script", "<img", "src=", "great_expectations.io", str(raw.parent)):
            assert foreign not in text, (page.name, foreign)
    assert "does not decode" in (raw.parent / "clean/docs/results.html").read_text("utf-8")


def test_every_output_is_equal_in_another_process_with_and_without_memory(raw):
    (raw / "sc_images/CLEVR_semantic_000008.png").write_bytes(b"no image")
    ingest_and_validate(raw)
    code = (
        "from pathlib import Path; from tests.layouts import run_validate\n"
        f"if __name__ == '__main__': run_validate(Path({str(raw.parent)!r}), image_cache=Path({str(raw / 'other')!r}))"
    )
    outputs = sorted(path for path in (raw.parent / "clean").rglob("*") if path.is_file())
    first = [path.read_bytes() for path in outputs]
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert first == [path.read_bytes() for path in outputs]
