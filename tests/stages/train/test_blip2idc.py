"""BLIP2IDC through the project's own loop: resumption to the bit with augmentation, the same images for any workers."""

import multiprocessing
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from m3diff.models.blip2idc import Augment
from m3diff.stages.train import engine
from m3diff.stages.train.job import choose_accelerator
from tests.stages.train.toy import Recipe, Trained, assert_same_run, interrupted, recipe, run
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
