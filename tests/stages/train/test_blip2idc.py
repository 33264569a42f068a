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
from m3diff.stages.train import loop
from m3diff.stages.train.job import Job, Runtime
from m3diff.stages.train.loop import Training
from m3diff.stages.train.runtimes import choose_accelerator
from tests.stages.train.test_loop import assert_same, assert_same_run, interrupted
from tests.stages.train.toy import Recipe, Trained, recipe, run
from tests.tiny import noise_image
from tests.tiny_blip2 import blip2_settings, tiny_blip2

OFTEN = Augment(blur=0.7, sigma=(0.4, 0.5), jpeg=0.7, quality=(50, 80))


@pytest.fixture(scope="module")
def blip2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_blip2(tmp_path_factory.mktemp("blip2") / "base")


def made(base: Path, augment: Augment | None = OFTEN, **changes: Any) -> Recipe:
    return recipe(base, model=blip2_settings(augment=augment), **changes)


@pytest.fixture(scope="module")
def whole(mixture: Path, blip2: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An undisturbed run of nine steps with augmentation."""
    return run(made(blip2, epochs=3, caption_val_pairs=1), mixture, tmp_path_factory.mktemp("whole"))


def killed(again: Recipe, mixture: Path, folder: Path) -> None:
    """A run that signal 9 ends in the middle of its sixth step."""
    original, steps = loop.take_step, []

    def take_step(*given: Any) -> tuple[float, float]:
        steps.append(given)
        if len(steps) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*given)

    loop.take_step = take_step  # in this process alone, which ends
    choose_accelerator(False)
    torch.set_num_threads(1)
    run(again, mixture, folder)


def test_a_run_that_resumes_sees_the_same_images_and_ends_with_the_same_bits(
    mixture: Path, blip2: Path, tmp_path: Path, whole: Trained
) -> None:
    again = made(blip2, epochs=3, caption_val_pairs=1)
    interrupted(again, mixture, tmp_path, saved=2)
    got = run(again, mixture, tmp_path)
    assert_same_run(got, whole)
    assert got.curve == whole.curve
    assert got.report == whole.report


@pytest.mark.slow(15)
def test_so_does_one_that_is_killed(
    mixture: Path, blip2: Path, tmp_path: Path, whole: Trained, capfd: pytest.CaptureFixture[str]
) -> None:
    again = made(blip2, epochs=3, caption_val_pairs=1)
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(again, mixture, tmp_path))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    got = run(again, mixture, tmp_path)
    assert re.search("resumed after step [24] of 9", capfd.readouterr().out)
    assert_same_run(got, whole)
    assert got.curve == whole.curve


def test_only_adapters_train_and_augmentation_shows_in_them(
    mixture: Path, blip2: Path, tmp_path: Path, whole: Trained
) -> None:
    plain = run(made(blip2, None, epochs=3, caption_val_pairs=1), mixture, tmp_path)
    base = FAMILIES["blip2idc"].load(blip2, torch.float32, None).state_dict()
    moved = {name for name, weight in whole.weights.items() if not torch.equal(weight, base[name])}
    kinds = {name.rsplit(".", 2)[-2] for name in moved}
    assert kinds == {"qkv", "key", "value", "query", "q_proj", "k_proj", "v_proj"}
    assert any(not torch.equal(weight, plain.weights[name]) for name, weight in whole.weights.items())
    assert plain.column("loss")[0] != whole.column("loss")[0]
    counts = whole.report.parameters
    assert counts["projector"] == 0
    assert min(counts["vision"], counts["module"], counts["llm"]) > 0


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_how_a_step_is_dealt_changes_no_augmentation(
    micro_batch: int, mixture: Path, blip2: Path, tmp_path: Path, whole: Trained
) -> None:
    got = run(made(blip2, epochs=3, micro_batch=micro_batch), mixture, tmp_path)
    assert_same(got.weights, whole.weights, atol=5e-5)


def started(recipe: Recipe, mixture: Path, folder: Path) -> Any:
    return Training(Job(recipe.cfg, recipe.model, recipe.compute, mixture, folder, folder, ""), Runtime())


@pytest.mark.usefixtures("alone")
def test_validation_and_the_check_of_packing_see_the_images_as_they_are(
    mixture: Path, blip2: Path, tmp_path: Path
) -> None:
    from m3diff.stages.train.engine import check_packing

    often, never = (started(made(blip2, augment), mixture, tmp_path) for augment in (OFTEN, None))
    assert often.validation.losses(often.engine) == never.validation.losses(never.engine)
    chosen = often.schedule.micro_batches(0, 0)[0]
    assert torch.equal(often.loader.build(chosen).images, never.loader.build(chosen).images)
    first = [next(each.loader.stream(each.schedule, 0, 0))[0].images for each in (often, never)]
    assert not torch.equal(*first)
    said = [check_packing(one.engine, one.schedule, one.loader, one.processor, one.device) for one in (often, never)]
    assert said[0] is not None
    assert said[0] == said[1]


def test_a_trained_checkpoint_captions_without_parameters(mixture: Path, blip2: Path, tmp_path: Path) -> None:
    done = run(made(blip2, epochs=1), mixture, tmp_path)
    assert done.report.steps == 3
    merged, adapters = (load_captioner(tmp_path / "out" / "checkpoint" / part, 5) for part in ("", "adapters"))
    pairs = [(noise_image(n, (40, 30)), noise_image(n + 5, (30, 50))) for n in range(3)]
    assert merged.caption(pairs) == adapters.caption(pairs)


@pytest.mark.slow
def test_zero_3_trains_and_captions_alike(mixture: Path, blip2: Path, tmp_path: Path, whole: Trained) -> None:
    """Under ZeRO 3 the queries are together within `forward` alone, where `generate` encodes the pictures too."""
    got = run(made(blip2, epochs=3, zero_stage=3, caption_val_pairs=1), mixture, tmp_path)
    assert_same(got.weights, whole.weights, atol=5e-5)
    assert got.column("val_cider") == whole.column("val_cider")
