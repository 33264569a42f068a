"""What the plan says will train, split by split: against published counts, and against what convert writes of a mixture
that was counted by hand."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from m3diff.commands.plan.plan import SourceCount, Workload, counted_workload, make_plan, published_workload
from m3diff.commands.plan.words import print_plan
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Published, SplitCount
from m3diff.settings.load import load_params
from m3diff.stages.convert.stage import ConvertReport, convert
from m3diff.stages.ingest.params import DatasetEntry
from tests.commands.plan.conftest import IMAGE_TOKENS, ToySettings, compute_section, convert_section, train_section
from tests.commands.plan.test_workload import entries
from tests.layouts import make_entry, run_ingest, run_validate, save_picture, write_birds, write_json
from tests.toy import REPOSITORY

MANY = [f"car {number} left" for number in range(14)]
SPOT = {
    "train": [("1", ["a man left", "it is dark", "a man left"]), ("2", [""]), ("3", ["the suv is gone", ""])],
    "val": [("4", MANY), ("5", ["", ""]), ("6", ["it is dark"])],
    "test": [("7", ["nothing"])],
}
BIRDS = [("11", "12", "train", text) for text in ("one is red", "one is small", "one is red")]
BIRDS += [("13", "14", "val", "they differ"), ("15", "16", "test", "they are alike")]
COUNTED = {
    "spot_the_diff": Published(
        "spot_the_diff",
        "",
        train=SplitCount(3, 6, empty=2, repeated=1, wordless=1),
        val=SplitCount(3, 17, empty=2, wordless=1),
        test=SplitCount(1, 1),
    ),
    "birds_to_words": Published("birds_to_words", "", SplitCount(1, 3, repeated=1), SplitCount(1, 1), SplitCount(1, 1)),
}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both datasets on disk, their files' counts in the place of the published ones."""
    for name, counts in COUNTED.items():
        monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], published=(counts,)))
    spot, birds = tmp_path / "spot_the_diff", tmp_path / "birds_to_words"
    (spot / "annotations").mkdir(parents=True)
    for split, pairs in SPOT.items():
        write_json(spot / f"annotations/{split}.json", [{"img_id": name, "sentences": texts} for name, texts in pairs])
        for name, _ in pairs:
            save_picture(spot / f"resized_images/{name}.png", int(name), 10)
            save_picture(spot / f"resized_images/{name}_2.png", int(name), 120)
    write_birds(birds / "birds-to-words-v1.0.tsv", BIRDS)
    for name in {name for row in BIRDS for name in row[:2]}:
        save_picture(birds / f"images/{name}.jpg", int(name), 200)
    return tmp_path


def converted(folder: Path, train_on: list[str], **changes: object) -> tuple[ConvertReport, Workload]:
    """What convert wrote of both datasets, every count of the files expected, and what the plan says before."""
    fields = {"train_on": train_on, "expected_pairs": "published"}
    run = {name: make_entry(name, folder / name, **fields) for name in COUNTED}
    for name in run:
        run_ingest(folder / name, name, name, **fields)
    run_validate(folder, run)
    asked = {"questions": REPOSITORY / "profiles/questions.yaml", "references_per_pair": None}
    cfg = convert_section(**asked | changes)
    return convert(cfg, run, folder / "clean", folder / "mixture"), published_workload(run, cfg)


@pytest.mark.parametrize(
    ("train_on", "samples"),
    [(["train"], "each"), (["train", "val"], "each"), (["train", "val"], "one"), (["train", "val"], "joined")],
)
def test_the_plan_counts_the_pairs_and_samples_that_convert_writes(
    sources: Path, train_on: list[str], samples: str
) -> None:
    named = {name: {"samples": samples} for name in COUNTED}
    report, load = converted(sources, train_on, sources=named)
    written = {name: (counts.pairs["train"], counts.samples["train"]) for name, counts in report.datasets.items()}
    assert {name: (use.pairs, use.references) for name, use in load.sources.items()} == written
    assert (load.pairs, load.references) == (report.pairs["train"], report.samples["train"])
    mixture = counted_workload(sources / "mixture/train", None, IMAGE_TOKENS)
    assert mixture.sources == load.sources, "the plan after convert is the plan before"


def test_a_dataset_that_trains_on_none_of_its_splits_is_neither_planned_nor_written(sources: Path) -> None:
    fields = {"spot_the_diff": ["train"], "birds_to_words": []}
    run = {name: make_entry(name, sources / name, train_on=splits) for name, splits in fields.items()}
    for name, splits in fields.items():
        run_ingest(sources / name, name, name, train_on=splits)
    run_validate(sources, run)
    cfg = convert_section(questions=REPOSITORY / "profiles/questions.yaml", references_per_pair=None)
    report = convert(cfg, run, sources / "clean", sources / "mixture")
    load = published_workload(run, cfg)
    assert load.sources == {"spot_the_diff": SourceCount(2, 3)}
    assert (report.pairs["train"], report.samples["train"]) == (2, 3)
    birds = report.datasets["birds_to_words"]
    assert birds.pairs == {"train": 0, "val": 1, "test": 1}
    assert birds.left_out["pairs_not_sampled"] == 1


