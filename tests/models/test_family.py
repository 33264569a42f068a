"""M3Diff as a family of functions: what it loads, plans and counts."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from m3diff.models import FAMILIES
from m3diff.models.m3diff import LARGE_BASE, llm_linears
from m3diff.models.m3diff_model import M3DiffConfig
from m3diff.models.m3diff_settings import MDPConfig
from m3diff.models.processing import M3DiffImageProcessor
from m3diff.models.settings import Rates
from m3diff.models.tuning import parameter_counts, prepare
from tests.models.test_modeling import pair_inputs
from tests.tiny import BASE, MDP, SIDE, noise_image, tiny_base, tiny_config, tiny_model, tiny_settings

FAMILY = FAMILIES["m3diff"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("family") / "base")


@pytest.mark.parametrize("mdp", [MDP, None], ids=["module", "no module"])
def test_the_base_is_loaded_with_the_module_of_the_settings(mdp: dict | None, base: Path) -> None:
    settings = tiny_settings(mdp)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(FAMILY.load_base(base, settings, torch.bfloat16, "eager"))
    assert models[0].dtype == torch.bfloat16
    assert models[0].config._attn_implementation == "eager"
    assert (models[0].model.mdp is None) == (mdp is None)
    if mdp:
        assert models[0].model.mdp.cfg == settings.module
        assert models[0].config.mdp == asdict(settings.module)
    states = [model.state_dict() for model in models]
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items()), "from the seed alone"


def test_fusing_passes_the_checkpointing_on() -> None:
    model = tiny_model(MDP)
    kinds = []
    for way in ("none", "full", "selective", "none"):
        FAMILY.fuse(model, way)
        layer = model.model.language_model.layers[0]
        kinds.append((type(layer).__name__, model.is_activation_checkpointing))
    fused, selective = "FusedDecoderLayer", "SelectiveDecoderLayer"
    assert kinds == [(fused, False), (fused, True), (selective, False), (fused, False)]
    with pytest.raises(AssertionError, match="'cheap' is none of"):
        FAMILY.fuse(model, "cheap")


def test_the_planned_configuration_is_the_bases_or_the_published_one(base: Path, tmp_path: Path) -> None:
    settings = tiny_settings()
    config = FAMILY.planned_config(base, settings)
    assert config.vision_config.num_hidden_layers == 2
    assert config.module_config() == settings.module
    published = FAMILY.planned_config(tmp_path, tiny_settings(None))
    assert (published.mdp, published.text_config.num_hidden_layers) == (None, 28)
    assert published.name_or_path == "llava-hf/llava-onevision-qwen2-7b-ov-hf"
    small = FAMILY.planned_config(tmp_path / "llava-onevision-qwen2-0.5b-ov-hf", tiny_settings(None))
    assert (small.text_config.hidden_size, small.tie_word_embeddings) == (896, True)
    assert small.name_or_path == "llava-hf/llava-onevision-qwen2-0.5b-ov-hf"
    assert FAMILY.planned_config(tmp_path, settings).module_config() == settings.module


def test_the_published_shapes_give_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = FAMILY.build(M3DiffConfig.published(LARGE_BASE, None))
        counts = parameter_counts(prepare(model, FAMILY, tiny_settings(None, rank=128)), FAMILY)
    assert counts["llm"] == 128 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    # llava-hf/llava-onevision-qwen2-7b-ov-hf: 8.03 B parameters
    assert counts["trainable"] + counts["frozen"] - counts["llm"] == pytest.approx(8.03e9, rel=0.005)


def test_blank_images_are_those_that_the_processor_makes_of_a_pair(base: Path) -> None:
    processor = FAMILY.load_processor(base)
    pair = processor([(noise_image(0), noise_image(1))], ["What changed?"])
    config = FAMILY.planned_config(base, tiny_settings())
    blank = FAMILY.classes()[0].blank_images(config, "meta")
    assert blank.keys() == {"pixel_values", "batch_num_images"}
    for name, value in blank.items():
        assert (value.shape, value.dtype) == (pair[name].shape, pair[name].dtype)
    assert blank["pixel_values"].is_meta
    assert blank["batch_num_images"].tolist() == pair["batch_num_images"].tolist()


@pytest.mark.parametrize(("config", "tokens"), [(tiny_config(), 20), (M3DiffConfig.published(LARGE_BASE, {}), 1460)])
def test_a_pairs_image_tokens_are_patches_and_newlines(config: object, tokens: int) -> None:
    assert config.image_tokens == tokens


def forward_flops(model: nn.Module, **inputs: object) -> Callable[[nn.Module], int]:
    """FLOPs of the modules in a forward pass, as torch counts them."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(**inputs)
    counts, names = counter.get_flop_counts(), {module: name for name, module in model.named_modules()}
    return lambda module: sum(counts[f"{type(model).__name__}.{names[module]}"].values())


