"""A run that SIGTERM asks to end writes a checkpoint, and goes on from it to the weights, curves and report of one that
was left alone."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from m3diff.stages.train import attempts, loop, runtimes, state
from m3diff.stages.train.attempts import STOP, TERMINATED, stop_on_sigterm
from m3diff.stages.train.state import checkpoints
from tests.stages.train.toy import Trained, recipe, run


@pytest.fixture(scope="module")
def whole(mixture: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(recipe(base, export="best", caption_val_pairs=1), mixture, tmp_path_factory.mktemp("whole"))


def terminated_in_step(step: int, patch: pytest.MonkeyPatch) -> None:
    original, taken = loop.take_step, []

    def take_step(*given: Any) -> Any:
        taken.append(1)
        if len(taken) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*given)

    patch.setattr(loop, "take_step", take_step)


@pytest.mark.slow(15)
@pytest.mark.fault("03", "S3")
@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_the_step_is_finished_and_saved_and_the_run_goes_on_from_it(
    step: int, mixture: Path, base: Path, tmp_path: Path, whole: Trained, capfd: pytest.CaptureFixture
) -> None:
    made = recipe(base, export="best", caption_val_pairs=1)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)
    with pytest.MonkeyPatch.context() as patch:
        terminated_in_step(step, patch)
        with pytest.raises(SystemExit) as ended:
            run(made, mixture, tmp_path)
    assert ended.value.code == TERMINATED == 143
    assert f"asked to end (SIGTERM) at step {step}, whose checkpoint is written" in capfd.readouterr().out
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)) == handlers
    assert not (tmp_path / "out" / "report.json").exists()
    (run_dir,) = (path for path in (tmp_path / "runs" / "train").iterdir() if path.is_dir())
    assert checkpoints(run_dir)[-1].name == f"step-{step:08d}"
    got = run(made, mixture, tmp_path)
    assert f"resumed after step {step} of 6" in capfd.readouterr().out
    assert got.report == whole.report
    assert got.curve == whole.curve
    for name, weight in whole.weights.items():
        assert torch.equal(got.weights[name], weight), name


@pytest.mark.slow(15)
@pytest.mark.fault("03", "T17")
@pytest.mark.parametrize("part", ["save_file", "write_manifest", "verify_manifest", "remove_older"])
def test_a_signal_while_a_checkpoint_is_written_loses_none(
    part: str, mixture: Path, base: Path, tmp_path: Path, whole: Trained, capfd: pytest.CaptureFixture
) -> None:
    made = recipe(base, export="best", caption_val_pairs=1)
    original, asked = getattr(state, part), []

    def write(*given: Any, **more: Any) -> Any:
        if not asked:
            asked.append(1)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
        return original(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, part, write)
        with pytest.raises(SystemExit) as ended:
            run(made, mixture, tmp_path)
    assert ended.value.code == TERMINATED
    (run_dir,) = (path for path in (tmp_path / "runs" / "train").iterdir() if path.is_dir())
    assert [state.latest_valid_checkpoint(run_dir)] == checkpoints(run_dir)[-1:]
    got = run(made, mixture, tmp_path)
    assert "resumed after step" in capfd.readouterr().out
    assert got.report == whole.report
    for name, weight in whole.weights.items():
        assert torch.equal(got.weights[name], weight), name


@pytest.mark.fault("03")
def test_a_step_that_takes_longer_than_the_grace_time_is_not_waited_for(
    mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_step(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(loop, "take_step", take_step)
    monkeypatch.setattr(runtimes, "stop_on_sigterm", lambda run_dir: stop_on_sigterm(run_dir, grace_s=0.3))
    started = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        run(recipe(base), mixture, tmp_path)
    assert ended.value.code == TERMINATED
    assert time.monotonic() - started < 50


def test_what_asked_an_earlier_run_to_end_does_not_ask_the_next(tmp_path: Path) -> None:
    (tmp_path / STOP).touch()
    with stop_on_sigterm(tmp_path, grace_s=10):
        assert not (tmp_path / STOP).exists()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (tmp_path / STOP).exists()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 9.95, "a second signal gives no more time"
    assert not (tmp_path / STOP).exists()
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_another_thread_than_the_main_one_leaves_signals_alone(tmp_path: Path) -> None:
    met: list[Any] = []

    def train() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with stop_on_sigterm(tmp_path):
            met.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert met == [True]


def test_the_grace_time_ends_before_a_flow_kills_what_is_left() -> None:
    from flows.dvc import GRACE_S

    assert attempts.GRACE_S < GRACE_S