def test_each_split_of_each_dataset_is_counted_by_itself(sources: Path) -> None:
    _, load = converted(sources, ["train", "val"])
    raw = pl.concat([pl.read_parquet(sources / f"records/{name}/records.parquet") for name in COUNTED])
    samples = pl.read_parquet(sources / "mixture/train/*.parquet").join(raw, left_on="pair", right_on="id")
    written = samples.group_by("dataset", "own_split").agg(pl.col("pair").n_unique(), pl.len())
    found = {(use.dataset, use.split): use.used for use in load.splits}
    assert found == {(name, split): SourceCount(*counts) for name, split, *counts in written.iter_rows()}
    assert found["spot_the_diff", "train"] == SourceCount(2, 3)
    assert found["spot_the_diff", "val"] == SourceCount(2, 15), "all 14 sentences of a pair"
    assert [use.published for use in load.splits] == [3, 3, 1, 1]


def test_a_share_of_a_dataset_is_shared_out_over_its_splits_to_the_unit() -> None:
    cfg = convert_section(references_per_pair=None, sources={"birds_to_words": {"max_pairs": 999}})
    load = published_workload(entries({"birds_to_words": "birds_to_words"}, train_on=("train", "val")), cfg)
    assert [use.used.pairs for use in load.splits] == [891, 108]  # of 2,685 and 325
    assert sum(use.used.references for use in load.splits) == load.references == round(999 * 14_417 / 3_010)


PAPER = {  # (pairs that are published, that train, references that train): counted in the annotation files, or shares
    "omnidiff_real train": (7_007, 7_007, 7_007),
    "omnidiff_real val": (799, 799, 799),
    "omnidiff_render train": (5_445, 5_445, 5_445),
    "omnidiff_render val": (777, 777, 777),
    "spot_the_diff train": (8_566, 8_566 - 37, 17_676 - 53 - 3),
    "spot_the_diff val": (1_493, 1_493 - 4, 3_310 - 6),
    "iedit train": (3_061, 3_061, 3_061),
    "iedit val": (383, 383, 1_149 - 4),
    "birds_to_words train": (2_685, 2_685, 12_890 - 23),
    "birds_to_words val": (325, 325, 1_556 - 6),
    "clevr_change train": (67_660, 67_660, 493_735 * 67_660 / 79_606),
    "clevr_change val": (3_976, 3_976, 493_735 * 3_976 / 79_606),
    "clevr_dc train": (40_800, 40_800, None),
    "clevr_dc val": (2_400, 2_400, None),
}


@pytest.mark.parametrize("profile", ["paper", "paper-letter", "one-gpu", "small"])
def test_the_profiles_of_the_paper_train_on_the_published_pairs_of_train_and_val(profile: str) -> None:
    params = load_params(REPOSITORY / "profiles" / f"{profile}.yaml")
    load = published_workload(params.ingest.datasets, params.convert)
    found = {f"{use.dataset} {use.split}": use for use in load.splits}
    assert list(found) == list(PAPER)
    for name, (published, pairs, references) in PAPER.items():
        assert (found[name].published, found[name].used.pairs) == (published, pairs), name
        if references is not None:
            assert found[name].used.references == pytest.approx(references, abs=1), name
        assert found[name].counted == (not name.startswith("clevr"))
    assert sum(use.published for use in load.splits) == 145_377
    assert load.pairs == sum(use.used.pairs for use in load.splits) == 145_377 - 41
    assert load.references == sum(use.used.references for use in load.splits)


def test_train_alone_would_miss_the_papers_pairs_by_ten_thousand() -> None:
    params = load_params(REPOSITORY / "profiles/paper.yaml")
    train = {name: entry.model_copy(update={"train_on": ("train",)}) for name, entry in params.ingest.datasets.items()}
    assert sum(use.published for use in published_workload(train, params.convert).splits) == 135_224


def plan_lines(
    params_entries: dict[str, DatasetEntry], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    train, compute = train_section(tmp_path / "no_base"), compute_section()
    cfg = convert_section(references_per_pair=None)
    print_plan(
        train, compute, make_plan(train, ToySettings(), compute, params_entries, cfg, tmp_path / "none"), None, 0.45
    )
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("counted: published counts of the datasets, lengths estimated")
    return lines[start + 1 : next(n for n, line in enumerate(lines) if line.startswith("workload:"))]


@pytest.mark.usefixtures("toy_family")
def test_the_plan_prints_each_split_its_published_pairs_and_the_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = entries({"spot_the_diff": "spot_the_diff", "clevr_dc": "clevr_dc"}, train_on=("train", "val"))
    lines = plan_lines(some, tmp_path, capsys)
    assert lines[:2] == [
        "  spot_the_diff train              8,529 pairs    17,620 references of 8,566 published pairs",
        "  spot_the_diff val                1,489 pairs     3,304 references of 1,493 published pairs",
    ]
    assert lines[2].startswith("  clevr_dc train                  40,800 pairs ")
    assert lines[2].endswith(" references of 40,800 published pairs; references estimated")
    assert lines[4].startswith("  sum                             53,218 pairs ")
    assert lines[4].endswith(" references of 53,259 published pairs")
    assert len(lines) == 5


@pytest.mark.usefixtures("toy_family")
def test_the_papers_own_sums_stand_below_its_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = load_params(REPOSITORY / "profiles/paper.yaml").ingest.datasets
    lines = plan_lines(dict(datasets), tmp_path, capsys)
    assert lines[-1] == "  the paper                         145k pairs      896k references"
    assert "145,336 pairs" in lines[-2]
    assert lines[-2].endswith("of 145,377 published pairs")
