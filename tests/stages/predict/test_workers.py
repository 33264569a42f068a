"""Where captions are made: images ahead of the model, the checkpoint's own precision, fused modules, Ray workers."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from m3diff.images.open import load_image
from m3diff.models.device import DeviceError
from m3diff.models.fused import FusedMLP, FusedRMSNorm
from m3diff.models.generation import load_captioner
from m3diff.records.errors import DataError
from m3diff.settings.section import ParamsError
from m3diff.stages.predict import stage, workers
from m3diff.stages.predict.pairs import batches, read_test_pairs
from m3diff.stages.predict.stage import predict
from m3diff.stages.predict.workers import AHEAD, Batch, Job, caption, caption_here, caption_on_ray, images_ahead
from tests.stages.predict.test_stage import ORDER, compute, settings, write_test_split
from tests.tiny import tiny_base, tiny_checkpoint


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_test_split(tmp_path_factory.mktemp("workers") / "mixture")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    return tiny_checkpoint(tiny_base(folder / "base"), folder / "model" / "checkpoint")


def in_batches(mixture: Path, size: int = 1) -> list[Batch]:
    return [Batch(10 + n, pairs, n % 2 == 0) for n, pairs in enumerate(batches(read_test_pairs(mixture), size))]


def job(checkpoint: Path, **changes: Any) -> Job:
    return Job(checkpoint, 5, compute(checkpoint, **changes))


# Images


class Processor:
    """Prepares nothing, and counts the images of which it was asked."""

    def __init__(self) -> None:
        self.seen, self.changed = 0, threading.Condition()

    def prepare_image(self, image: Any) -> np.ndarray:
        with self.changed:
            self.seen += 1
            self.changed.notify_all()
        return np.asarray(image)

    def wait_for(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.seen >= count, timeout=120)


def test_the_images_of_the_next_batches_are_prepared_while_one_is_in_use(mixture: Path) -> None:
    processor = Processor()
    stream = images_ahead(in_batches(mixture), processor, threads=2)  # type: ignore[arg-type]
    next(stream)
    assert processor.wait_for(2 * (1 + AHEAD)), "images of the batch and of the next two"
    assert processor.seen == 2 * (1 + AHEAD), "and of no more"
    assert len(list(stream)) == 4


def test_images_come_with_their_batch_in_the_order_of_its_pairs(mixture: Path, checkpoint: Path) -> None:
    processor = load_captioner(checkpoint).processor
    asked = in_batches(mixture, size=2)
    found = list(images_ahead(asked, processor, threads=3))
    for batch, images in zip(asked, found, strict=True):
        paths = [path for pair in batch.pairs for path in (pair.before, pair.after)]
        for path, image in zip(paths, images, strict=True):
            np.testing.assert_array_equal(image, processor.prepare_image(load_image(path)))


def test_an_image_that_is_refused_ends_the_stream_and_its_threads(mixture: Path, tmp_path: Path) -> None:
    broken = write_test_split(tmp_path / "mixture")
    (broken / f"{ORDER[0]}_before.png").unlink()
    stream = images_ahead(in_batches(broken), Processor(), threads=1)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=f"{ORDER[0]}_before.png: cannot be read"):
        list(stream)
    for thread in threading.enumerate():
        if thread.name.startswith("images"):
            thread.join(timeout=120)
            assert not thread.is_alive()


# The model


@pytest.mark.parametrize(("dtype", "want"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_checkpoint_captions_in_the_precision_of_its_own_weights(
    dtype: str, want: torch.dtype, checkpoint: Path, mixture: Path, tmp_path: Path
) -> None:
    from m3diff.models.checkpoint import read_manifest, write_manifest

    folder = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    config = json.loads((folder / "config.json").read_text()) | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    facts = {name: value for name, value in read_manifest(folder).items() if name != "files"}
    write_manifest(folder, **facts)
    captioner = workers.load(job(folder))
    assert {parameter.dtype for parameter in captioner.model.parameters()} == {want}
    (_, [answer]), *_ = caption_here(job(folder), in_batches(mixture)[:1])
    assert answer.saliency is not None
    assert answer.saliency.dtype == np.float16


@pytest.mark.fault("11")
def test_a_gpu_that_is_asked_for_and_not_there_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="compute.gpu: true, but torch .* sees no GPU"):
        workers.load(job(checkpoint, gpu=True))


def test_modules_are_fused_as_in_training_and_the_captions_stay(checkpoint: Path, mixture: Path) -> None:
    kinds = {type(module) for module in workers.load(job(checkpoint)).model.modules()}
    assert {FusedRMSNorm, FusedMLP} <= kinds
    stock = load_captioner(checkpoint, 5)
    assert not {FusedRMSNorm, FusedMLP} & {type(module) for module in stock.model.modules()}
    asked = in_batches(mixture, size=2)
    for batch, (number, answers) in zip(asked, caption_here(job(checkpoint), asked), strict=True):
        files = [file for pair in batch.pairs for file in (pair.before, pair.after)]
        images = [stock.processor.prepare_image(load_image(file)) for file in files]
        captions, maps = stock.answer(images, batch.pairs[0].question, saliency=True)
        assert number == batch.number
        assert [answer.caption for answer in answers] == captions
        if batch.saliency:
            np.testing.assert_allclose([answer.saliency for answer in answers], maps, atol=1e-3)
        else:
            assert [answer.saliency for answer in answers] == [None] * len(captions)


# Workers


@pytest.mark.parametrize(
    ("gpu", "count", "place"), [(False, 0, "here"), (False, 2, "here"), (True, 0, "here"), (True, 2, "ray")]
)
def test_ray_is_for_gpus_alone(
    gpu: bool, count: int, place: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "caption_here", lambda job, batches: "here")
    monkeypatch.setattr(workers, "caption_on_ray", lambda job, batches: "ray")
    assert caption(job(checkpoint, gpu=gpu, workers=count), []) == place


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow(95)
def test_two_ray_workers_give_what_one_process_gives(cluster: None, checkpoint: Path, mixture: Path) -> None:
    asked = in_batches(mixture)
    want = dict(caption_here(job(checkpoint), asked))
    got = dict(caption_on_ray(job(checkpoint, workers=2), asked))
    assert got.keys() == want.keys() == {batch.number for batch in asked}
    for number, answers in want.items():
        assert [answer.caption for answer in got[number]] == [answer.caption for answer in answers]
        for one, other in zip(got[number], answers, strict=True):
            np.testing.assert_array_equal(one.saliency, other.saliency)
    assert ray.is_initialized(), "a cluster that was there stays"


@pytest.mark.slow(85)
def test_a_worker_s_data_error_is_the_stage_s(cluster: None, checkpoint: Path, tmp_path: Path) -> None:
    broken = write_test_split(tmp_path / "mixture")
    (broken / "3_after.png").write_bytes(b"no image")
    with pytest.raises(DataError) as refused:
        list(caption_on_ray(job(checkpoint, workers=2), in_batches(broken)))
    assert str(refused.value).startswith(f"{broken / '3_after.png'}: sha256")
    assert "Traceback" not in str(refused.value)


@pytest.mark.slow
def test_workers_that_find_no_room_are_refused_with_what_ray_has(
    cluster: None, checkpoint: Path, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ROOM_S", 2)
    with pytest.raises(ParamsError, match="no room for 2 workers .*: a worker needs 1 CPU, 1 GPU; .* has 4 CPU, 0 GPU"):
        list(caption_on_ray(job(checkpoint, workers=2, gpu=True), in_batches(mixture)))


@pytest.mark.slow(80)
def test_a_worker_s_slow_start_is_no_lack_of_room(
    cluster: None, checkpoint: Path, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(workers.Worker):
        def __init__(self, job: Job) -> None:
            time.sleep(3)
            super().__init__(job)

    monkeypatch.setattr(workers, "Worker", Slow)
    monkeypatch.setattr(workers, "ROOM_S", 2)
    [asked, *_] = in_batches(mixture)
    assert [number for number, _ in caption_on_ray(job(checkpoint, workers=1), [asked])] == [asked.number]
    monkeypatch.setattr(workers, "START_S", 1)
    with pytest.raises(ConnectionError, match="1 of 1 Ray workers did not start within 1 s; .* run `m3diff predict`"):
        list(caption_on_ray(job(checkpoint, workers=1), [asked]))
    assert ray.util.placement_group_table() == {} or {
        group["state"] for group in ray.util.placement_group_table().values()
    } == {"REMOVED"}, "room is given back"


def die(graves: Path) -> None:
    """End this process as a machine out of memory does, and leave a file for it."""
    (graves / str(os.getpid())).touch()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow(65)
@pytest.mark.parametrize(("count", "at"), [(2, 12), (1, 13)])
def test_what_a_dead_worker_has_not_answered_is_answered_once_by_others(
    count: int,
    at: int,
    cluster: None,
    checkpoint: Path,
    mixture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:

    class Mortal(workers.Worker):
        def caption(self, batches: list[Batch]) -> Iterator[tuple[int, list]]:
            for batch in batches:
                if batch.number == at and not list(tmp_path.iterdir()):
                    die(tmp_path)
                yield from super().caption([batch])

    asked = in_batches(mixture)
    want = dict(caption_here(job(checkpoint), asked))
    monkeypatch.setattr(workers, "Worker", Mortal)
    got = list(caption_on_ray(job(checkpoint, workers=count, max_failures=1), asked))
    assert len(list(tmp_path.iterdir())) == 1, "one has died"
    assert sorted(number for number, _ in got) == sorted(want), "each batch once"
    for number, answers in got:
        assert [answer.caption for answer in answers] == [answer.caption for answer in want[number]]
        for one, other in zip(answers, want[number], strict=True):
            np.testing.assert_array_equal(one.saliency, other.saliency)
    said = capsys.readouterr().out
    assert "predict: a worker died (" in said
    assert f"unanswered batches go to {'1 other worker(s)' if count == 2 else 'new workers'} (failure 1 of 1 " in said


@pytest.mark.slow(65)
def test_too_many_deaths_end_the_run_and_what_was_captioned_is_kept(
    cluster: None, checkpoint: Path, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker dies when its first answer is in the journal: with one failure allowed, two of five are."""
    out, graves, runs = tmp_path / "out", tmp_path / "graves", tmp_path / "out_runs" / "predict"
    graves.mkdir()

    class Mortal(workers.Worker):
        def caption(self, batches: list[Batch]) -> Iterator[tuple[int, list]]:
            yield from super().caption(batches[:1])
            while sum(file.read_text().count("\n") for file in runs.iterdir()) <= len(list(graves.iterdir())):
                time.sleep(0.05)
            die(graves)

    cfg, how = settings(batch_pairs=1), compute(out, max_failures=1, workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(stage, "caption", caption_on_ray)
        patch.setattr(workers, "Worker", Mortal)
        with pytest.raises(ConnectionError, match=r"compute.max_failures: 1 .* run `m3diff predict` again"):
            predict(cfg, how, mixture, checkpoint.parent, out)
    assert len(list(graves.iterdir())) == 2
    again: list[int] = []
    monkeypatch.setattr(stage, "caption", lambda job, todo: again.extend(b.number for b in todo) or caption(job, todo))
    predict(cfg, how, mixture, checkpoint.parent, out)
    assert len(again) == 13, "two of 15 are kept"
    predict(cfg, how, mixture, checkpoint.parent, tmp_path / "other")
    for name in ("predictions.json", "saliency.npz"):
        assert (out / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


@pytest.mark.parametrize("gpu", [False, True])
def test_each_worker_is_placed_with_its_device_and_its_environment(
    gpu: bool, checkpoint: Path, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    dealt: list[list[int]] = []

    class Actor:
        def __init__(self, _: Job) -> None:
            self.ready = SimpleNamespace(remote=lambda: "ready")
            self.caption = SimpleNamespace(remote=self._caption)

        def _caption(self, part: list[Batch]) -> Iterator[tuple[int, list]]:
            dealt.append([batch.number for batch in part])
            return iter([(batch.number, []) for batch in part])

    def remote(**given: Any) -> Any:
        asked.update(given)
        return lambda kind: SimpleNamespace(remote=Actor)

    monkeypatch.setattr(ray, "is_initialized", lambda: True)

    def room(bundles: list[dict[str, float]]) -> Any:
        rooms.append(bundles)
        return SimpleNamespace(wait=lambda timeout: True)

    rooms: list[list[dict[str, float]]] = []
    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(ray.util, "placement_group", room)
    monkeypatch.setattr(ray.util, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout=None: (refs[:num_returns], refs[num_returns:]))
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    made = list(caption_on_ray(job(checkpoint, workers=2, cpus_per_worker=3, gpu=gpu), in_batches(mixture)))
    assert sorted(made) == [(number, []) for number in range(10, 15)]
    assert (asked["num_cpus"], asked["num_gpus"]) == (3, int(gpu))
    assert rooms == [[{"CPU": 3, "GPU": 1} if gpu else {"CPU": 3}] * 2]
    assert asked["runtime_env"] == {"env_vars": workers.environment(gpu)}
    assert dealt == [[10, 12, 14], [11, 13]]
    dealt.clear()
    list(caption_on_ray(job(checkpoint, workers=8), in_batches(mixture)))
    assert dealt == [[10], [11], [12], [13], [14]], "no worker without work"


def test_a_worker_that_dies_is_a_reason_to_try_again(
    checkpoint: Path, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def died(*_: Any) -> None:
        raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(workers, "start_ray", lambda compute: ended.append("start"))
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("shutdown"))
    monkeypatch.setattr(workers, "_as_they_come", died)
    with pytest.raises(ConnectionError, match="a worker died .* run `m3diff predict` again: what is captioned"):
        list(caption_on_ray(job(checkpoint, workers=2), in_batches(mixture)))
    assert ended == ["start", "shutdown"]
