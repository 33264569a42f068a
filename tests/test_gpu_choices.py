"""Every choice that a GPU takes, on a CPU: bf16, FlexAttention's rule, two workers and each ZeRO stage, from the first
step through a killed run, its resumption, the export and prediction to the scores."""

import io
import json
import os
import signal
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from m3diff.models import FAMILIES
from m3diff.models.checkpoint import verify_manifest
from m3diff.models.tuning import parameter_counts
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.stages.predict.params import Predict
from m3diff.stages.predict.stage import predict
from m3diff.stages.train import loop
from m3diff.stages.train.state import checkpoints
from tests.conftest import MadeOnce
from tests.scoring import bench
from tests.stages.train.ranks import start
from tests.stages.train.toy import Recipe, read_curve, recipe, write_mixture
from tests.tiny import tiny_base

WHOLE, SHORT, STEPS_PER_EPOCH = 30, 5, 3
GPU_CHOICES = {"precision": "bf16", "attention": "flex", "micro_batch": 1}
CHOSEN = "BlockMask, a multiple of 128"


class Part(NamedTuple):
    """One run of two workers in `folder`; the first is killed before step `killed_at` (from 0)."""

    folder: Path
    made: Recipe
    killed_at: int | None = None


def two_workers(mixture: Path, parts: list[Part]) -> list[int | None]:
    """Run the parts in their order, in two processes. Their exit codes; the second is ended where the first was
    killed."""
    for part in parts:
        part.folder.mkdir(parents=True, exist_ok=True)
    workers = start(work, mixture, parts)
    workers[0].join(600)
    if workers[0].exitcode:
        workers[1].kill()
    workers[1].join(60)
    return [worker.exitcode for worker in workers]


def work(rank: int, mixture: Path, parts: list[Part]) -> None:
    for number, part in enumerate(parts):
        take_part(rank, mixture, part, f"{number} {os.getppid()}")


