"""BLIP2IDC through the project's own loop: resumption to the bit with augmentation, the same images for any workers."""

import multiprocessing
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from m3diff.models import FAMILIES
from m3diff.models.blip2idc import Augment
from m3diff.models.generation import load_captioner
from m3diff.stages.train import engine
from m3diff.stages.train.engine import check_packing
from m3diff.stages.train.job import choose_accelerator
from tests.stages.train.toy import Recipe, Trained, assert_same, assert_same_run, interrupted, recipe, run, started
from tests.tiny import noise_image
from tests.tiny_blip2 import blip2_settings, tiny_blip2

OFTEN = Augment(blur=0.7, sigma=(0.4, 0.5), jpeg=0.7, quality=(50, 80))


@pytest.fixture(scope="module")
def blip2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_blip2(tmp_path_factory.mktemp("blip2") / "base")


def made(base: Path, augment: Augment | None = OFTEN, **changes: Any) -> Recipe:
    return recipe(base, model=blip2_settings(augment=augment), epochs=3, caption_val_pairs=1).changed(**changes)


@pytest.fixture(scope="module")
def whole(mixture: Path, blip2: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An undisturbed run of nine steps with augmentation."""
    return run(made(blip2), mixture, tmp_path_factory.mktemp("whole"))


def killed(again: Recipe, mixture: Path, folder: Path) -> None:
    """A run that signal 9 ends in the middle of its sixth step."""
    original, steps = engine.take_step, []

    def take_step(*given: Any) -> tuple[float, float]:
        steps.append(given)
        if len(steps) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*given)

    engine.take_step = take_step  # in this process alone, which ends
    choose_accelerator(False)
    torch.set_num_threads(1)
    run(again, mixture, folder)


@pytest.mark.parametrize("how", ["interrupted", pytest.param("killed", marks=pytest.mark.slow(15))])
def test_a_run_that_resumes_sees_the_same_images_and_ends_with_the_same_bits(
    how: str, mixture: Path, blip2: Path, tmp_path: Path, whole: Trained, capfd: pytest.CaptureFixture[str]
) -> None:
    if how == "interrupted":
        interrupted(made(blip2), mixture, tmp_path, saved=2)
    else:
        process = multiprocessing.get_context("spawn").Process(target=killed, args=(made(blip2), mixture, tmp_path))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
    assert_same_run(run(made(blip2), mixture, tmp_path), whole)
    assert re.search("resumed after step [24] of 9", capfd.readouterr().out)


def test_only_adapters_train_and_the_checkpoint_captions_without_parameters(blip2: Path, whole: Trained) -> None:
    base = FAMILIES["blip2idc"].load(blip2, torch.float32, None).state_dict()
    moved = {name for name, weight in whole.weights.items() if not torch.equal(weight, base[name])}
    kinds = {name.rsplit(".", 2)[-2] for name in moved}
    assert kinds == {"qkv", "key", "value", "query", "q_proj", "k_proj", "v_proj"}
    counts = whole.report.parameters
    assert counts["projector"] == 0
    assert min(counts["vision"], counts["module"], counts["llm"]) > 0
    merged, adapters = (load_captioner(whole.folder / "out" / "checkpoint" / part, 5) for part in ("", "adapters"))
    pairs = [(noise_image(n, (40, 30)), noise_image(n + 5, (30, 50))) for n in range(3)]
    assert merged.caption(pairs) == adapters.caption(pairs)


@pytest.mark.parametrize("how", [{"micro_batch": 1}, pytest.param({"zero_stage": 3}, marks=pytest.mark.slow)], ids=str)
def test_how_a_run_is_computed_changes_no_augmentation_and_no_caption(
    how: dict[str, int], mixture: Path, blip2: Path, tmp_path: Path, whole: Trained
) -> None:
    """Under ZeRO 3 the queries are together within `forward` alone, where `generate` encodes the pictures too."""
    got = run(made(blip2, **how), mixture, tmp_path)
    assert_same(got.weights, whole.weights, atol=5e-5)
    assert got.column("val_cider") == whole.column("val_cider")


@pytest.mark.usefixtures("alone")
def test_training_sees_the_images_augmented_and_validation_and_the_check_of_packing_as_they_are(
    mixture: Path, blip2: Path, tmp_path: Path
) -> None:
    often, never = (started(made(blip2, augment), mixture, tmp_path) for augment in (OFTEN, None))
    assert often.validation.losses(often.engine) == never.validation.losses(never.engine)
    chosen = often.schedule.micro_batches(0, 0)[0]
    assert torch.equal(often.loader.build(chosen).images, never.loader.build(chosen).images)
    first = [next(each.loader.stream(each.schedule, 0, 0))[0].images for each in (often, never)]
    assert not torch.equal(*first)
    said = [check_packing(one.engine, one.schedule, one.loader, one.processor, one.device) for one in (often, never)]
    assert said[0] == said[1] is not None
