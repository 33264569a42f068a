"""Captioning in this process and in Ray workers: precision, fused modules, and workers that die."""

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from PIL import Image

from m3diff.images.open import ImageError, load_image
from m3diff.models.checkpoint import read_manifest, write_manifest
from m3diff.models.contract import Prepared, Takes
from m3diff.models.device import DeviceError
from m3diff.models.fused import FusedDecoderLayer, FusedRMSNorm
from m3diff.models.generation import load_captioner
from m3diff.records.errors import DataError, Fault, ParamsError, ValueFault
from m3diff.records.sample import ImageRef, Turn
from m3diff.stages.predict import stage
from m3diff.stages.predict.image_queue import ImageQueue
from m3diff.stages.predict.stage import (
    PREPARED_BATCHES,
    Batch,
    CaptionJob,
    Prediction,
    PredictionItem,
    WorkersDiedError,
    caption_batches,
    caption_in_order,
    caption_on_ray,
    check_items,
    predict,
    prepare_images,
    read_test_items,
    split_into_batches,
)
from tests.errors import raises
from tests.prepared_sets import SET_BYTES, PreparedSets
from tests.stages.predict.conftest import ORDER, compute, settings, write_test_split


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Path:
    return model / "checkpoint"


def in_batches(mixture: Path, size: int = 1) -> list[Batch]:
    batches = split_into_batches(read_test_items(mixture), size, Processor())
    return [Batch(10 + number, items, number % 2 == 0) for number, items in enumerate(batches)]


def job(checkpoint: Path, **changes: Any) -> CaptionJob:
    return CaptionJob(checkpoint, 5, compute(checkpoint, **changes))


class Processor:
    """A processor that only counts the images. A prompt has a token per character of the question."""

    def __init__(self) -> None:
        self.prepared = 0
        self.lock = threading.Lock()

    def prepare(self, images: Iterable[Image.Image]) -> Prepared:
        pixels = [torch.from_numpy(np.array(image)) for image in images]
        with self.lock:
            self.prepared += len(pixels)
        return Prepared({"pixels": torch.stack(pixels)}, self.marks(len(pixels)))

    def marks(self, images: int) -> tuple[str, ...]:
        return ("",) * images

    def encode_prompt(self, turns: Sequence[Turn], marks: Sequence[str]) -> tuple[int, ...]:
        (turn,) = turns
        return (0,) * len(turn.question)


def item_of(number: int, images: int, *questions: str) -> PredictionItem:
    return PredictionItem(f"toy/{number}", (ImageRef("a.png"),) * images, tuple(map(Turn, questions)))


def test_batches_have_one_shape_and_keep_the_order_of_the_items():
    lengths = ["long question", "why?", "how?", "long answer !", "who?", "why?"]
    items = [item_of(number, 2, question) for number, question in enumerate(lengths)]
    items.insert(2, item_of(6, 1, "why?"))
    batches = split_into_batches(items, 3, Processor())
    names = [[item.id.removeprefix("toy/") for item in batch] for batch in batches]
    assert names == [["0", "3"], ["1", "2", "4"], ["5"], ["6"]]


NOT_TAKEN = [
    (item_of(1, 1, "a?"), Takes(images=(2,)), Fault("models.images_not_taken", value=1, expected="2 images")),
    (item_of(1, 2, "a?", "b?", "c?"), Takes(turns=False), Fault("models.history_not_read", value=2)),
]


@pytest.mark.parametrize(("item", "takes", "cause"), NOT_TAKEN, ids=["images", "turns"])
def test_a_record_that_the_family_cannot_process_is_refused_by_its_id(item, takes, cause):
    with raises(DataError, "predict.record_not_taken", name="toy/1", cause=cause.problem):
        check_items([item_of(0, 2, "a?"), item], takes)


def test_a_family_that_reads_no_questions_answers_every_record():
    check_items([item_of(0, 2, "a?")], Takes(images=(2,), questions=False, turns=False))


class FaultyProcessor(Processor):
    """A processor that can neither encode the question `bad?` nor prepare images."""

    fault = Fault("models.images_not_taken", value=1, expected="2 images")

    def prepare(self, images: Iterable[Image.Image]) -> Prepared:
        raise ValueFault(self.fault)

    def encode_prompt(self, turns: Sequence[Turn], marks: Sequence[str]) -> tuple[int, ...]:
        if turns[-1].question == "bad?":
            raise ValueFault(self.fault)
        return super().encode_prompt(turns, marks)


