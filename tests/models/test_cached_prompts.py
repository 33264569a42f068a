"""The packing by the model's own cache: loss and gradients equal those of separate passes on every tiny base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.smolvlm import processing_smolvlm
from transformers.utils import is_num2words_available

from m3diff.models import FAMILIES, cached_prompts
from m3diff.models.cached_prompts import (
    CachedPrompts,
    Unit,
    UnitKind,
    count_packed_tokens,
    make_units,
    positions_of,
    read_unit,
    repeat_cache,
    shared_length,
    with_units_of_other_workers,
)
from m3diff.models.contract import Branch, TrainingSequence
from m3diff.models.device import Device
from m3diff.records.sample import Turn
from m3diff.stages.train.packing_check import PackingComparison, compare_with_separate_passes
from tests.auto_cases import InDouble, adapted_model, load_processor, training_sequence
from tests.tiny_vlm import BASES, minichange_pairs, tiny_vlm

CPU = Device(gpu=False, precision="fp32")
SHORT = "nothing"
LONG = "a green ball that was to the left of the cube is gone now"


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a tiny base once and returns its folder."""
    folders: dict[str, Path] = {}

    def write(base: str) -> Path:
        if base not in folders:
            folders[base] = tiny_vlm(base, tmp_path_factory.mktemp(base))
        return folders[base]

    return write


def sequences_of(processor: Any, double: bool = True) -> dict[str, list[TrainingSequence]]:
    """Return micro-batches with all that a sequence may have.

    Args:
        double: whether the images are in fp64.
    """
    pairs = [pair.images for pair in minichange_pairs()]
    questions = ("What changed?", "Is it blue now?", "What colour was the cube in the first image?")

    def sequence(images: Any, *dialogues: list[Turn]) -> TrainingSequence:
        return training_sequence(processor, images, dialogues, double)

    def one_turn(question: str, answer: str) -> list[Turn]:
        return [Turn(question, answer)]

    batches = {
        "references of unequal length": [
            sequence(pairs[1], one_turn(questions[0], SHORT), one_turn(questions[0], LONG))
        ],
        "different questions": [sequence(pairs[1], *(one_turn(question, LONG) for question in questions))],
        "one reference": [sequence(pairs[1], one_turn(questions[0], LONG))],
        "a dialogue": [
            sequence(pairs[0], one_turn(questions[0], SHORT), [Turn(questions[0], LONG), Turn("and the ball?", SHORT)])
        ],
        "one image": [sequence(pairs[2][:1], one_turn("What is it?", SHORT), one_turn("Which colour?", LONG))],
        "text only": [sequence([], one_turn("Say red.", "red"), one_turn("Say red and blue.", "red and blue"))],
        "a shared prefix of few tokens": [sequence([], one_turn("a", "red"), one_turn("bcd", "blue"))],
    }
    if processor.places_images:
        marked = "What is in <image> and not in <image>?"
        batches["images within the question"] = [sequence(pairs[3], one_turn(marked, LONG), one_turn(marked, SHORT))]
        batches["images that come later"] = [
            sequence(pairs[3], [Turn("hello", SHORT), Turn(marked, LONG)], one_turn(marked, SHORT))
        ]
    batches["images of two sizes"] = [
        sequence(pairs[0], one_turn(questions[0], SHORT), one_turn(questions[0], LONG)),
        sequence(pairs[1], one_turn(questions[2], LONG)),
        sequence(pairs[2], one_turn(questions[2], LONG), one_turn(questions[1], SHORT)),
    ]
    batches["all at once"] = [sequence for batch in batches.values() for sequence in batch]
    return batches


def compare(base: str, folder: Path, name: str | None = None) -> dict[str, PackingComparison]:
    """Compare packed with separate passes in fp64 for all micro-batches, or for the one with this name."""
    processor = load_processor(base, folder)
    model = adapted_model(base, folder).double()
    comparisons = {}
    with InDouble():
        for batch_name, sequences in sequences_of(processor).items():
            if name in (None, batch_name):
                comparisons[batch_name] = compare_with_separate_passes(
                    model, sequences, CachedPrompts(), processor, FAMILIES["auto"], CPU
                )
    return comparisons


def require_exact(comparisons: dict[str, PackingComparison]) -> None:
    """Check that only rounding in fp64 distinguishes packed from separate passes."""
    for name, comparison in comparisons.items():
        assert comparison.packing.loss < 1e-10, name
        for part, difference in comparison.packing.gradients.items():
            assert difference < 1e-8, (name, part)