@pytest.mark.parametrize("share_levels", [True, False])
def test_flops_are_those_that_torch_counts(share_levels: bool) -> None:
    fields = {**MDP, "vision_feature_layers": [0, 1, 2], "layers": 3, "mlp_ratio": 3, "share_levels": share_levels}
    model = tiny_model(fields)
    prepare(model, FAMILY, tiny_settings(fields, rank=2))
    inputs = pair_inputs(pairs=1) | {"attention_mask": None, "use_cache": False}
    keep = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    keep[0, -5:] = True
    counted = forward_flops(model, **inputs, logits_to_keep=keep)
    terms = {
        term.name: term.forward for term in FAMILY.flops(model.config, keep.numel(), 5, tiny_settings(fields, rank=2))
    }
    inner = model.model
    scores = 3 * 2 * (3 * 16 * 4 + 4)  # of three levels, left out of the formula: one token a pair
    assert terms["MDP"] == counted(inner.mdp) - scores
    assert terms["projector"] == counted(inner.multi_modal_projector)
    assert terms["head, supervised tokens"] == counted(model.lm_head) == 2 * 16 * 640 * 5
    encoder = inner.vision_tower
    assert terms["vision encoder"] == counted(encoder.embeddings) + sum(map(counted, encoder.encoder.layers))
    whole = sum(map(counted, inner.language_model.layers))
    assert terms["LLM linears"] + terms["LoRA"] + 2 * terms["LLM attention"] == whole, "torch counts the whole square"


def test_a_terms_total_is_forward_and_backward() -> None:
    terms = {term.name: term for term in FAMILY.flops(tiny_config(MDP), 30, 5, tiny_settings(rank=0))}
    assert "LoRA" not in terms
    assert "MDP" not in {term.name for term in FAMILY.flops(tiny_config(), 30, 5, tiny_settings(None))}
    factors = {name: term.backward_factor for name, term in terms.items()}
    want = {"LLM linears": 2, "LLM attention": 2, "vision encoder": 2, "projector": 2, "MDP": 2}
    assert factors == want | {"head, supervised tokens": 1}
    assert all(term.total == (1 + factors[name]) * term.forward for name, term in terms.items())


def test_a_frozen_encoder_has_no_backward_and_nothing_to_recompute() -> None:
    made = tiny_settings(MDP)
    frozen = replace(made, rates=Rates(**dict(made.rates) | {"vision": None}))
    every, less = ({t.name: t for t in FAMILY.flops(tiny_config(MDP), 30, 5, each)} for each in (made, frozen))
    assert (every["vision encoder"].backward_factor, every["vision encoder"].recomputed) == (2, True)
    assert (less["vision encoder"].backward_factor, less["vision encoder"].recomputed) == (0, False)
    assert less["LLM linears"].recomputed


def test_lora_and_linear_parameters_are_the_models() -> None:
    model = tiny_model()
    linears = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and "language_model.layers" in name]
    assert sorted(llm_linears(model.config) * 2) == sorted(
        (linear.in_features, linear.out_features) for linear in linears
    )