def test_a_question_that_cannot_be_encoded_is_refused_with_its_record():
    items = [item_of(0, 2, "a?"), item_of(1, 2, "bad?")]
    with raises(DataError, "predict.unusable_question", name="toy/1", cause=FaultyProcessor.fault):
        split_into_batches(items, 1, FaultyProcessor())


def test_images_that_the_model_cannot_process_are_refused_with_their_record(mixture):
    batches = in_batches(mixture)
    with raises(DataError, "predict.unusable_images", name=batches[0].items[0].id, cause=FaultyProcessor.fault):
        list(prepare_images(batches, FaultyProcessor(), threads=1))


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert is_true()


def test_images_are_prepared_two_batches_ahead(mixture):
    processor = Processor()
    stream = prepare_images(in_batches(mixture), processor, threads=2)
    next(stream)
    wait_until(lambda: processor.prepared >= 2 * (1 + PREPARED_BATCHES))
    stream.close()  # waits for the threads
    assert processor.prepared == 2 * (1 + PREPARED_BATCHES)


def test_the_threads_that_prepare_images_end_with_the_stream(mixture):
    threads = {*threading.enumerate()}
    stream = prepare_images(in_batches(mixture), Processor(), threads=2)
    next(stream)
    assert {*threading.enumerate()} - threads
    stream.close()
    assert not {*threading.enumerate()} - threads


def queue_of(sets: PreparedSets, max_ahead: int, max_sets: int) -> ImageQueue[int]:
    """Return a queue with one thread and memory for `max_sets` image sets."""
    return ImageQueue(lambda item: sets.prepare(()), range(50), 1, max_ahead, max_sets * SET_BYTES)


def test_the_next_images_are_prepared_as_soon_as_some_are_taken():
    sets = PreparedSets()
    queue = queue_of(sets, max_ahead=2, max_sets=10)
    queue.take()
    wait_until(lambda: sets.prepared == 3 and queue.being_prepared == 0)
    queue.take()
    wait_until(lambda: sets.prepared == 4)
    queue.close()


def test_the_next_images_are_prepared_as_soon_as_there_is_memory_for_them():
    sets = PreparedSets()
    queue = queue_of(sets, max_ahead=1, max_sets=1)
    queue.take()
    wait_until(lambda: queue.being_prepared == 0)
    assert sets.prepared == 1
    queue.release(SET_BYTES)
    wait_until(lambda: sets.prepared == 2)
    queue.close()


def wait_until_full(sets: PreparedSets, most_bytes: int, count: int) -> None:
    deadline = time.monotonic() + 20
    while sets.held_bytes < most_bytes and sets.prepared < count and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", [(), (10,), (5 * SET_BYTES, 10, 10)], ids=["equal", "small first", "large first"])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_prepared_images_take_no_more_memory_than_the_limit(size, sizes, threads, mixture, monkeypatch):
    monkeypatch.setattr(stage, "MAX_PREPARED_BYTES", 4 * SET_BYTES)
    sets: Any = PreparedSets(sizes)
    batches = [batch._replace(items=batch.items * 4) for batch in in_batches(mixture, size)]
    items = [item for batch in batches for item in batch.items]
    set_count = 0
    for _, prepared in prepare_images(batches, sets, threads):
        set_count += len(prepared)
        wait_until_full(sets, 4 * SET_BYTES, len(items))  # as if the model computed meanwhile
    assert set_count == sets.prepared == len(items)
    largest = max(*sizes, SET_BYTES) if sizes else SET_BYTES
    assert sets.peak_bytes < 4 * SET_BYTES + threads * largest
    assert sets.peak_bytes >= 4 * SET_BYTES, "nothing was prepared ahead"
    del prepared
    assert sets.held_bytes == 0


def test_a_batch_above_the_limit_is_answered_in_parts(mixture, monkeypatch):
    monkeypatch.setattr(stage, "MAX_PREPARED_BYTES", 4 * SET_BYTES)
    parts = []

    def answer(prepared: list[Prepared], dialogues: list[Any], saliency: bool) -> Any:
        questions = [turns[-1].question for turns in dialogues]
        parts.append((len(prepared), questions, saliency))
        return [question.upper() for question in questions], None

    items = [item._replace(turns=(Turn(name),)) for item, name in zip(read_test_items(mixture), "abcd", strict=False)]
    batches = [Batch(10, items[:3], saliency=True), Batch(11, items[1:], saliency=False)]
    captioner: Any = SimpleNamespace(processor=PreparedSets(), answer=answer)
    predictions = dict(caption_in_order(captioner, batches, 2))
    assert parts == [(2, ["a", "b"], True), (1, ["c"], True), (2, ["b", "c"], False), (1, ["d"], False)]
    assert [prediction.caption for prediction in predictions[10]] == ["A", "B", "C"]
    assert [prediction.caption for prediction in predictions[11]] == ["B", "C", "D"]