def take_part(rank: int, mixture: Path, part: Part, store: str) -> None:
    import torch.distributed as dist

    from m3diff.stages.train.job import Job, Runtime, end_distributed

    folder, made = part.folder, part.made
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    (folder / "store").mkdir(exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store' / store}", rank=rank, world_size=2)
    job, said = Job(made.cfg, made.model, made.compute, mixture, folder, folder, ""), io.StringIO()
    step_of_loop = loop.Training.step

    def step(run: Any, number: int, batches: Any) -> None:
        if number == part.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        step_of_loop(run, number, batches)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.setattr(loop.Training, "step", step)
        seen = watch_masks(patch)
        figures = loop.run_loop(job, Runtime(rank, 2))
    if rank == 0:
        (folder / "log").write_text(said.getvalue())
        (folder / "masks.json").write_text(json.dumps(seen))
        (folder / "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    end_distributed()


def watch_masks(patch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The kinds of mask and length that reach the LLM in training and in validation."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

    seen: dict[str, list[str]] = {"training": [], "validation": []}
    forward = Qwen2Model.forward

    def watched(self: Any, *given: Any, **named: Any) -> Any:
        if named["inputs_embeds"].is_meta:  # FLOPs are counted
            return forward(self, *given, **named)
        length = "" if named["inputs_embeds"].shape[1] % 128 else ", a multiple of 128"
        kind = f"{type(named['attention_mask']).__name__}{length}"
        kinds = seen["training" if self.training else "validation"]
        if kind not in kinds:
            kinds.append(kind)
        return forward(self, *given, **named)

    patch.setattr(Qwen2Model, "forward", watched)
    return seen


class Done(NamedTuple):
    """What a run left behind."""

    weights: dict[str, torch.Tensor]
    losses: list[float]
    said: str
    masks: dict[str, list[str]]
    parameters: dict[str, int]


def done(folder: Path) -> Done:
    figures = json.loads((folder / "figures.json").read_text())
    counts = {name: figures[f"parameters_{name}"] for name in ("trainable", "frozen")}
    return Done(
        weights=load_file(folder / "checkpoint" / "model.safetensors"),
        losses=[float(row["loss"]) for row in read_curve(folder)],
        said=(folder / "log").read_text(),
        masks=json.loads((folder / "masks.json").read_text()),
        parameters=counts | figures["parameters"],
    )


class Place(NamedTuple):
    """The base, the mixture, and the records that its test pairs are scored by."""

    root: Path
    base: Path
    mixture: Path
    folders: bench.Folders

    def part(self, name: str, steps: int, killed_at: int | None = None, **changes: Any) -> Part:
        made = recipe(self.base, epochs=steps / STEPS_PER_EPOCH, **{**GPU_CHOICES, **changes})
        return Part(self.root / name, made, killed_at)


@pytest.fixture(scope="module")
def place(made_once: MadeOnce) -> Place:
    root = made_once("gpu-choices", make_place)
    return Place(root, root / "base", root / "mixture", bench.folders_in(root / "bench"))


def make_place(root: Path) -> None:
    mixture = write_mixture(root / "mixture", {"train": {"toy": 10}, "val": {"toy": 3, "second": 2}})
    folders = bench.write(root / "bench")
    rows = [
        {name: record[name] for name in ("dataset", "split", "before", "after", "before_sha256", "after_sha256")}
        | {"pair": record["id"], "id": f"{record['id']}#{k}", "question": "What changed?", "reference": text}
        for record in pl.read_parquet(folders.clean / "records.parquet").to_dicts()
        if record["split"] == "test"
        for k, text in enumerate(record["references"])
    ]
    (mixture / "test").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, SAMPLE_SCHEMA), mixture / "test" / "00000.parquet")
    base = tiny_base(root / "base")
    weights = load_file(base / "model.safetensors")
    (head,) = [name for name in weights if name.endswith("lm_head.weight")]
    weights[head] = weights[head] * 10  # so large that the loss tells of every token that the LLM sees
    save_file(weights, base / "model.safetensors", {"format": "pt"})


@pytest.mark.slow(60)
def test_zero_stages_train_alike_in_bf16_and_every_mask_is_our_own(place: Place) -> None:
    """ZeRO 3 comes last: DeepSpeed then replaces torch's `linear` of the process by one that rounds otherwise."""
    stages = (0, 1, 2, 3)
    parts = [place.part(f"zero {stage}", SHORT, zero_stage=stage, checkpoint_every_steps=2) for stage in stages]
    assert two_workers(place.mixture, parts) == [0, 0]
    made, family = place.part("counted", SHORT).made, FAMILIES["m3diff"]
    model, _ = loop.prepare_model(made.cfg, made.model, made.compute, family)
    first = done(place.root / "zero 0")
    for part in parts:
        found = done(part.folder)
        assert found.masks == {"training": [CHOSEN], "validation": [CHOSEN]}, part
        assert found.losses == pytest.approx(first.losses, rel=1e-4), part
        assert found.parameters == parameter_counts(model, family), part


@pytest.mark.parametrize(
    "stage", [pytest.param(1, marks=pytest.mark.slow(70)), pytest.param(3, marks=pytest.mark.slow(130))]
)
def test_a_run_is_killed_resumed_exported_and_its_captions_are_scored(stage: int, place: Place) -> None:
    """Thirty steps, a checkpoint each seventh, the first worker killed by signal 9 after seventeen."""
    how = {"zero_stage": stage, "checkpoint_every_steps": 7}
    name = f"killed {stage}"
    ending = [place.part(f"whole {stage}", WHOLE, **how), place.part(name, WHOLE, killed_at=17, **how)]
    assert two_workers(place.mixture, ending)[0] == -signal.SIGKILL
    assert not (place.root / name / "checkpoint").exists()
    assert [path.name for path in checkpoints(place.root / name)] == ["step-00000007", "step-00000014"]
    assert two_workers(place.mixture, [place.part(name, WHOLE, **how)]) == [0, 0]
    whole, resumed = done(place.root / f"whole {stage}"), done(place.root / name)
    assert "resumed after step 14 of 30" in resumed.said
    assert resumed.losses == whole.losses
    assert whole.losses[-1] < whole.losses[0] - 0.1
    assert resumed.weights.keys() == whole.weights.keys()
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())
    assert {weight.dtype for weight in resumed.weights.values()} == {torch.bfloat16}
    assert verify_manifest(place.root / name / "checkpoint")["family"] == "m3diff"
    captioned_and_scored(place, place.root / name)


def captioned_and_scored(place: Place, model: Path) -> None:
    """Predict with the checkpoint in `model`, and score what it says."""
    out = model / "predictions"
    cfg = Predict(batch_pairs=2, max_new_tokens=5, limit=0)
    compute = bench.compute(scratch=str(model / "scratch"))
    report = predict(cfg, compute, place.mixture, model, out)
    assert (report.rows_out, report.control) == (6, 6)
    with np.load(out / "saliency.npz") as saliency:
        assert saliency["ids"].tolist() == [f"toy/{number}" for number in range(6)]
        np.testing.assert_allclose(saliency["maps"].astype(float).sum((1, 2)), 1, atol=1e-2)
    folders = place.folders._replace(predictions=out)
    bench.run(folders, model / "report", metrics=("CIDEr", "change_accuracy"))
    metrics = json.loads((model / "report" / "metrics.json").read_text())
    captions = json.loads((out / "predictions.json").read_text())
    scores = pl.read_parquet(model / "report" / "scores.parquet")
    assert metrics["rows_out"] == len(captions) == 6
    assert dict(zip(scores["id"], scores["prediction"], strict=True)) == {
        row["image_id"]: row["caption"] for row in captions
    }
    assert 0 <= metrics["protocols"]["toy/test"]["CIDEr"] == pytest.approx(scores["CIDEr"].mean())
