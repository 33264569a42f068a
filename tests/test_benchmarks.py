"""The benchmarks run and compare the same work: the same rows, trainable tensors and losses on every side."""

import json
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.tiny import one_thread  # noqa: F401  # pytest finds it by its name

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bench():
    from benchmarks.ablation import tiny
    from benchmarks.levers import Bench

    return Bench(tiny(pairs=2), gpu=False, precision="fp32")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory):
    from benchmarks.sides import embedded_job, write_mixture

    folder = tmp_path_factory.mktemp("sides")
    write_mixture(folder, pairs=3, side=72)
    return embedded_job(folder, 1, (15, 5), threads=1)


def test_every_variant_trains_the_same_references_to_the_same_loss(bench):
    from benchmarks.ablation import ABLATION, GPU_ROWS

    losses = {}
    for variant in ABLATION + tuple(row for row in GPU_ROWS if not row.compiled):
        bench.take(variant)
        losses[variant.name] = bench.run(variant)
    without = losses.pop("stock without MDP")
    assert list(losses.values()) == pytest.approx([losses["stock"]] * 17, rel=1e-5)
    assert without == pytest.approx(losses["stock"], rel=0.05)  # a new module is zero-initialised, or nearly
    assert bench.size.captions == 10


def test_losses_that_differ_are_refused(bench):
    from benchmarks.ablation import ABLATION
    from benchmarks.levers import Measured, check_losses

    measured = [Measured(ABLATION[0], 2.0), Measured(ABLATION[1], 2.0001)]
    check_losses(measured, "fp32")
    with pytest.raises(AssertionError, match="stock: loss 2.001"):
        check_losses([measured[0], Measured(ABLATION[1], 2.001)], "fp32")


def test_the_measured_step_trains_what_the_papers_recipe_trains(bench):
    from components.models.m3diff.family import M3DIFF
    from components.models.tuning import trainable_groups

    groups = trainable_groups(bench.adapted, M3DIFF, bench.size.settings)
    assert [(group.parts, group.lr) for group in groups] == [
        (("vision",), 2e-6),
        (("module", "projector", "llm"), 1e-5),
    ]
    before = [weight.detach().clone() for weight in bench.optimizer.weights]
    for weight in bench.optimizer.weights:
        weight.grad = weight.detach().sign() + 0.5
    bench.optimizer.step()
    assert all(not was.equal(weight) for was, weight in zip(before, bench.optimizer.weights, strict=True))


@pytest.mark.parametrize("free_gb", [20.0, 24.0, 30.0])
def test_as_many_layers_as_fit_and_no_more(free_gb: float) -> None:
    from benchmarks.ablation import seven_b
    from benchmarks.levers import ACTIVATIONS_GB, LAYER_ACTIVATIONS_GB, RESERVE_GB, fitting_layers, static_gb

    def needed(layers: int) -> float:
        return static_gb(seven_b(layers)) + ACTIVATIONS_GB + layers * LAYER_ACTIVATIONS_GB + RESERVE_GB

    layers = fitting_layers(free_gb)
    assert needed(layers) <= free_gb < needed(layers + 1)


def test_a_gpu_too_small_for_one_layer_is_refused_and_a_large_one_takes_all() -> None:
    from benchmarks.levers import fitting_layers

    with pytest.raises(MemoryError, match="7B shapes need 1[0-9] GB, 8 are free"):
        fitting_layers(8.0)
    assert fitting_layers(80.0) == 28


def test_the_peer_trains_the_same_tensors_from_the_same_numbers_by_stock_modules(job) -> None:
    from benchmarks.peer import stock_model
    from components.models import FAMILIES
    from components.models.tuning import trainable_names, unwrapped
    from components.train.loop import prepare_model

    peer, _ = stock_model(job)
    own, _ = prepare_model(job.cfg, job.model, job.compute, FAMILIES["m3diff"])
    assert trainable_names(peer) == trainable_names(own)
    weights = dict(unwrapped(own).named_parameters())
    assert all(weight.equal(weights[name]) for name, weight in unwrapped(peer).named_parameters())
    kinds = {type(module).__module__ for module in peer.modules()}
    assert {kind for kind in kinds if kind.startswith("components.")} == {"components.models.m3diff.mdp"}


def test_the_peer_reads_the_rows_in_the_order_of_unpacked_training(job) -> None:
    from benchmarks.peer import trainer_for
    from components.train.batches import Loader, Schedule
    from components.train.samples import read_training_samples

    trainer = trainer_for(job, False, [])
    samples = read_training_samples(job.mixture, job.run_dir)
    schedule = Schedule(samples, 1, job.cfg.seed, 15, 5, 100_000)
    wanted = Loader(samples, trainer.train_dataset.processor, threads=1)
    for step in (0, 2):
        ours = [int(rows[0]) for rows in schedule.global_sequences(step)]
        got = [trainer.train_dataset[15 * step + place]["labels"] for place in range(15)]
        references = [wanted.pairs_of(schedule.global_sequences(step)[place])[0][1] for place in range(15)]
        assert len(set(ours)) == 15
        assert [labels[labels >= 0].tolist() for labels in got] == references


def test_the_peers_batch_is_padded_on_the_right_and_masked() -> None:
    from benchmarks.peer import Collator

    rows = [
        {
            "input_ids": torch.arange(1, size + 1),
            "labels": torch.tensor([-100] + list(range(2, size + 1))),
            "pixel_values": torch.full((2, 3, 4, 4), float(size)),
        }
        for size in (3, 5)
    ]
    batch = Collator(pad_id=9)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9], [1, 2, 3, 4, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, -100], [-100, 2, 3, 4, 5]]
    assert batch["pixel_values"][:, 0, 0, 0].tolist() == [3, 3, 5, 5]
    assert batch["batch_num_images"].tolist() == [2, 2]


