"""The contract that training, prediction, planning and registration have with every model family."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from m3diff.models import FAMILIES
from m3diff.models.checkpoint import (
    ADAPTERS,
    export_checkpoint,
    folder_sha256,
    has_only_adapters,
    load_model,
    read_manifest,
)
from m3diff.models.contract import Branch, TrainingSequence
from m3diff.models.device import Device
from m3diff.models.family import Family
from m3diff.models.fused import FusedLora, register_kernels
from m3diff.models.generation import Captioner, load_captioner
from m3diff.models.processing import pad_prompts
from m3diff.models.tuning import meta_model, prepare_for_training, trainable_names, unwrap_model
from m3diff.records.errors import DataError, ValueFault
from m3diff.records.sample import Turn
from tests.errors import raises
from tests.family_cases import CASES, FamilyCase
from tests.tiny import (
    colour_image,
    image_inputs,
    pair_branch,
    pair_inputs,
    pair_prompt,
    saliency_map,
    scale_features,
    tiny_checkpoint,
    tiny_trained,
)
from tests.tiny_glimpse import added_family

QUESTION = "What changed?"
PAIRS = [(colour_image(10 * k, (40, 30)), colour_image(10 * k + 1, (36, 48))) for k in range(4)]
IMAGES = [image for pair in PAIRS for image in pair]
SQUARE_PAIR = (colour_image(0), colour_image(1))


class Case(NamedTuple):
    """A family with a base and settings, and the checkpoint of a model that was trained on this base."""

    name: str
    facts: FamilyCase
    family: Family
    base: Path
    settings: Any
    checkpoint: Path

    def logits(self, model: Any) -> torch.Tensor:
        """Return the logits of two pairs."""
        inputs = pair_inputs(self.family.load_processor(self.base, model.config), PAIRS[:2], [QUESTION] * 2)
        with torch.no_grad():
            return model.eval()(**inputs).logits.clone()


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    root = tmp_path_factory.mktemp("case")
    facts = CASES[request.param]
    base = facts.write_base(root / "base")
    settings = facts.settings()
    with added_family():
        checkpoint = tiny_checkpoint(base, root / "checkpoint", settings)
        yield Case(request.param, facts, FAMILIES[settings.family], base, settings, checkpoint)


def without_module(settings: Any) -> Any:
    rates = {part: None if part == "module" else rate for part, rate in settings.rates.items()}
    return replace(settings, module=None, rates=rates)


def stock_of(case: Case) -> Any:
    """Return transformers' model of the base, and the base's weights by their names on disk."""
    if not case.facts.has_stock_class:
        pytest.skip("transformers has no class of this base")
    (name,) = json.loads((case.base / "config.json").read_text())["architectures"]
    stored = {k: w for file in case.base.glob("*.safetensors") for k, w in load_file(file).items()}
    return getattr(transformers, name).from_pretrained(
        case.base, dtype=torch.float32, attn_implementation="sdpa"
    ).eval(), stored


def test_the_weights_of_the_base_are_loaded_and_the_module_alone_is_new(case, tmp_path):
    stock, stored = stock_of(case)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(case.family.load_base(case.base, case.settings, torch.float32, "eager"))
    weights, weights_again, stock_weights = (dict(model.named_parameters()) for model in (*models, stock))
    assert all(torch.equal(weights[name], weight) for name, weight in stock_weights.items())
    assert {case.family.part_of(name) for name in weights.keys() - stock_weights.keys()} <= set(case.family.new_parts)
    assert all(torch.equal(weight, weights_again[name]) for name, weight in weights.items()), "from the seed alone"
    assert models[0].config._attn_implementation == "eager"
    models[0].save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors").keys()
    assert all(".mdp." in name or ".vdm." in name for name in written ^ stored.keys())


def test_without_its_module_a_model_is_transformers_own_on_the_same_base(case):
    plain = case.family.load_base(case.base, without_module(case.settings), torch.float32, "sdpa")
    stock, _ = stock_of(case)
    names = ["input_ids", "attention_mask", "pixel_values"]
    names += ["image_sizes", "batch_num_images"] if "onevision" in stock.config.model_type else []
    inputs = pair_inputs(case.family.load_processor(case.base, plain.config), PAIRS[:2], [QUESTION] * 2)
    with torch.no_grad():
        expected = stock(**{name: inputs[name] for name in names}).logits
    torch.testing.assert_close(case.logits(plain), expected, rtol=1e-5, atol=1e-5)


def test_transformers_own_class_refuses_a_module_that_it_would_drop(case, tmp_path):
    stock = type(stock_of(case)[0])
    case.family.load_base(case.base, without_module(case.settings), torch.float32, "sdpa").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [stock.__name__]
    assert type(stock.from_pretrained(tmp_path)) is stock
    if case.settings.module is None:
        assert type(stock.from_pretrained(case.checkpoint)) is stock
        return
    for folder in (case.checkpoint, case.checkpoint / ADAPTERS):
        with pytest.raises(Exception, match=r"vision_feature_select_strategy|mdp|vdm"):
            stock.from_pretrained(folder)(**pair_inputs(case.family.load_processor(case.base), PAIRS[:1], [QUESTION]))


def test_a_trained_model_is_a_base_whose_module_is_not_made_anew(case):
    torch.manual_seed(99)
    again = case.family.load_base(case.checkpoint, case.settings, torch.float32, "sdpa")
    torch.testing.assert_close(case.logits(again), case.logits(load_model(case.checkpoint)[0]), rtol=0, atol=0)
    assert case.family.faults(case.settings, json.loads((case.checkpoint / "config.json").read_text())) == []


def test_every_parameter_is_in_one_part_and_trains_as_the_settings_say(case):
    model = case.family.load_base(case.base, case.settings, torch.float32, "sdpa")
    parts = {case.family.part_of(name) for name, _ in model.named_parameters()}
    assert parts >= set(case.family.parts) - {"module"}
    assert ("module" in parts) == case.settings.has_module()
    prepare_for_training(model, case.family, case.settings)
    trains = trainable_names(model)
    assert {case.family.part_of(name) for name in trains} == {
        part for part, rate in case.settings.rates.items() if rate is not None
    }
    adapted = {case.family.part_of(name) for name in trains if "lora_" in name}
    assert adapted == set(case.family.lora_targets) & {case.family.part_of(name) for name in trains}
    assert not [name for name in trains if name.startswith(tuple(case.family.unused_parameters) or "none")]


OTHER_QUESTION = "And what else changed there?"


@pytest.fixture(scope="module")
def processor(case: Case) -> Any:
    return case.family.load_processor(case.base, case.family.planned_config(case.base, case.settings))


def test_an_image_is_prepared_as_bytes(processor):
    prepared = processor.prepare(PAIRS[0])
    assert len(prepared.marks) == 2
    assert prepared.nbytes == sum(tensor.nbytes for tensor in prepared.tensors.values())
    largest = max(prepared.tensors.values(), key=lambda tensor: tensor.nbytes)
    assert largest.dtype == torch.uint8
    assert largest.nbytes >= 3 * 2 * 16**2


def test_blank_images_have_the_shapes_of_a_pair(processor, case):
    inputs = image_inputs(processor, [SQUARE_PAIR])
    config = case.family.planned_config(case.base, case.settings)
    blank = case.family.classes()[0].blank_images(config, "meta")
    assert blank.keys() == inputs.keys()
    assert {name: tensor.shape for name, tensor in blank.items()} == {name: x.shape for name, x in inputs.items()}
    assert {name: tensor.dtype for name, tensor in blank.items()} == {name: x.dtype for name, x in inputs.items()}
    largest = max(blank.values(), key=lambda tensor: tensor.numel())
    assert largest.is_meta


def test_a_prompt_has_the_image_tokens_of_a_pair_and_the_question(processor, case):
    config = case.family.planned_config(case.base, case.settings)
    image = config.image_token_index
    prompt, other_prompt = (pair_prompt(processor, question) for question in (QUESTION, OTHER_QUESTION))
    assert prompt.count(image) == config.image_tokens_of(2)
    assert other_prompt.count(image) == config.image_tokens_of(2)
    assert (prompt == other_prompt) == (not case.family.reads_question)


def test_prompts_of_a_batch_are_padded_on_the_left(processor):
    prompts = [pair_prompt(processor, question) for question in (QUESTION, OTHER_QUESTION)]
    inputs = pad_prompts(prompts, processor.pad_id)
    rows = zip(inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), prompts, strict=True)
    for row, mask, prompt in rows:
        padding = len(row) - len(prompt)
        assert row == [processor.pad_id] * padding + list(prompt)
        assert mask == [0] * padding + [1] * len(prompt)


def test_a_reference_ends_with_the_end_token_and_is_decoded_again(processor):
    reference = processor.encode_answer("the red ball moved")
    assert reference[-1] == processor.end_id
    assert processor.decode(torch.tensor([reference[:-1]])) == ["the red ball moved"]


def test_a_question_with_the_image_token_is_refused_if_it_is_read(processor, case):
    if not case.family.reads_question:
        pytest.skip("the family reads no question")
    config = case.family.planned_config(case.base, case.settings)
    mark = processor.tokenizer.convert_ids_to_tokens(config.image_token_index)
    with raises(ValueFault, "models.question_with_image_mark", value=mark):
        pair_prompt(processor, f"What is new in {mark}?")


@pytest.mark.parametrize("frozen", [(), ("vision", "module")], ids=str)
def test_flops_are_those_that_torch_counts_forward_and_backward(frozen, case):
    """Torch counts causal attention like full attention."""
    changed = {part: None if part in frozen else rate for part, rate in case.settings.rates.items()}
    settings = replace(case.settings, rates=changed)
    model = meta_model(case.family.planned_config(case.base, settings), case.family, settings)
    terms = {term.name: term for term in case.family.count_flops(model, case.family, 40, 4)}
    ids = torch.zeros(1, 40, dtype=torch.long)
    ids[:, : model.config.image_tokens_of(2)] = model.config.image_token_index
    inputs = {"input_ids": ids.to("meta"), "position_ids": ids.to("meta"), "tokens": ids, "use_cache": False}
    inputs |= {"attention_mask": torch.ones(1, 1, 40, 40, dtype=torch.bool, device="meta"), "logits_to_keep": 4}
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits = model(**inputs, **model.blank_images(model.config, "meta")).logits
        forward = counter.get_total_flops()
        logits.sum().backward()
    half = terms["llm attention"]
    assert sum(term.forward for term in terms.values()) + half.forward == forward
    if not case.facts.has_idle_encoder_layer or frozen[:1] == ("vision",):
        counted = sum(term.total for term in terms.values()) + half.total
        assert counted == pytest.approx(counter.get_total_flops(), rel=5e-3)
    assert all(terms[part].backward == 0 for part in frozen if part == "vision")
    assert frozen or terms["llm"].recomputed == terms["llm"].forward, "each linear is in a layer and has a gradient"
    assert {name for name, term in terms.items() if term.recomputed} <= {*terms} - {"projector", "head"}


@pytest.mark.parametrize("adapters", [False, True], ids=["merged", "adapters"])
def test_both_exports_load_without_parameters_and_give_the_trained_logits(adapters, case, tmp_path):
    expected = case.logits(unwrap_model(tiny_trained(case.base, case.settings)))
    export_checkpoint(case.checkpoint, tmp_path / "out", adapters)
    loaded, family = load_model(tmp_path / "out")
    assert family is case.family
    assert has_only_adapters(tmp_path / "out") == adapters
    assert not (tmp_path / "out" / ADAPTERS).exists()
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    torch.testing.assert_close(case.logits(loaded), expected, rtol=1e-4, atol=1e-4)
    untrained = case.logits(case.family.load_base(case.base, case.settings, torch.float32, "sdpa"))
    assert (expected - untrained).abs().max() > 1e-2
    manifest = read_manifest(tmp_path / "out")
    assert (tmp_path / "out" / manifest["base"]).resolve() == case.base.resolve()
    assert manifest["family"] == case.settings.family
    assert manifest["base_sha256"] == folder_sha256(case.base)
    written_json = "".join(file.read_text() for file in case.checkpoint.rglob("*.json"))
    assert str(case.base.parent) not in written_json, "an absolute path"
    config = json.loads((case.checkpoint / ADAPTERS / "lora" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "../../base"
    assert config["auto_mapping"] is None, "the name of a Python module"


def by_hand(captioner: Captioner, pair: Any, question: str) -> str:
    """Decode one pair greedily without `generate`, computing the whole sequence again for each token."""
    inputs = pair_inputs(captioner.processor, [pair], [question])
    ids = inputs.pop("input_ids")
    answer_ids = []
    inputs.pop("attention_mask")
    while len(answer_ids) < captioner.max_new_tokens and (
        not answer_ids or answer_ids[-1] != captioner.processor.end_id
    ):
        with torch.no_grad():
            step = torch.cat([ids, torch.tensor([answer_ids], dtype=torch.long)], dim=1)
            answer_ids.append(int(captioner.model(input_ids=step, **inputs).logits[0, -1].argmax()))
    return captioner.processor.decode(torch.tensor([answer_ids]))[0]


def test_captions_are_those_of_greedy_decoding_by_hand_in_any_batch(case):
    captioner = load_captioner(case.checkpoint, 5)
    captions = captioner.caption(PAIRS, QUESTION)
    assert captions == [by_hand(captioner, pair, QUESTION) for pair in PAIRS]
    assert captions == [captioner.caption([pair], QUESTION)[0] for pair in PAIRS]
    assert captioner.caption(PAIRS[::-1], QUESTION) == captions[::-1]
    has_alike_captions = case.name == "m3diff without a module"
    assert len(set(captions)) > 1 or has_alike_captions, "captions that are all alike would show no order"
    assert load_captioner(case.checkpoint / ADAPTERS, 5).caption(PAIRS, QUESTION) == captions


def test_captions_and_maps_of_one_pass_are_to_the_bit_those_of_two(case):
    assert (case.family.maps is not None) == bool(case.facts.encoder)
    if case.family.maps is None:
        pytest.skip("the family has no saliency maps")
    captioner = load_captioner(case.checkpoint, 5)
    captioner.family.fuse(captioner.model, "none")
    encoder: Any = captioner.model.get_submodule(case.facts.encoder)
    runs: list[int] = []
    hook = encoder.encoder.layers[-1].register_forward_hook(lambda *_: runs.append(1))
    prepared = [captioner.processor.prepare(pair) for pair in PAIRS]
    dialogues = [(Turn(QUESTION),)] * len(PAIRS)
    captions, maps = captioner.answer(prepared, dialogues, saliency=True)
    assert len(runs) == 1, "the images are encoded once for both"
    hook.remove()
    captions_alone, no_maps = captioner.answer(prepared, dialogues)
    assert captions == captions_alone
    assert no_maps is None
    assert maps is not None
    assert maps.dtype == np.float16
    np.testing.assert_allclose(maps.astype(float).sum((1, 2)), 1, atol=2e-3)
    pixels = image_inputs(captioner.processor, PAIRS)["pixel_values"]
    np.testing.assert_array_equal(maps, saliency_map(captioner.model, pixels).numpy().astype(np.float16))
    assert not captioner.model.training
    if case.name == "m3diff without a module":
        np.testing.assert_allclose(maps, 1 / maps[0].size, atol=1e-3)
    else:
        assert np.abs(maps[0].astype(float) - maps[1]).max() > 1e-3, "maps that are all alike would show nothing"


def trains(case: Case, dtype: torch.dtype, activation_checkpointing: str | None = "none") -> Any:
    """Return a model in training mode with nonzero adapters, fused unless `activation_checkpointing` is None."""
    torch.manual_seed(3)
    model = case.family.load_base(case.base, case.settings, torch.float32, register_kernels())
    scale_features(model)
    prepare_for_training(model, case.family, case.settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    if activation_checkpointing:
        case.family.fuse(model, activation_checkpointing)
    return model.to(dtype).train()


def check_packed_equals_unpacked(
    case: Case, captions: tuple[int, ...], images: tuple[int, ...], dtype: torch.dtype, kernel: str
) -> None:
    """Compare loss and gradients of packed branches with those of separate ones.

    All captions of the first pair have one question if there is only one pair, otherwise each has its own.

    Args:
        captions: number of branches of each image set.
        images: number of images of each image set.
    """
    model = trains(case, dtype)
    processor = case.family.load_processor(case.base, model.config)
    rng = np.random.default_rng(0)
    questions = [QUESTION] * 2 if len(captions) == 1 else [QUESTION, "What is new?", "Is the red ball gone?"]
    sequences: list[TrainingSequence] = []
    sequences_of_other_images: list[TrainingSequence] = []
    for number, count in enumerate(captions):
        prepared = processor.prepare(IMAGES[2 * number :][: images[number]])
        branches: list[Branch] = []
        for question in questions[:count]:
            prompt = processor.encode_prompt((Turn(question),), prepared.marks)
            branches.append(pair_branch(prompt, rng.integers(5, 30, rng.integers(1, 9)).tolist()))
        sequences.append(TrainingSequence(prepared, branches))
        other_images = processor.prepare(IMAGES[2 * (len(captions) - 1 - number) :][: images[number]])
        sequences_of_other_images.append(TrainingSequence(other_images, branches))

    def loss_of(sequences: list[TrainingSequence], kernel: Any) -> torch.Tensor:
        device = Device(False, "fp32", kernel)
        packing = case.family.packing()
        batch = packing.batch(sequences, processor, device)
        logits = packing.logits(model, batch, processor, device)
        return torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum")

    def gradients(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    packed_loss = loss_of(sequences, kernel)
    packed = gradients(packed_loss)
    assert {name for name, p in model.named_parameters() if p.requires_grad and "lora_" in name} <= packed.keys()
    unpacked_loss: Any = 0
    for sequence in sequences:
        for branch in sequence.branches:
            unpacked_loss = unpacked_loss + loss_of([sequence._replace(branches=[branch])], "sdpa")
    unpacked = gradients(unpacked_loss)
    assert packed.keys() == unpacked.keys()
    # a branch that saw a sibling, another pair's picture, or a position off by one, moves both by more than 1e-3
    loss_tolerance, tolerance = (1e-6, 1e-4) if dtype == torch.float32 else (1e-14, 1e-12)
    torch.testing.assert_close(packed_loss, unpacked_loss, rtol=loss_tolerance, atol=0)
    total_norm = torch.stack([gradient.norm() for gradient in unpacked.values()]).norm()
    for name, gradient in unpacked.items():
        assert (packed[name] - gradient).norm() < tolerance * max(gradient.norm(), 1e-2 * total_norm), name
    if len(captions) > 1:
        change = float((loss_of(sequences_of_other_images, "sdpa") - packed_loss).detach().abs())
        assert change > (1e-3 if set(images) == {2} else 1e-5), "a set of one image changes the loss less than a pair"


@pytest.mark.parametrize("captions", [(2,), (3, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.float32, "sdpa"), (torch.float64, "sdpa"), (torch.float64, "flex")], ids=str
)
def test_packed_equals_unpacked(captions, dtype, kernel, case):
    check_packed_equals_unpacked(case, captions, (2,) * len(captions), dtype, kernel)


@pytest.mark.parametrize("images", [(1, 0, 2), (0, 1), (1, 3, 0)], ids=str)
@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("blip2idc")], indirect=True)
def test_image_sets_of_any_size_are_packed_together(images, kernel, case):
    check_packed_equals_unpacked(case, (3, 1, 2)[: len(images)], images, torch.float64, kernel)


@pytest.mark.parametrize("activation_checkpointing", ["none", "selective", "full"])
def test_fusing_changes_classes_and_no_number(activation_checkpointing, case):
    results = []
    for fused in (None, activation_checkpointing):
        model = trains(case, torch.float32, fused)
        has_fused_adapters = fused is not None and case.facts.has_linear_adapters
        assert any(isinstance(module, FusedLora) for module in model.modules()) == has_fused_adapters
        assert model.is_gradient_checkpointing == (fused == "full")
        processor = case.family.load_processor(case.base, model.config)
        inputs = pair_inputs(processor, PAIRS[:1], [QUESTION])
        keep = (torch.arange(inputs["input_ids"].shape[1]) >= 4)[None]
        inputs |= {"attention_mask": None, "logits_to_keep": keep, "tokens": inputs["input_ids"], "use_cache": False}
        logits = model(**inputs).logits
        logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    stock_results, fused_results = results
    largest_norm = max(float(gradient.norm()) for gradient in stock_results[1:])
    assert float((fused_results[0] - stock_results[0]).norm()) < 1e-4 * float(stock_results[0].norm())
    for gradient, stock_gradient in zip(fused_results[1:], stock_results[1:], strict=True):
        assert float((gradient - stock_gradient).norm()) < 1e-4 * largest_norm


def test_a_folder_without_a_weight_is_refused(case, tmp_path):
    """The folder is a base, or a trained model, whose missing module must not be replaced by a new one."""
    removed_weights = {case.base: case.facts.base_weights, case.checkpoint: case.facts.trained_weights}
    for source, part in removed_weights.items():
        if not part:
            continue
        folder = shutil.copytree(source, tmp_path / source.name)
        for file in folder.glob("*.safetensors"):
            weights = load_file(file)
            other_weights = {name: weight for name, weight in weights.items() if part not in name}
            save_file(other_weights, file, {"format": "pt"})
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            file_by_weight = json.loads(index.read_text())["weight_map"]
            file_by_weight = {name: file_name for name, file_name in file_by_weight.items() if part not in name}
            index.write_text(json.dumps({"metadata": {}, "weight_map": file_by_weight}))
        with raises(DataError, "models.weights_missing", path=folder):
            case.family.load_base(folder, case.settings, torch.float32, "sdpa")