@pytest.mark.parametrize(("base", "batch"), [("qwen3_vl", "all at once"), ("qwen3_5", "a dialogue")])
def test_packed_sequences_have_the_loss_and_gradients_of_separate_ones(
    base: str, batch: str, base_folder: Callable[[str], Path]
) -> None:
    """qwen3_vl numbers tokens in three dimensions, and qwen3_5 has convolutions and linear attention."""
    require_exact(compare(base, base_folder(base), batch))


@pytest.mark.slow(20)
@pytest.mark.parametrize("base", BASES)
def test_packing_is_exact_on_every_base(
    base: str, base_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_num2words_available():  # names the frames of videos
        monkeypatch.setattr(processing_smolvlm, "num2words", str)
    require_exact(compare(base, base_folder(base)))


def test_a_prompt_is_read_once_for_all_its_references(base_folder: Callable[[str], Path]) -> None:
    processor = load_processor("qwen3_vl", base_folder("qwen3_vl"))
    sequences = sequences_of(processor)["references of unequal length"]
    (unit,) = make_units(sequences, processor)
    prompt = processor.encode_prompt((Turn("What changed?"),), sequences[0].prepared.marks)
    assert unit.prefix_ids.tolist() == [list(prompt[:-1])]
    assert [row[0] for row in unit.branch_ids.tolist()] == [prompt[-1]] * 2
    assert unit.labels.tolist() == [*processor.encode_answer(SHORT), *processor.encode_answer(LONG)]


def test_sequences_with_images_of_one_size_are_read_together(base_folder: Callable[[str], Path]) -> None:
    processor = load_processor("qwen3_vl", base_folder("qwen3_vl"))
    units = make_units(sequences_of(processor)["images of two sizes"], processor)
    assert [(unit.kind, len(unit.prefix_ids)) for unit in units] == [
        (UnitKind.PROMPTS_WITH_IMAGES, 2),
        (UnitKind.BRANCHES_WITH_IMAGES, 1),
    ]


def test_a_branch_whose_images_come_later_is_read_alone(base_folder: Callable[[str], Path]) -> None:
    processor = load_processor("qwen3_vl", base_folder("qwen3_vl"))
    units = make_units(sequences_of(processor)["images that come later"], processor)
    assert {unit.kind for unit in units} == {UnitKind.BRANCHES_WITH_IMAGES}
    assert sum(len(unit.branch_ids) for unit in units) == 3


def test_a_sequence_with_one_branch_needs_no_cache(base_folder: Callable[[str], Path]) -> None:
    processor = load_processor("qwen3_vl", base_folder("qwen3_vl"))
    (unit,) = make_units(sequences_of(processor)["one reference"], processor)
    assert unit.kind is UnitKind.BRANCHES_WITH_IMAGES
    assert not unit.prefix_ids.numel()


@pytest.mark.parametrize("name", ["one reference", "references of unequal length"])
def test_no_logits_are_computed_for_the_prompt(name, base_folder: Callable[[str], Path]) -> None:
    processor = load_processor("qwen3_vl", base_folder("qwen3_vl"))
    (unit,) = make_units(sequences_of(processor, double=False)[name], processor)
    logits = read_unit(adapted_model("qwen3_vl", base_folder("qwen3_vl")), unit, processor, CPU)
    assert logits.shape[1] == len(processor.encode_answer(LONG))


def test_text_alone_gives_the_vision_encoder_a_gradient_of_zero(base_folder: Callable[[str], Path]) -> None:
    processor = load_processor("qwen3_vl", base_folder("qwen3_vl"))
    model = adapted_model("qwen3_vl", base_folder("qwen3_vl"))
    batch = CachedPrompts().batch(sequences_of(processor)["text only"], processor, CPU)
    logits = CachedPrompts().logits(model, batch, processor, CPU)
    torch.nn.functional.cross_entropy(logits, batch.labels).backward()
    gradients = [
        parameter.grad for name, parameter in model.named_parameters() if ".visual." in name and parameter.requires_grad
    ]
    assert gradients
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def skip_reorder(cache: Any, rows: torch.Tensor) -> None:
    """Leave the cache as it is."""


def take_other_rows(cache: Any, rows: torch.Tensor) -> None:
    """Let each branch continue from the prefix of another sequence."""
    repeat_cache(cache, rows.roll(1))


def overwrite_states(cache: Any, rows: torch.Tensor) -> None:
    """Repeat the cache, but let transformers overwrite the states of linear attention in place."""
    repeat_cache(cache, rows)
    for layer in cache.layers:
        vars(layer).pop("update_recurrent_state", None)


def shift_positions(model: Any, unit: Unit, processor: Any, device: Device) -> tuple[Any, Any]:
    """Number the tokens of branches one too high."""
    prefix, branches = positions_of(model, unit, processor, device)
    return prefix, {name: positions + 1 for name, positions in branches.items()}


def drop_last_token(model: Any, unit: Unit, processor: Any, device: Device) -> torch.Tensor:
    """Read a prefix without its last token."""
    types = {name: (prefix[:, :-1], branch) for name, (prefix, branch) in unit.token_types.items()}
    return read_unit(model, replace(unit, prefix_ids=unit.prefix_ids[:, :-1], token_types=types), processor, device)


FAULTS = {
    "cache not repeated": ("repeat_cache", skip_reorder, "qwen3_vl", "different questions"),
    "wrong row": ("repeat_cache", take_other_rows, "qwen3_vl", "images of two sizes"),
    "state overwritten": ("repeat_cache", overwrite_states, "qwen3_5", "references of unequal length"),
    "position off by one": ("positions_of", shift_positions, "qwen3_vl", "references of unequal length"),
    "last prompt token lost": ("read_unit", drop_last_token, "qwen3_vl", "references of unequal length"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_exceeds_the_limits_of_the_check_before_a_run(
    fault: str, base_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, faulty_function, base, batch = FAULTS[fault]
    processor = load_processor(base, base_folder(base))
    model = adapted_model(base, base_folder(base), random_adapters=False)
    sequences = sequences_of(processor, double=False)[batch]
    arguments = (model, sequences, CachedPrompts(), processor, FAMILIES["auto"], CPU)
    assert not compare_with_separate_passes(*arguments).excesses()
    monkeypatch.setattr(cached_prompts, name, faulty_function)
    try:
        excesses = compare_with_separate_passes(*arguments).excesses()
    except RuntimeError:  # of torch, about shapes or about a state that was changed in place
        return
    assert excesses


IMAGE_TOKEN = 7
PROMPT = [IMAGE_TOKEN, IMAGE_TOKEN, 1, 2]
PACKED_BRANCHES = {
    "the prompt but its last token": (
        [Branch([*PROMPT, 5, 9], [(4, 6)]), Branch([*PROMPT, 6, 8, 9], [(4, 7)])],
        3,
        10,
    ),
    "the tokens that are equal": ([Branch([*PROMPT, 3, 5], [(5, 6)]), Branch([*PROMPT, 4, 5], [(5, 6)])], 4, 8),
    "the images alone": ([Branch([7, 1, 9], [(2, 3)]), Branch([7, 2, 9], [(2, 3)])], 1, 5),
    "one branch": ([Branch([*PROMPT, 5], [(4, 5)])], 3, 5),
    "no image at a later place": ([Branch([1, 7, 2, 3], [(3, 4)]), Branch([1, 2, 3, 4], [(3, 4)])], 1, 8),
}


@pytest.mark.parametrize(("branches", "shared", "tokens"), PACKED_BRANCHES.values(), ids=PACKED_BRANCHES)
def test_branches_share_the_beginning_of_their_prompts(branches, shared, tokens):
    """Without all images in it, a prompt is not shared."""
    assert shared_length(branches) == shared
    assert count_packed_tokens(branches, IMAGE_TOKEN) == tokens


class ZeroModel:
    """A model that DeepSpeed splits among workers."""

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def zero_optimization_stage(self) -> int:
        return self.stage


def fake_unit(kind: UnitKind) -> Any:
    return SimpleNamespace(kind=kind)


OWN_UNITS = [fake_unit(kind) for kind in (UnitKind.BRANCHES, UnitKind.PROMPTS, UnitKind.BRANCHES)]


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another worker have one unit of prompts with images, one of prompts and one of branches."""
    other_counts = torch.zeros(len(UnitKind), dtype=torch.int64)
    other_counts[[UnitKind.PROMPTS_WITH_IMAGES, UnitKind.PROMPTS, UnitKind.BRANCHES]] = 1

    def take_largest(counts: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        counts.copy_(torch.maximum(counts, other_counts))

    monkeypatch.setattr(cached_prompts.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(cached_prompts.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(cached_prompts.dist, "all_reduce", take_largest)
    monkeypatch.setattr(cached_prompts, "blank_unit", lambda kind, processor: f"blank {kind.name}")


@pytest.mark.parametrize("stage", [1, 3])
def test_with_zero_all_workers_run_the_same_passes_in_the_same_order(stage, two_workers):
    units = with_units_of_other_workers(OWN_UNITS, ZeroModel(stage), None, CPU)
    assert units == ["blank PROMPTS_WITH_IMAGES", OWN_UNITS[1], OWN_UNITS[0], OWN_UNITS[2]]


@pytest.mark.parametrize("model", [ZeroModel(0), object()], ids=["stage 0", "no DeepSpeed"])
def test_without_zero_a_worker_runs_its_own_passes_alone(model, two_workers):
    assert with_units_of_other_workers(OWN_UNITS, model, None, CPU) == OWN_UNITS