def test_the_processor_is_the_protocols(base: Path) -> None:
    processor = FAMILY.load_processor(base)
    images = [noise_image(1, (30, 20)), noise_image(2)]
    prepared = np.stack([processor.prepare_image(image) for image in images])
    assert (prepared.shape, prepared.dtype) == ((2, SIDE, SIDE, 3), np.uint8)
    inputs = processor.image_inputs(torch.from_numpy(prepared))
    assert inputs["batch_num_images"].tolist() == [2]
    torch.testing.assert_close(inputs["pixel_values"], torch.tensor(prepared / 127.5 - 1).permute(0, 3, 1, 2).float())
    whole = processor([tuple(images)], ["What changed?"])
    assert torch.equal(whole["pixel_values"], inputs["pixel_values"])
    reference = processor.encode_reference("the ball is gone")
    assert reference[-1] == processor.end_id == processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert processor.pad_id == processor.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert processor.decode(torch.tensor([reference, reference])) == ["the ball is gone"] * 2


def test_questions_of_different_lengths_are_padded_at_the_left(base: Path) -> None:
    processor = FAMILY.load_processor(base)
    pair = (noise_image(1), noise_image(2))
    questions = ["What changed?", "What has changed from the first image to the second?"]
    inputs = processor([pair, pair], questions)
    short, long = (processor.encode_prompt(question) for question in questions)
    gap = len(long) - len(short)
    assert gap > 0
    assert inputs["input_ids"].tolist() == [[processor.pad_id] * gap + list(short), list(long)]
    assert inputs["attention_mask"].tolist() == [[0] * gap + [1] * len(short), [1] * len(long)]
    assert inputs["batch_num_images"].tolist() == [2, 2]
    assert inputs["image_sizes"].tolist() == [[SIDE, SIDE]] * 4
    assert inputs["pixel_values"].shape == (4, 3, SIDE, SIDE)
    with pytest.raises(AssertionError, match="2 pairs but 1 questions"):
        processor([pair, pair], questions[:1])


def test_a_wide_image_is_padded_to_a_square_with_the_mean_colour() -> None:
    processor = FAMILY.load_processor(BASE)
    side = processor.image_processor.side
    wide = noise_image(1, (side, side // 2))
    prepared = processor.prepare_image(wide)
    assert np.array_equal(prepared[side // 4 : side // 4 + side // 2], np.asarray(wide))
    assert (prepared[: side // 4] == 127).all()
    assert (prepared[side // 4 + side // 2 :] == 127).all()
    tall = processor.prepare_image(noise_image(1, (side // 2, side)))
    assert (tall[:, : side // 4] == 127).all()
    assert (tall[:, side // 4 + side // 2 :] == 127).all()


def test_an_image_processor_reads_either_form_of_its_size() -> None:
    assert M3DiffImageProcessor(size={"shortest_edge": 30}).size == {"height": 30, "width": 30}
    assert M3DiffImageProcessor(size={"height": 28, "width": 28}).side == 28
    assert M3DiffImageProcessor().to_dict() == {
        "image_processor_type": "M3DiffImageProcessor",
        "size": {"height": 384, "width": 384},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def test_the_module_of_a_configuration_has_the_papers_defaults() -> None:
    assert M3DiffConfig.published(LARGE_BASE, {}).module_config() == MDPConfig()


def test_the_contribution_has_a_name_for_each_level_and_none_without_a_module() -> None:
    contribution = FAMILY.contribution
    assert contribution is not None
    settings = tiny_settings({**MDP, "vision_feature_layers": [0, 2]})
    names = ("module_update_ratio/0", "module_update_ratio/2", "module_score/0", "module_score/2")
    assert contribution.names(settings) == names
    assert contribution.names(tiny_settings(None)) == ()
    sums = torch.tensor([[4.0, 2.0], [16.0, 6.0], [64.0, 8.0]])
    assert contribution.figures(sums) == [0.25, 0.5, 0.25, 0.75]
