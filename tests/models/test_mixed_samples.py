"""A micro-batch of pairs, single images and texts has the same loss and gradients as its samples processed singly."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image

from m3diff.models import FAMILIES
from m3diff.models.contract import Packing, TrainingSequence
from m3diff.models.device import Device
from m3diff.models.dialogue import encode_dialogue
from m3diff.models.family import Family
from m3diff.models.fused import register_kernels
from m3diff.models.masks import MaskedRows
from m3diff.models.separate_rows import SeparateRows
from m3diff.models.tuning import prepare_for_training
from m3diff.records.errors import ParamsError
from m3diff.records.sample import Turn
from tests.errors import raises
from tests.family_cases import tiny
from tests.tiny import colour_image, scale_features

PAIR = [colour_image(1, (40, 30)), colour_image(2, (36, 48))]
OTHER_PAIR = [colour_image(3), colour_image(4)]
IMAGE = [colour_image(5)]

CAPTION = (Turn("What changed?", "the red ball moved"),)
OTHER_CAPTION = (Turn("What changed?", "the ball is gone"),)
QUESTION = (Turn("How many balls are new?", "two"),)
DIALOGUE = (Turn("Is the ball gone?", "yes"), Turn("And the star?", "no"), Turn("What else changed?", "nothing"))
DESCRIPTION = (Turn("Describe the image.", "a small blue star"),)
TEXT = (Turn("What is a change?", "a difference over time"),)

Dialogue = tuple[Turn, ...]


class ImageSet(NamedTuple):
    images: list[Image.Image]
    dialogues: list[Dialogue]


BATCHES = {
    "questions on one pair": [ImageSet(PAIR, [CAPTION, QUESTION, OTHER_CAPTION])],
    "turns": [ImageSet(PAIR, [DIALOGUE]), ImageSet(OTHER_PAIR, [CAPTION])],
    "one image": [ImageSet(IMAGE, [DESCRIPTION, DIALOGUE])],
    "text": [ImageSet([], [TEXT])],
    "all": [
        ImageSet(IMAGE, [DESCRIPTION]),
        ImageSet(PAIR, [CAPTION, QUESTION, DIALOGUE]),
        ImageSet([], [TEXT, QUESTION]),
        ImageSet(OTHER_PAIR, [OTHER_CAPTION]),
        ImageSet(IMAGE, [DIALOGUE]),
    ],
}


class Bench(NamedTuple):
    """A model in fp64 with its processor, whose image inputs are in fp64, too."""

    family: Family
    model: Any
    processor: Any

    def sequence(self, image_set: ImageSet, weight: int = 1) -> TrainingSequence:
        prepared = self.processor.prepare(image_set.images)
        branches = []
        for turns in image_set.dialogues:
            encode = self.processor.encode_prompt
            branches += encode_dialogue(encode, self.processor.encode_answer, turns, prepared.marks)
        return TrainingSequence(prepared, branches, weight)

    def packed_loss(
        self, image_sets: list[ImageSet], kernel: Any = "sdpa", packing: Packing | None = None
    ) -> torch.Tensor:
        device = Device(False, "fp32", kernel)
        packing = packing or self.family.packing()
        batch = packing.batch([self.sequence(image_set) for image_set in image_sets], self.processor, device)
        logits = packing.logits(self.model, batch, self.processor, device)
        return (torch.nn.functional.cross_entropy(logits, batch.labels, reduction="none") * batch.weights).sum()

    def separate_loss(self, image_sets: list[ImageSet]) -> torch.Tensor:
        """Return the sum of the losses of all answers, each computed by itself from the prompt of generation."""
        total = torch.zeros((), dtype=torch.float64)
        for image_set in image_sets:
            prepared = self.processor.prepare(image_set.images)
            images = self.processor.image_inputs(self.processor.collate([prepared]), torch.device("cpu"))
            for turns in image_set.dialogues:
                for number, turn in enumerate(turns):
                    prompt = self.processor.encode_prompt((*turns[:number], Turn(turn.question)), prepared.marks)
                    answer = self.processor.encode_answer(turn.answer)
                    ids = torch.tensor([[*prompt, *answer]])
                    # without `tokens` and `logits_to_keep`, the forward pass is the one of generation
                    logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), **images).logits[0]
                    answer_logits = logits[len(prompt) - 1 : -1]
                    labels = torch.tensor(answer)
                    total = total + torch.nn.functional.cross_entropy(answer_logits, labels, reduction="sum")
        return total

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradient of each trained parameter. A parameter that is not used has a gradient of zero."""
        self.model.zero_grad()
        loss.backward()
        gradients = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                unused = torch.zeros_like(parameter)
                gradients[name] = unused if parameter.grad is None else parameter.grad.clone()
        return gradients


