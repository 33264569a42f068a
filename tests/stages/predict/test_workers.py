"""Captions in this process or in Ray workers: the checkpoint's precision, fused modules, workers that die."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from m3diff.images.open import load_image
from m3diff.models.checkpoint import read_manifest, write_manifest
from m3diff.models.device import DeviceError
from m3diff.models.fused import FusedDecoderLayer, FusedRMSNorm
from m3diff.models.generation import load_captioner
from m3diff.records.errors import DataError
from m3diff.settings.section import ParamsError
from m3diff.stages.predict import stage
from m3diff.stages.predict.stage import (
    AHEAD,
    Answer,
    Batch,
    Job,
    batches,
    caption,
    caption_on_ray,
    images_ahead,
    predict,
    read_test_pairs,
)
from tests.stages.predict.conftest import ORDER, compute, settings, write_test_split


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Path:
    return model / "checkpoint"


def in_batches(mixture: Path, size: int = 1) -> list[Batch]:
    return [Batch(10 + n, pairs, n % 2 == 0) for n, pairs in enumerate(batches(read_test_pairs(mixture), size))]


def job(checkpoint: Path, **changes: Any) -> Job:
    return Job(checkpoint, 5, compute(checkpoint, **changes))


class Processor:
    """Prepares nothing, and counts the images of which it was asked."""

    def __init__(self) -> None:
        self.seen, self.changed = 0, threading.Condition()

    def prepare_image(self, image: Any) -> np.ndarray:
        with self.changed:
            self.seen += 1
            self.changed.notify_all()
        return np.asarray(image)


def test_images_are_prepared_two_batches_ahead_and_a_bad_one_ends_them(mixture, tmp_path):
    processor, count = Processor(), 2 * (1 + AHEAD)
    stream = images_ahead(in_batches(mixture), processor, threads=2)
    next(stream)
    with processor.changed:
        assert processor.changed.wait_for(lambda: processor.seen >= count, timeout=120), "the batch and the next two"
    assert processor.seen == count, "and no more"
    assert len(list(stream)) == 4
    broken = write_test_split(tmp_path / "mixture")
    (broken / f"{ORDER[0]}_before.png").unlink()
    with pytest.raises(DataError, match=f"{ORDER[0]}_before.png: cannot be read"):
        list(images_ahead(in_batches(broken), Processor(), threads=1))


@pytest.mark.parametrize(("dtype", "want"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_checkpoint_captions_in_the_precision_of_its_own_weights(dtype, want, checkpoint, mixture, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    config = json.loads((folder / "config.json").read_text()) | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    write_manifest(folder, **{name: value for name, value in read_manifest(folder).items() if name != "files"})
    assert {parameter.dtype for parameter in stage.load(job(folder)).model.parameters()} == {want}
    (_, [answer]), *_ = caption(job(folder), in_batches(mixture)[:1])
    assert answer.saliency.dtype == np.float16


@pytest.mark.fault("11")
def test_a_gpu_that_is_asked_for_and_not_there_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="compute.gpu: true, but torch .* sees no GPU"):
        stage.load(job(checkpoint, gpu=True))


def test_modules_are_fused_as_in_training_and_the_captions_stay(checkpoint, mixture):
    stock = load_captioner(checkpoint, 5)
    kinds = [{type(module) for module in of.model.modules()} for of in (stage.load(job(checkpoint)), stock)]
    assert {FusedRMSNorm, FusedDecoderLayer} <= kinds[0]
    assert not {FusedRMSNorm, FusedDecoderLayer} & kinds[1]
    asked = in_batches(mixture, size=2)
    for batch, (number, answers) in zip(asked, caption(job(checkpoint), asked), strict=True):
        files = [file for pair in batch.pairs for file in (pair.before, pair.after)]
        images = [stock.processor.prepare_image(load_image(file)) for file in files]
        captions, maps = stock.answer(images, batch.pairs[0].question, saliency=True)
        assert (number, [answer.caption for answer in answers]) == (batch.number, captions)
        if batch.saliency:
            np.testing.assert_allclose([answer.saliency for answer in answers], maps, atol=1e-3)
        else:
            assert [answer.saliency for answer in answers] == [None] * len(captions)


@pytest.mark.slow(85)
def test_a_worker_s_data_error_is_the_stage_s(checkpoint, tmp_path):
    broken = write_test_split(tmp_path / "mixture")
    (broken / "3_after.png").write_bytes(b"no image")
    with pytest.raises(DataError) as refused:
        list(caption_on_ray(job(checkpoint, workers=2), in_batches(broken)))
    assert str(refused.value).startswith(f"{broken / '3_after.png'}: sha256")
    assert "Traceback" not in str(refused.value)


@pytest.mark.slow(65)
def test_what_a_dead_worker_left_is_answered_once(checkpoint, mixture, tmp_path, monkeypatch, capsys):
    """To the same answers as those of one process."""

    class Mortal(stage.Worker):
        def caption(self, batches: list[Batch]) -> Iterator[tuple[int, list]]:
            for batch in batches:
                if batch.number == 12 and not list(tmp_path.iterdir()):  # as on a machine out of memory
                    (tmp_path / str(os.getpid())).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield from super().caption([batch])

    asked = in_batches(mixture)
    want = dict(caption(job(checkpoint), asked))
    monkeypatch.setattr(stage, "Worker", Mortal)
    got = list(caption_on_ray(job(checkpoint, workers=2, max_failures=1), asked))
    assert sorted(number for number, _ in got) == sorted(want), "each batch once"
    for number, (answer,) in got:
        assert answer.caption == want[number][0].caption
        np.testing.assert_array_equal(answer.saliency, want[number][0].saliency)
    assert len(list(tmp_path.iterdir())) == 1, "one has died"
    said = capsys.readouterr().out
    assert "predict: a worker died (" in said
    assert "unanswered batches go to new workers (failure 1 of 1 " in said
    assert not ray.is_initialized()


class Remote:
    """Stands for a Ray: what it is asked for, what each worker is dealt. A mortal one dies at its second batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, Any] = {}
        self.dealt: list[list[int]] = []
        self.mortal, self.killed = False, 0
        nodes = [{"Alive": True, "Resources": {"CPU": 3 * 5, "GPU": 5}, "NodeManagerAddress": "10.0.0.7"}]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setattr(stage, "ROOM_S", 0)
        monkeypatch.setattr(ray, "remote", self.remote)
        monkeypatch.setattr(ray, "kill", self.kill)
        monkeypatch.setattr(ray, "wait", lambda refs, num_returns: (refs[:num_returns], refs[num_returns:]))
        monkeypatch.setattr(stage, "start_ray", lambda compute: None)
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        monkeypatch.setattr(ray, "get", lambda refs: refs)

    def remote(self, **given: Any) -> Any:
        self.asked.update(given)
        actor = SimpleNamespace(caption=SimpleNamespace(remote=self.caption))
        return lambda kind: SimpleNamespace(remote=lambda job: actor)

    def kill(self, worker: Any) -> None:
        self.killed += 1

    def caption(self, part: list[Batch]) -> Iterator[tuple[int, list]]:
        self.dealt.append([batch.number for batch in part])
        return self.answers(part)

    def answers(self, part: list[Batch]) -> Iterator[tuple[int, list]]:
        for at, batch in enumerate(part):
            if self.mortal and at == 1:
                raise ray.exceptions.ActorDiedError
            yield batch.number, [Answer(f"of {batch.number}", None) for _ in batch.pairs]


