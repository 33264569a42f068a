"""OneDiff's two stages: the numbers of samples of `profiles/onediff.yaml`, its optional data, and a small run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m3diff.commands.plan.published import published_workload
from m3diff.models.checkpoint import read_manifest
from m3diff.models.settings import Align
from m3diff.records.schemas import COUPLE_QUESTION
from m3diff.settings.compute import Compute
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from m3diff.stages.convert.params import Convert
from m3diff.stages.convert.stage import convert
from m3diff.stages.evaluate.params import Evaluate
from m3diff.stages.evaluate.stage import evaluate
from m3diff.stages.predict.params import Predict
from m3diff.stages.predict.stage import predict
from m3diff.stages.train.batches import read_training_samples
from m3diff.stages.train.job import DatasetFilter
from tests.family_cases import tiny
from tests.layouts import LLAVA_INSTRUCT, WRITERS, conversation, make_entry, run_ingest, run_validate, write_llava
from tests.stages.train.toy import COMPUTE, recipe, run
from tests.toy import REPOSITORY

PROFILE = REPOSITORY / "profiles" / "onediff.yaml"
STAGE_I = ("llava_pretrain",)
# What the paper prints, in thousands (arXiv 2407.05645, sections 3.4 and 5.1)
PRINTED = {"singles": 558, "couples": 279, "collected": 170, "real": 53, "synthetic": 139, "instructions": 665}
NLVR2_TRAIN = 86_373  # sentences, "about" which NLVR2's page says


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(PROFILE)


def samples_by_dataset(params: Params, *names: str) -> dict[str, int]:
    """Return the published numbers of samples that the profile trains on, by dataset."""
    entries = {name: entry for name, entry in params.ingest.datasets.items() if name in names}
    counts = published_workload(entries, params.convert).counts_by_dataset
    return {name: count.references for name, count in counts.items()}


def test_stage_one_has_the_samples_that_the_paper_prints(params):
    assert params.models["onediff"].align.datasets == STAGE_I
    entries = {name: params.ingest.datasets[name] for name in STAGE_I}
    shares = published_workload(entries, params.convert).shares
    counts = {share.are_couples: share.pairs for share in shares}
    assert counts == {False: 558_128, True: 279_064}
    assert round(counts[False], -3) == PRINTED["singles"] * 1_000
    assert round(counts[True], -3) == PRINTED["couples"] * 1_000


def test_the_collected_part_of_stage_two_rounds_to_what_the_paper_prints(params):
    """With all sentences of NLVR2's train.json. This project reads its true ones, whose number is not published."""
    names = ("spot_the_diff", "iedit", "birds_to_words", "clevr_change")
    collected = sum(samples_by_dataset(params, *names).values()) + NLVR2_TRAIN
    assert collected == 168_308
    assert round(collected, -4) == PRINTED["collected"] * 1_000


def test_one_of_the_paper_s_two_sums_fits_its_million(params):
    """The parts of DiffCap add up to 362k. The text says 363k in one place and 335k in another."""
    parts = PRINTED["collected"] + PRINTED["real"] + PRINTED["synthetic"]
    assert parts == 362
    instructions = samples_by_dataset(params, "llava_instruct")["llava_instruct"]
    assert round(instructions, -3) == PRINTED["instructions"] * 1_000
    totals = [1_000 * diffcap + instructions for diffcap in (335, 363)]
    assert totals == [1_000_298, 1_028_298]
    assert [round(total / 1e6, 2) for total in totals] == [1.0, 1.03]


def test_every_caption_of_clevr_change_would_exceed_the_collected_part(params):
    entries = {"clevr_change": params.ingest.datasets["clevr_change"]}
    workload = published_workload(entries, Convert())
    assert workload.references > 2 * PRINTED["collected"] * 1_000


def test_the_optional_data_of_the_profile_are_accepted(tmp_path):
    """The lines that begin with `#+` are valid once these characters are deleted."""
    text = PROFILE.read_text().replace("#+", "")
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("extends: paper", f"extends: {REPOSITORY / 'profiles' / 'paper'}"))
    params = load_params(path)
    assert params.augment.keys() == {"diffcap_real", "diffcap_synthetic"}
    assert params.augment.keys() <= params.ingest.datasets.keys()
    assert not load_params(PROFILE).augment


# Both stages in small

SINGLES = 7
PRETRAIN = [
    {"image": f"{number:05}/{number}.jpg", "conversations": conversation("What is it?\n<image>", f"a box {number}")}
    for number in range(SINGLES)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the stages' outputs up to the mixture."""
    folder = tmp_path_factory.mktemp("onediff")
    write_llava(folder / "llava_pretrain", "blip_laion_cc_sbu_558k.json", PRETRAIN, images="images")
    write_llava(folder / "llava_instruct", "llava_v1_5_mix665k.json", LLAVA_INSTRUCT)
    WRITERS["iedit"](folder / "iedit")
    names = ("llava_pretrain", "llava_instruct", "iedit")
    for name in names:
        run_ingest(folder / name, name, name)
    run_validate(folder, near_duplicate_max_diff=None)
    entries = {name: make_entry(name, folder / name) for name in names}
    sources = {name: source for name, source in load_params(PROFILE).convert.sources.items() if name in names}
    convert(Convert(sources=sources), entries, folder / "clean", folder / "mixture")
    return folder


@pytest.mark.slow
def test_both_stages_run_on_the_paper_s_kinds_of_data(folder, tmp_path):
    base, settings = tiny("onediff on LLaVA-1.5", folder / "base")
    align = Align(STAGE_I, epochs=1, global_batch=4, rates={"projector": 1e-3, "module": 1e-3})
    changes: dict[str, Any] = {"model": replace(settings, align=align), "epochs": 1, "val_pairs": 1}
    trained = run(recipe(base, **changes), folder / "mixture", tmp_path)

    stage_one = read_training_samples(folder / "mixture", DatasetFilter(STAGE_I, excludes=False))
    assert stage_one.table[COUPLE_QUESTION].null_count() == 0
    assert trained.report.alignment["captions"] == SINGLES + SINGLES // 2
    stage_two = read_training_samples(folder / "mixture", DatasetFilter(STAGE_I))
    assert trained.report.rows_in == len(stage_two)
    assert trained.report.rows_out == len(stage_two)
    trained_on = read_manifest(tmp_path / "out" / "checkpoint")["trained_on"]
    assert trained_on["images"] == [0, 1, 2]
    assert trained_on["turns"] == 3
    assert trained_on["own_questions"]

    compute = Compute(scratch=tmp_path / "runs", **COMPUTE)
    predict(Predict(max_new_tokens=4), compute, folder / "mixture", tmp_path / "out", tmp_path / "predictions")
    cfg = Evaluate(metrics=("CIDEr",), allow_fewer_pairs=True)
    evaluate(cfg, compute, folder / "records", folder / "clean", tmp_path / "predictions", tmp_path / "report")
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())
    assert metrics["protocols"].keys() == {"iedit/test"}