@pytest.fixture(scope="module", params=["m3diff", "onediff", "onediff on LLaVA-1.5"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    base, settings = tiny(request.param, tmp_path_factory.mktemp("mixed") / "base")
    family = FAMILIES[settings.family]
    torch.manual_seed(3)
    model = family.load_base(base, settings, torch.float32, register_kernels())
    scale_features(model)
    prepare_for_training(model, family, settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    family.fuse(model, "none")
    processor: Any = family.load_processor(base, model.config)
    image_inputs = processor.image_inputs

    def image_inputs_in_fp64(images: dict, device: Any) -> dict[str, torch.Tensor]:
        inputs = image_inputs(images, device)
        return inputs | {"pixel_values": inputs["pixel_values"].double()} if inputs else inputs

    processor.image_inputs = image_inputs_in_fp64
    return Bench(family, model.double().train(), processor)


@pytest.mark.parametrize("name", BATCHES)
def test_a_packed_batch_has_the_loss_and_gradients_of_its_answers_one_by_one(name, bench):
    image_sets = BATCHES[name]
    loss = bench.packed_loss(image_sets)
    expected_loss = bench.separate_loss(image_sets)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    gradients = bench.gradients(loss)
    expected = bench.gradients(expected_loss)
    total_norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for parameter, gradient in expected.items():
        assert (gradients[parameter] - gradient).norm() <= 1e-10 * max(gradient.norm(), 1e-2 * total_norm), parameter


@pytest.mark.parametrize("name", ["turns", "one image", "all"])
def test_separate_rows_have_the_loss_and_gradients_of_a_packed_batch(name, bench):
    loss = bench.packed_loss(BATCHES[name])
    gradients = bench.gradients(loss)
    separate_loss = bench.packed_loss(BATCHES[name], packing=SeparateRows())
    torch.testing.assert_close(separate_loss, loss, rtol=1e-12, atol=0)
    separate_gradients = bench.gradients(separate_loss)
    total_norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for parameter, gradient in gradients.items():
        difference = (separate_gradients[parameter] - gradient).norm()
        assert difference <= 1e-10 * max(gradient.norm(), 1e-2 * total_norm), parameter


def test_a_packing_says_whether_the_branches_of_a_pair_are_one_row(bench):
    sequences = [bench.sequence(BATCHES["questions on one pair"][0])]
    packed = MaskedRows().batch(sequences, bench.processor, Device(False, "fp32")).packed
    separate = SeparateRows().batch(sequences, bench.processor, Device(False, "fp32"))
    assert MaskedRows.shares_prompts
    assert packed.tokens < separate.attention_mask.sum()
    assert not SeparateRows.shares_prompts
    assert len(separate.input_ids) == 3


def test_separate_rows_have_the_weights_of_their_sequences(bench):
    sequences = [bench.sequence(BATCHES["turns"][0]), bench.sequence(BATCHES["turns"][1], weight=0)]
    batch = SeparateRows().batch(sequences, bench.processor, Device(False, "fp32"))
    packed = MaskedRows().batch(sequences, bench.processor, Device(False, "fp32"))
    assert torch.equal(batch.labels, packed.labels)
    assert torch.equal(batch.weights, packed.weights)


@pytest.mark.parametrize(("stock_layers", "fused_layers"), [([0, 1], 0), ([0], 1)], ids=["all layers", "one layer"])
def test_a_model_whose_layers_ignore_the_packing_is_refused(stock_layers, fused_layers, tmp_path):
    base, settings = tiny("m3diff", tmp_path / "base")
    family = FAMILIES[settings.family]
    model = family.load_base(base, settings, torch.float32, register_kernels()).train()
    model_bench = Bench(family, model, family.load_processor(base, model.config))
    model_bench.packed_loss(BATCHES["turns"])
    for number in stock_layers:
        attention = model.model.language_model.layers[number].self_attn
        attention.config = copy.deepcopy(attention.config)
        attention.config._attn_implementation = "sdpa"
    with raises(ParamsError, "models.packing_ignored", value=fused_layers, expected=2):
        model_bench.packed_loss(BATCHES["turns"])
    # it is exact for any attention
    model_bench.packed_loss(BATCHES["turns"], packing=SeparateRows())


@pytest.mark.parametrize("packing", [MaskedRows, SeparateRows])
def test_a_batch_without_a_pair_has_a_gradient_for_the_same_parameters(packing, bench):
    """With ZeRO, a part without a gradient on one worker would stop the others or skip the decay of its weights."""

    def gradients(name: str) -> dict[str, torch.Tensor]:
        bench.model.zero_grad()
        bench.packed_loss(BATCHES[name], packing=packing()).backward()
        return {name: weight.grad for name, weight in bench.model.named_parameters() if weight.grad is not None}

    gradients_of_pairs = gradients("turns")
    module = [name for name in gradients_of_pairs if ".mdp." in name or ".vdm." in name]
    assert module
    for name in ("one image", "text"):
        gradients_without_pair = gradients(name)
        assert gradients_without_pair.keys() == gradients_of_pairs.keys()
        assert not any(gradients_without_pair[weight].any() for weight in module)


def test_an_answer_of_each_image_set_depends_on_its_own_images(bench):
    image_sets = BATCHES["all"]
    loss = bench.packed_loss(image_sets)
    for number, image_set in enumerate(image_sets):
        if image_set.images:
            shown = image_set._replace(images=[colour_image(90 + n) for n in range(len(image_set.images))])
            changed = [*image_sets[:number], shown, *image_sets[number + 1 :]]
            assert abs(float((bench.packed_loss(changed) - loss).detach())) > 1e-6, number


def test_flex_attention_computes_the_same_loss(bench):
    loss = bench.packed_loss(BATCHES["all"])
    torch.testing.assert_close(bench.packed_loss(BATCHES["all"], "flex"), loss, rtol=1e-12, atol=0)


def test_a_sequence_of_weight_zero_adds_no_loss(bench):
    device = Device(False, "fp32")
    packing = bench.family.packing()
    sequences = [bench.sequence(BATCHES["turns"][0]), bench.sequence(BATCHES["turns"][1], weight=0)]
    batch = packing.batch(sequences, bench.processor, device)
    logits = packing.logits(bench.model, batch, bench.processor, device)
    loss = (torch.nn.functional.cross_entropy(logits, batch.labels, reduction="none") * batch.weights).sum()
    torch.testing.assert_close(loss, bench.packed_loss(BATCHES["turns"][:1]), rtol=1e-12, atol=0)