@pytest.mark.parametrize("gpu", [False, True])
def test_each_worker_is_placed_with_its_device_or_refused(gpu, checkpoint, mixture, monkeypatch):
    fake, asked = Remote(monkeypatch), in_batches(mixture)
    made = list(caption_on_ray(job(checkpoint, workers=2, cpus_per_worker=3, gpu=gpu), asked))
    assert sorted(made) == [(number, [(f"of {number}", None)]) for number in range(10, 15)]
    environment = {"env_vars": stage.environment(gpu)}
    assert fake.asked == {"num_cpus": 3, "num_gpus": int(gpu), "runtime_env": environment}
    assert (fake.dealt, fake.killed) == ([[10, 12, 14], [11, 13]], 2), "room is given back"
    fake.dealt.clear()
    list(caption_on_ray(job(checkpoint, workers=8, cpus_per_worker=3), asked))
    assert fake.dealt == [[10], [11], [12], [13], [14]], "no worker without work, and no room is asked for it"
    with pytest.raises(ParamsError, match=r"^compute.workers: .*2 of 3 workers: a worker needs 6 CPU; 10.* has 15 CPU"):
        list(caption_on_ray(job(checkpoint, workers=3, cpus_per_worker=6), asked))
    monkeypatch.setattr(stage, "load", lambda job: None)
    monkeypatch.setattr(stage, "answers_of", lambda *_: "here")
    for count, with_gpu in ((0, True), (2, False), (0, False)):
        assert caption(job(checkpoint, workers=count, gpu=with_gpu), asked) == "here", "Ray is for GPUs alone"

    def changed(refs: Any) -> None:
        raise ray.exceptions.RayTaskError("caption", "a traceback", DataError("a.png: changed"))

    monkeypatch.setattr(ray, "get", changed)
    with pytest.raises(DataError, match=r"^a\.png: changed$"):
        list(caption_on_ray(job(checkpoint, workers=2), asked))


def test_what_dead_workers_left_is_dealt_again_until_too_many_died(model, mixture, tmp_path, monkeypatch):
    fake, cfg, out = Remote(monkeypatch), settings(batch_pairs=1), tmp_path / "out"
    how, fake.mortal = compute(out, workers=1, max_failures=4), True
    monkeypatch.setattr(stage, "caption", caption_on_ray)
    with pytest.raises(ConnectionError, match="a worker died .*max_failures: 4 .* run `m3diff predict` again: what is"):
        predict(cfg, how, mixture, model, out)
    assert (fake.killed, fake.dealt) == (5, [list(range(at, 15)) for at in range(5)])
    fake.mortal = False
    predict(cfg, how, mixture, model, out)
    assert fake.dealt[5:] == [list(range(5, 15))]
    rows = [row for name in ("", "_reversed") for row in json.loads((out / f"predictions{name}.json").read_text())]
    assert {int(row["caption"].removeprefix("of ")) for row in rows} == {*range(5), *range(10, 15)}


def test_ray_is_ended_whatever_happens(checkpoint, mixture, monkeypatch):
    ended: list[str] = []
    monkeypatch.setattr(stage, "start_ray", lambda compute: ended.append("start"))
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("shutdown"))
    monkeypatch.setattr(stage, "_as_they_come", lambda *_: iter([1 / 0] if ended else []))
    with pytest.raises(ZeroDivisionError):
        list(caption_on_ray(job(checkpoint, workers=2), in_batches(mixture)))
    assert ended == ["start", "shutdown"]