def test_sides_whose_losses_differ_are_refused() -> None:
    from benchmarks.sides import Side, assert_same_losses

    sides = [Side("peer", print, 1, losses=[2.0, 1.0]), Side("packed", print, 1, losses=[2.0, 1.0001])]
    assert_same_losses(sides)
    sides[1].losses[1] = 1.0003
    with pytest.raises(AssertionError, match="step 2: the loss of packed is 1.0003, of peer 1.0"):
        assert_same_losses(sides)


def dies(pipe: Connection) -> None:
    pipe.recv()


def test_a_side_whose_process_dies_is_named() -> None:
    from benchmarks.sides import Side

    side = Side("unpacked", dies, 1)
    side.start()
    with pytest.raises(RuntimeError, match="unpacked: its process ended"):
        side.ask(1)


def test_a_sides_figures_are_of_its_median_round() -> None:
    from benchmarks.sides import Side

    figures = Side("packed", print, 8, losses=[1.0], seconds=[2.0, 1.0, 4.0], steps=3).figures(captions=10)
    assert figures["captions_per_s"] == 15.0
    assert figures["spread"] == 1.5
    assert figures["rounds"] == [15.0, 30.0, 7.5]


def test_captions_to_score_are_like_clevr_changes_and_the_same_every_time() -> None:
    from benchmarks.score import make_captions

    captions = make_captions(400)
    assert captions == make_captions(400)
    assert captions != make_captions(400, seed=1)
    texts = [text.lower().rstrip(".").split() for several in captions["references"].values() for text in several]
    assert {len(several) for several in captions["references"].values()} == {5}
    assert 6 < sum(map(len, texts)) / len(texts) < 14
    assert len({word for text in texts for word in text}) < 100


def test_scores_that_differ_are_not_equal() -> None:
    from benchmarks.score import are_equal, differences

    one = {"groups": {"ROUGE-L": 0.5, "CIDEr": 1.0}, "pairs": {"ROUGE-L": [0.25, 0.75], "CIDEr": [0.0, 2.0]}}
    assert are_equal(differences(one, one))
    assert are_equal(differences(one, one | {"groups": {"ROUGE-L": 0.5, "CIDEr": 1.0 + 1e-10}}))
    assert not are_equal(differences(one, one | {"groups": {"ROUGE-L": 0.5, "CIDEr": 1.0 + 1e-8}}))
    assert not are_equal(differences(one, one | {"pairs": {"ROUGE-L": [0.25, 0.75 + 1e-15], "CIDEr": [0.0, 2.0]}}))


@pytest.mark.slow
def test_both_ways_of_scoring_give_every_score_alike(tmp_path: Path) -> None:
    result = run(tmp_path, "score.py", "--pairs", "40")
    assert result["equal"]
    assert result["scores"].keys() == {"BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "METEOR", "CIDEr"}
    assert 0.2 < result["scores"]["METEOR"] < 0.6
    assert result["stock_s"] > 0
    assert result["ours_s"] > 0


@pytest.mark.slow
def test_the_trainer_and_both_ways_of_the_project_train_to_the_same_losses(tmp_path: Path) -> None:
    result = run(tmp_path, "train.py", "--pairs", "2", "--repeats", "1", "--device", "cpu", "--threads", "1")
    assert {"peer", "peer_prepared", "unpacked", "packed"} <= result.keys()
    for name in ("unpacked", "packed", "peer_prepared"):
        assert result[name]["losses"] == pytest.approx(result["peer"]["losses"], rel=2e-4)
        assert result["ratios"][name] == result[name]["captions_per_s"] / result["peer"]["captions_per_s"]
    losses = result["peer"]["losses"]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]  # so equal losses are losses of models that learn
    assert result["packed"]["captions_per_s"] > result["peer"]["captions_per_s"]
    assert len(result["ablation"]) == 10
    assert not result["not_run"]


@pytest.mark.slow
def test_all_that_a_gpu_would_measure_runs_on_a_cpu(tmp_path: Path) -> None:
    result = run(tmp_path, "train.py", "--pairs", "2", "--repeats", "1", "--precision", "bf16", "--device", "cpu")
    names = {row["name"] for row in result["ablation"]} | set(result["not_run"])
    assert {"packed, flex, selective", "packed, flex, compiled", "unpacked, compiled"} <= names
    assert {row["name"] for row in result["ablation"]} >= {"packed, flex, full", "unpacked, selective"}
    flex = next(row for row in result["ablation"] if row["name"] == "packed, flex, none")
    assert flex["planned_gb"] > 0


@pytest.mark.slow
def test_the_generation_benchmark_runs_on_a_bare_machine_and_batches_change_no_token(tmp_path: Path) -> None:
    """An interpreter that has torch, transformers and peft, and nothing else."""
    from tests.models.test_fused import bare_machine

    (tmp_path / "packages").mkdir()
    bare = ("-S", {"PYTHONPATH": str(bare_machine(tmp_path / "packages")), "PATH": "/usr/bin:/bin"})
    options = ("--repeats", "1", "--batch", "4", "--shapes", "tiny", "--device", "cpu")
    result = run(tmp_path, "generate.py", *options, bare=bare)
    assert result["pillow"] is False
    assert result["batched"]["same_tokens"] == 1.0


def run(folder: Path, script: str, *arguments: str, bare: tuple[str, dict[str, str]] | None = None) -> dict:
    option, environment = bare or ("-Wignore", None)
    command = [
        sys.executable,
        option,
        str(REPOSITORY / "benchmarks" / script),
        *arguments,
        "--out",
        str(folder / "out"),
    ]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out").read_text())