def test_an_image_that_cannot_be_read_ends_the_preparation(tmp_path):
    broken = write_test_split(tmp_path / "mixture")
    (broken / f"{ORDER[0]}_before.png").unlink()
    with raises(DataError, "images.unreadable", path=str(broken / f"{ORDER[0]}_before.png")):
        list(prepare_images(in_batches(broken), Processor(), threads=1))


@pytest.mark.parametrize(("dtype", "want"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_checkpoint_captions_in_the_precision_of_its_own_weights(dtype, want, checkpoint, mixture, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    config = json.loads((folder / "config.json").read_text()) | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    write_manifest(folder, **{name: value for name, value in read_manifest(folder).items() if name != "files"})
    assert {parameter.dtype for parameter in stage.load_model(job(folder)).model.parameters()} == {want}
    (_, [prediction]), *_ = caption_batches(job(folder), in_batches(mixture)[:1])
    assert prediction.saliency.dtype == np.float16


@pytest.mark.fault("11")
def test_a_gpu_that_is_asked_for_and_not_there_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError):
        stage.load_model(job(checkpoint, gpu=True))


def test_modules_are_fused_as_in_training_and_the_captions_stay(checkpoint, mixture):
    stock = load_captioner(checkpoint, 5)
    kinds = [
        {type(module) for module in captioner.model.modules()}
        for captioner in (stage.load_model(job(checkpoint)), stock)
    ]
    assert {FusedRMSNorm, FusedDecoderLayer} <= kinds[0]
    assert not {FusedRMSNorm, FusedDecoderLayer} & kinds[1]
    batches = in_batches(mixture, size=2)
    for batch, (number, predictions) in zip(batches, caption_batches(job(checkpoint), batches), strict=True):
        prepared = [stock.processor.prepare(load_image(*image) for image in item.images) for item in batch.items]
        captions, maps = stock.answer(prepared, [item.turns for item in batch.items], saliency=True)
        assert number == batch.number
        assert [prediction.caption for prediction in predictions] == captions
        saliency_maps = [prediction.saliency for prediction in predictions]
        if batch.saliency:
            np.testing.assert_allclose(saliency_maps, maps, atol=1e-3)
        else:
            assert saliency_maps == [None] * len(captions)


def test_a_worker_loads_the_model_and_captions_its_batches_in_order(checkpoint, mixture):
    batches = in_batches(mixture)[:2]
    worker_predictions = list(stage.CaptionWorker(job(checkpoint)).caption(batches))
    assert [number for number, _ in worker_predictions] == [10, 11]
    assert [len(predictions) for _, predictions in worker_predictions] == [1, 1]


def test_images_are_prepared_in_threads_that_compute_alone():
    counts: list[int] = []
    sets: Any = PreparedSets()
    torch.set_num_threads(2)
    try:
        queue = ImageQueue(
            lambda item: counts.append(torch.get_num_threads()) or sets.prepare(()), [0], 1, 1, SET_BYTES
        )
        queue.take()
        queue.close()
        assert counts == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)  # as in every test


def test_a_worker_computes_with_as_many_threads_as_it_has_cpus(checkpoint, mixture, monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(stage, "load_model", lambda job: None)
    monkeypatch.setattr(stage, "caption_in_order", lambda model, batches, count: iter(threads + [count]))
    worker = stage.CaptionWorker(job(checkpoint, cpus_per_worker=3))
    assert list(worker.caption(in_batches(mixture))) == [3, 3]


@pytest.mark.slow(15)
def test_a_worker_s_data_error_is_the_stage_s(checkpoint, tmp_path):
    broken = write_test_split(tmp_path / "mixture")
    (broken / "3_after.png").write_bytes(b"no image")
    with raises(ImageError, "images.changed_since_ingest", path=str(broken / "3_after.png")) as refused:
        list(caption_on_ray(job(checkpoint, workers=2), in_batches(broken)))
    assert "Traceback" not in str(refused.value)


@pytest.mark.slow(25)
def test_what_a_dead_worker_left_is_answered_once(checkpoint, mixture, tmp_path, monkeypatch, capsys):
    """The captions are those of a single process."""

    class Mortal(stage.CaptionWorker):
        def caption(self, batches: list[Batch]) -> Iterator[tuple[int, list]]:
            for batch in batches:
                if batch.number == 12 and not list(tmp_path.iterdir()):  # as on a machine out of memory
                    (tmp_path / str(os.getpid())).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield from super().caption([batch])

    all_batches = in_batches(mixture)
    expected = dict(caption_batches(job(checkpoint), all_batches))
    monkeypatch.setattr(stage, "CaptionWorker", Mortal)
    actual = list(caption_on_ray(job(checkpoint, workers=2, max_failures=1), all_batches))
    assert sorted(number for number, _ in actual) == sorted(expected), "each batch once"
    for number, (answer,) in actual:
        assert answer.caption == expected[number][0].caption
        np.testing.assert_array_equal(answer.saliency, expected[number][0].saliency)
    assert len(list(tmp_path.iterdir())) == 1, "one has died"
    output = capsys.readouterr().out
    assert "predict: a worker died (" in output
    assert " batches (failure 1 of 1 " in output
    assert not ray.is_initialized()


class FakeRay:
    """A replacement for Ray that records requests. Its workers answer at once.

    Attributes:
        options: resources and environment that an actor was created with.
        dealt: numbers of the batches that each worker got.
        dies: whether each worker dies at its second batch.
        killed: number of workers that were killed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: dict[str, Any] = {}
        self.dealt: list[list[int]] = []
        self.dies = False
        self.killed = 0
        nodes = [{"Alive": True, "Resources": {"CPU": 3 * 5, "GPU": 5}, "NodeManagerAddress": "10.0.0.7"}]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setattr(stage, "NODES_TIMEOUT_S", 0)
        monkeypatch.setattr(ray, "remote", self.remote)
        monkeypatch.setattr(ray, "kill", self.kill)
        monkeypatch.setattr(ray, "wait", lambda refs, num_returns: (refs[:num_returns], refs[num_returns:]))
        monkeypatch.setattr(stage, "start_ray", lambda compute: None)
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        monkeypatch.setattr(ray, "get", lambda refs: refs)

    def remote(self, **options: Any) -> Any:
        self.options.update(options)
        actor = SimpleNamespace(caption=SimpleNamespace(remote=self.caption))
        return lambda actor_class: SimpleNamespace(remote=lambda job: actor)

    def kill(self, worker: Any) -> None:
        self.killed += 1

    def caption(self, batches: list[Batch]) -> Iterator[tuple[int, list]]:
        self.dealt.append([batch.number for batch in batches])
        return self.predictions(batches)

    def predictions(self, batches: list[Batch]) -> Iterator[tuple[int, list]]:
        for position, batch in enumerate(batches):
            if self.dies and position == 1:
                raise ray.exceptions.ActorDiedError
            yield batch.number, [Prediction(f"of {batch.number}", None) for _ in batch.items]


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


@pytest.mark.parametrize("gpu", [False, True])
def test_each_worker_is_placed_with_its_cpus_and_its_device(gpu, checkpoint, mixture, fake_ray):
    list(caption_on_ray(job(checkpoint, workers=2, cpus_per_worker=3, gpu=gpu), in_batches(mixture)))
    environment = {"env_vars": stage.process_environment(gpu)}
    assert fake_ray.options == {"num_cpus": 3, "num_gpus": int(gpu), "runtime_env": environment}


def test_batches_are_dealt_in_turn_and_every_one_is_captioned(checkpoint, mixture, fake_ray):
    predictions = list(caption_on_ray(job(checkpoint, workers=2, cpus_per_worker=3), in_batches(mixture)))
    assert sorted(predictions) == [(number, [(f"of {number}", None)]) for number in range(10, 15)]
    assert fake_ray.dealt == [[10, 12, 14], [11, 13]]
    assert fake_ray.killed == 2, "their room is given back"


def test_no_worker_is_without_work_and_none_is_waited_for(checkpoint, mixture, fake_ray):
    list(caption_on_ray(job(checkpoint, workers=8, cpus_per_worker=3), in_batches(mixture)))
    assert fake_ray.dealt == [[10], [11], [12], [13], [14]]


def test_workers_that_the_nodes_cannot_hold_are_refused(checkpoint, mixture, fake_ray):
    with raises(ParamsError, "predict.no_room_for_workers") as refused:
        list(caption_on_ray(job(checkpoint, workers=3, cpus_per_worker=6), in_batches(mixture)))
    numbers = re.findall(r"\b(?:2|3|6|15)\b", str(refused.value.fields["cause"]))
    assert set(numbers) == {"2", "3", "6", "15"}, "room for 2 of 3 workers of 6 CPUs; a node has 15"


@pytest.mark.parametrize(("workers", "gpu"), [(0, True), (2, False), (0, False)])
def test_ray_is_used_for_workers_with_gpus_alone(workers, gpu, checkpoint, mixture, monkeypatch):
    monkeypatch.setattr(stage, "load_model", lambda job: None)
    monkeypatch.setattr(stage, "caption_in_order", lambda *_: "in this process")
    assert caption_batches(job(checkpoint, workers=workers, gpu=gpu), in_batches(mixture)) == "in this process"


def test_workers_with_gpus_caption_the_batches(checkpoint, mixture, fake_ray):
    predictions = list(caption_batches(job(checkpoint, workers=2, gpu=True, cpus_per_worker=3), in_batches(mixture)))
    assert sorted(number for number, _ in predictions) == list(range(10, 15))
    assert len(fake_ray.dealt) == 2


def test_the_line_about_a_dead_worker_counts_the_batches_left_and_the_failures(checkpoint, mixture, fake_ray, capsys):
    fake_ray.dies = True
    list(caption_on_ray(job(checkpoint, workers=1, cpus_per_worker=3, max_failures=4), in_batches(mixture)[:3]))
    lines = [line for line in capsys.readouterr().out.splitlines() if "a worker died" in line]
    assert len(lines) == 2
    assert " 2 batches (failure 1 of 4 " in lines[0]
    assert " 1 batch (failure 2 of 4 " in lines[1]


def test_an_error_of_a_worker_is_raised_as_it_is(checkpoint, mixture, fake_ray, monkeypatch):
    def fail(refs: Any) -> None:
        raise ray.exceptions.RayTaskError("caption", "a traceback", DataError("images.video", path="a.png"))

    monkeypatch.setattr(ray, "get", fail)
    with raises(DataError, "images.video", path="a.png"):
        list(caption_on_ray(job(checkpoint, workers=2), in_batches(mixture)))


def test_what_dead_workers_left_is_dealt_again_until_too_many_died(model, mixture, tmp_path, fake_ray, monkeypatch):
    cfg = settings(batch_pairs=1)
    out = tmp_path / "out"
    one_worker = compute(out, workers=1, max_failures=4)
    fake_ray.dies = True
    monkeypatch.setattr(stage, "caption_batches", caption_on_ray)
    with raises(WorkersDiedError, "predict.workers_died", limit=4):
        predict(cfg, one_worker, mixture, model, out)
    assert fake_ray.killed == 5
    assert fake_ray.dealt == [list(range(start, 15)) for start in range(5)]
    fake_ray.dies = False
    predict(cfg, one_worker, mixture, model, out)
    assert fake_ray.dealt[5:] == [list(range(5, 15))]
    rows = [row for name in ("", "_reversed") for row in json.loads((out / f"predictions{name}.json").read_text())]
    assert {int(row["caption"].removeprefix("of ")) for row in rows} == {*range(5), *range(10, 15)}


def test_a_batch_with_too_few_answers_ends_the_stage(model, mixture, tmp_path, monkeypatch):
    def leave_one_out(job: CaptionJob, batches: list[Batch]) -> Iterator[tuple[int, list[Any]]]:
        for number, predictions in caption_batches(job, batches):
            yield number, predictions[:-1]

    monkeypatch.setattr(stage, "caption_batches", leave_one_out)
    with pytest.raises(ValueError, match="shorter"):
        predict(settings(), compute(tmp_path), mixture, model, tmp_path / "out")


def test_ray_is_ended_whatever_happens(checkpoint, mixture, monkeypatch):
    ended: list[str] = []
    monkeypatch.setattr(stage, "start_ray", lambda compute: ended.append("start"))
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("shutdown"))
    monkeypatch.setattr(stage, "_caption_with_new_workers", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(caption_on_ray(job(checkpoint, workers=2), in_batches(mixture)))
    assert ended == ["start", "shutdown"]
