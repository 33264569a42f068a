"""The figures of a plan, on a model and a mixture that are counted by hand."""

import math
from dataclasses import replace

import pytest

from m3diff.commands.plan import make_plan, plan_alignment
from m3diff.models.settings import Lora
from tests.commands.plan.conftest import ALIGN, FROZEN, GB, TRAINED, ToySettings, entries, write_mixture
from tests.errors import Message

ALIGNED = ToySettings(align=ALIGN)


def test_parameters_are_grouped_by_part_and_by_whether_they_train(plan):
    frozen = {"vision (frozen)": 8, "projector (frozen)": 32, "llm (frozen)": 48 + 400}
    assert plan().parameters == {"vision": 20, "llm": 28} | frozen


def test_a_part_without_adapters_trains_its_target_layers_in_full(plan):
    settings = ToySettings(lora=Lora(0, 1), rates={"vision": None, "projector": 1e-3, "llm": 1e-3})
    expected = {"vision (frozen)": 28, "projector": 32, "llm": 48, "llm (frozen)": 400}
    assert plan(settings=settings).parameters == expected


@pytest.mark.parametrize(
    ("max_captions", "sequences", "references", "tokens", "steps"),
    [
        pytest.param(1, 7, 1.0, 54.0, 2, id="one caption a sequence"),
        pytest.param(2, 5, 1.4, 60.0, 2, id="two captions"),
        pytest.param(3, 4, 1.75, 65.25, 1, id="three captions"),
        pytest.param(None, 4, 1.75, 65.25, 1, id="all captions of a pair"),
    ],
)
def test_every_packing_is_counted(plan, max_captions, sequences, references, tokens, steps):
    counted = plan(max_captions_per_sequence=max_captions)
    assert counted.sequences == sequences
    assert counted.steps == steps
    assert counted.references_per_sequence == pytest.approx(references)
    assert counted.tokens_per_sequence == pytest.approx(tokens)  # 10 of images, 29 of the prompt, 15 of a reference
    forward_flops = [term.forward for term in counted.terms]
    assert forward_flops == pytest.approx([100 * tokens, 10 * 2, 7 * 15 * references])


@pytest.mark.parametrize(
    ("epochs", "global_batch", "steps"), [(1, 7, 1), (1, 6, 2), (2.5, 4, 5), (0.5, 4, 1), (0.6, 4, 2)]
)
def test_steps_are_counted_as_by_the_training_loop(plan, epochs, global_batch, steps):
    assert plan(epochs=epochs, global_batch=global_batch).steps == steps


def test_the_tokenizer_of_a_base_on_this_machine_measures_the_texts(plan, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    counted = plan(base=tmp_path / "base")
    assert counted.tokens_per_sequence == pytest.approx(10 + 14 / 4 + 23 / 7)
    assert counted.base_origin == str(tmp_path / "base")


@pytest.mark.parametrize(
    ("checkpointing", "epochs", "recomputed"),
    [
        pytest.param("none", 3, 0, id="none, three epochs"),
        pytest.param("selective", 1, 0, id="selective counts as none"),
        pytest.param("full", 1, 5400 + 20, id="full runs the marked terms again"),
    ],
)
def test_the_run_takes_the_flops_of_all_its_sequences(plan, checkpointing, epochs, recomputed):
    flops_per_sequence = 2 * 5400 + 3 * 20 + 2 * 105
    counted = plan({"activation_checkpointing": checkpointing}, epochs=epochs)
    assert counted.run_flops == epochs * 7 * (flops_per_sequence + recomputed)


@pytest.mark.parametrize(
    ("stage", "workers", "precision", "weights", "gradients", "optimizer"),
    [
        (0, 4, "bf16", 2, 4, 12),
        (1, 4, "bf16", 2, 4, 3),
        (2, 4, "bf16", 2, 1, 3),
        (3, 4, "bf16", 0.5, 1, 3),
        (3, 0, "bf16", 2, 4, 12),
        (0, 4, "fp32", 4, 4, 12),
    ],
)
def test_zero_stages_share_out_the_bytes_of_a_parameter(plan, stage, workers, precision, weights, gradients, optimizer):
    counted = plan({"zero_stage": stage, "workers": workers}, precision=precision)
    assert counted.devices == max(1, workers)
    assert counted.memory_gb["weights"] * GB == pytest.approx(weights * (TRAINED + FROZEN))
    assert counted.memory_gb["gradients"] * GB == pytest.approx(gradients * TRAINED)
    assert counted.memory_gb["optimizer"] * GB == pytest.approx(optimizer * TRAINED)


def test_activations_are_those_of_a_micro_batch_of_the_longest_sequence(plan):
    counted = plan({"micro_batch": 5}, max_captions_per_sequence=None, precision="fp32")
    assert counted.max_references == 3
    supervised = 3 * 15
    sigmoid = 10 * 4 * 4  # of the places of the images
    selection = supervised * (8 * 4 + 8)  # the head's input, and its index
    expected = {"between parts": sigmoid + selection, "llm": supervised * 2 * 4, "logits": 3 * supervised * 6 * 4}
    sequence_bytes = {name: size * GB / 5 for name, size in counted.activations_gb.items()}
    assert sequence_bytes == pytest.approx(expected)
    assert counted.memory_gb["activations"] == pytest.approx(sum(counted.activations_gb.values()))


def test_the_longest_sequence_has_no_more_captions_than_are_allowed(plan):
    assert plan({"micro_batch": 1}, max_captions_per_sequence=2).max_references == 2


def test_the_memory_of_published_counts_is_for_the_mean_sequence(run, tmp_path):
    published = run({"micro_batch": 1}, mixture=tmp_path, max_captions_per_sequence=None)
    counted = make_plan(replace(published, entries=entries("birds_to_words")))
    assert counted.max_references is None
    assert counted.activations_gb["llm"] * GB == pytest.approx(math.ceil(15 * 12_867 / 2_685) * 2 * 2)


# The alignment before the fine-tuning


def test_an_alignment_is_counted_on_its_own_datasets_with_its_own_settings(run):
    alignment = plan_alignment(run(settings=ALIGNED))
    assert set(alignment.workload.counts_by_dataset) == {"b"}
    assert alignment.parameters == {"vision (frozen)": 28, "projector": 32, "llm (frozen)": 448}
    assert alignment.sequences == 3
    assert alignment.workload.references == 3
    assert alignment.train.epochs == 3
    assert alignment.train.global_batch == 2
    assert alignment.steps == 6  # 3 epochs of 2 steps
    assert alignment.run_flops == 3 * 3 * sum(term.total for term in alignment.terms)


def test_the_fine_tuning_leaves_out_the_datasets_of_its_alignment(run):
    counted = make_plan(run(settings=ALIGNED))
    assert set(counted.workload.counts_by_dataset) == {"a"}
    assert counted.parameters["llm"] == 28
    assert counted.steps == 1


def test_a_model_without_an_alignment_has_one_plan_of_all_datasets(run):
    assert set(make_plan(run()).workload.counts_by_dataset) == {"a", "b"}
    assert plan_alignment(run()) is None


def test_an_alignment_without_samples_is_not_counted_and_says_why(run, tmp_path, capsys):
    mixture = write_mixture(tmp_path / "other", [("a/1", "a", "what", "one")], shards=1)
    assert make_plan(run(settings=ALIGNED, mixture=mixture)).workload.references == 1
    assert plan_alignment(run(settings=ALIGNED, mixture=mixture)) is None
    reason = Message("plan.no_sample_of_other_datasets", path=mixture / "train", names=["a"])
    assert reason.in_text(capsys.readouterr().out)
