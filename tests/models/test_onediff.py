"""OneDiff on LLaVA-OneVision and on LLaVA-1.5: what it loads, what the LLM sees, and its way to disk and back."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoProcessor,
    LlavaForConditionalGeneration,
    LlavaOnevisionForConditionalGeneration,
)

from m3diff.models import FAMILIES
from m3diff.models.attention import KERNELS
from m3diff.models.device import Device
from m3diff.models.onediff_model import OneDiffConfig, OneDiffForConditionalGeneration
from m3diff.models.onediff_settings import OneDiffSettings, VDMConfig
from m3diff.models.settings import Lora, Rates
from m3diff.models.tuning import parameter_counts, prepare
from m3diff.stages.train.batches import MicroBatch, complete
from m3diff.stages.train.engine import token_loss
from m3diff.stages.train.packing import pack
from tests import tiny
from tests.models.llava15 import write_llava15
from tests.models.test_vdm import bert, maps_by_hand
from tests.tiny import RATES, noise_image, saliency_map, scale_features, tiny_base

FAMILY = FAMILIES["onediff"]
JOINED = {"vision_feature_layers": (1, 2), "tokens": 3, "layers": 4, "width": 12, "heads": 2, "mlp_ratio": 2}
SEPARATE = JOINED | {"images": "separate", "norm": "size", "layers": 3}
QUESTION = "What changed?"
CPU = Device(gpu=False, precision="fp32")


@pytest.fixture(scope="module")
def onevision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("onevision") / "base")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava15(tmp_path_factory.mktemp("llava") / "llava-1.5-7b-hf")


@pytest.fixture(params=["onevision", "llava"])
def base(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def settings(module: dict[str, Any] | None = JOINED, rank: int = 2, **rates: float | None) -> OneDiffSettings:
    without = {"module": None} if module is None else {}
    return OneDiffSettings(
        family="onediff",
        module=None if module is None else VDMConfig(**module),
        lora=Lora(rank=rank, alpha=4),
        rates=Rates(**RATES | without | rates),
    )


def trained(base: Path, made: OneDiffSettings, seed: int = 1) -> Any:
    """A model whose trainable parameters have moved, with its adapters."""
    torch.manual_seed(seed)
    model = prepare(FAMILY.load_base(base, made, torch.float32, "sdpa"), FAMILY, made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def pair_inputs(base: Path, model: Any, pairs: int = 2) -> dict[str, Any]:
    processor = FAMILY.load_processor(base, model.config)
    images = [(noise_image(2 * n), noise_image(2 * n + 1)) for n in range(pairs)]
    return tiny.pair_inputs(processor, images, [QUESTION] * pairs)


def test_every_weight_of_the_base_is_loaded_and_only_the_module_is_new(base: Path) -> None:
    model, info = OneDiffForConditionalGeneration.from_pretrained(
        base, module=JOINED, dtype=torch.float32, output_loading_info=True
    )
    assert {name.split(".")[1] for name in info["missing_keys"]} == {"vdm"}
    assert not info["unexpected_keys"]
    kind = LlavaForConditionalGeneration if "1.5" in base.name else LlavaOnevisionForConditionalGeneration
    stock, ours = kind.from_pretrained(base, dtype=torch.float32).state_dict(), model.state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in stock.items())
    assert set(ours) - set(stock) == set(info["missing_keys"])


def test_without_a_module_llava_is_itself(llava: Path) -> None:
    """The logits of transformers' own LLaVA-1.5: class token, pre-norm and feature layer are where it has them."""
    stock = LlavaForConditionalGeneration.from_pretrained(llava, dtype=torch.float32, attn_implementation="sdpa").eval()
    ours = FAMILY.load_base(llava, settings(None), torch.float32, "sdpa").eval()
    inputs = pair_inputs(llava, ours, pairs=1)
    with torch.no_grad():
        want = stock(**{name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values")}).logits
        torch.testing.assert_close(ours(**inputs).logits, want, rtol=1e-5, atol=1e-5)


def test_the_prompt_is_llavas_own(llava: Path) -> None:
    config = FAMILY.planned_config(llava, settings(None))
    processor = FAMILY.load_processor(llava, config)
    stock = AutoProcessor.from_pretrained(llava)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
    text = stock.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    want = stock.tokenizer(text.replace("<image>", "<image>" * 4))["input_ids"]
    assert list(processor.encode_prompt(QUESTION)) == want
    assert (processor.end_id, processor.pad_id) == (2, processor.tokenizer.convert_tokens_to_ids("<pad>"))
    reference = processor.encode_reference("the ball is gone")
    assert reference[-1] == 2
    assert processor.decode(torch.tensor([reference])) == ["the ball is gone"]


@pytest.mark.parametrize("family", ["onediff", "m3diff"])
def test_a_question_with_the_mark_of_an_image_is_refused_in_words(family: str, onevision: Path) -> None:
    processor = FAMILIES[family].load_processor(onevision)
    with pytest.raises(ValueError, match="the question has <image>, the mark of an image's place in a prompt"):
        processor.encode_prompt("What is new in <image>?")


@pytest.mark.parametrize(("place", "extra"), [("after", (0, 3)), ("between", (3, 0)), ("before", (3, 0))])
def test_delta_tokens_have_places_of_their_own(place: str, extra: tuple[int, int], base: Path) -> None:
    config = FAMILY.planned_config(base, settings(JOINED | {"place": place}))
    each = config.patches + config.newline
    assert config.places() == (each + extra[0], each + extra[1])
    processor = FAMILY.load_processor(base, config)
    ids = list(processor.encode_prompt(QUESTION))
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert ids.count(image) == 2 * each + 3 == config.image_tokens


@pytest.mark.parametrize("place", ["after", "between", "before"])
def test_the_llm_sees_patches_and_delta_tokens_in_their_order(place: str, base: Path) -> None:
    model = trained(base, settings(JOINED | {"place": place})).get_base_model()
    inputs, inner = pair_inputs(base, model), model.model
    with torch.no_grad():
        states = inner.vision_hidden_states(inputs["pixel_values"])
        images = inner.multi_modal_projector(states[model.config.vision_feature_layer])
        if model.config.newline:
            images = torch.cat([images, inner.image_newline.expand(len(images), 1, -1)], dim=1)
        before, after = images[0::2], images[1::2]
        taps = [states[layer] for layer in (1, 2)]
        delta = inner.vdm([tap[0::2] for tap in taps], [tap[1::2] for tap in taps])
        order = {"after": [before, after, delta], "between": [before, delta, after], "before": [delta, before, after]}
        want = torch.cat(order[place], dim=1)
        got = inner.get_image_features(**{k: v for k, v in inputs.items() if "ids" not in k and "mask" not in k})
        rows = [torch.cat(list(got.pooler_output[2 * n : 2 * n + 2])) for n in range(2)]
        torch.testing.assert_close(torch.stack(rows), want)
        swapped = inputs["pixel_values"].unflatten(0, (2, 2)).flip(1).flatten(0, 1)
        assert (model(**inputs | {"pixel_values": swapped}).logits - model(**inputs).logits).abs().max() > 1e-4


def test_delta_tokens_go_through_the_projector_where_it_is_shared(base: Path) -> None:
    model = trained(base, settings(JOINED | {"projection": "shared"})).get_base_model()
    inner, states = model.model, model.model.vision_hidden_states(pair_inputs(base, model)["pixel_values"])
    taps = [states[layer] for layer in (1, 2)]
    want = inner.multi_modal_projector(inner.vdm([tap[0::2] for tap in taps], [tap[1::2] for tap in taps]))
    torch.testing.assert_close(inner.delta_tokens(states), want)


def answers(number: int) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randint(5, 30, (3 + k,), generator=generator).tolist() for k in range(number)]


def micro_batch(processor: Any, groups: list[tuple[int, list[list[int]]]], dtype: torch.dtype) -> MicroBatch:
    """One sequence for each (pair, answers)."""
    prompt = processor.encode_prompt(QUESTION)
    packed = pack([[(prompt, answer) for answer in given] for _, given in groups])
    images = [noise_image(2 * pair + side) for pair, _ in groups for side in (0, 1)]
    prepared = torch.stack([torch.from_numpy(processor.prepare_image(image).copy()) for image in images])
    return complete(MicroBatch(packed, prepared, torch.ones(len(packed.labels), dtype=dtype)), CPU, processor.pad_id)


@pytest.mark.parametrize("rank", [2, 0], ids=["adapters", "full"])
@pytest.mark.parametrize("module", [JOINED, SEPARATE], ids=["joined", "separate"])
def test_packed_equals_unpacked(module: dict[str, Any], rank: int, base: Path) -> None:
    made = settings(module, rank=rank)
    torch.manual_seed(3)
    model = FAMILY.load_base(base, made, torch.float32, KERNELS)
    scale_features(model)
    adapted = prepare(model, FAMILY, made)
    FAMILY.fuse(model, "none")
    adapted.train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    processor = FAMILY.load_processor(base, model.config)
    groups = [(pair, answers(count)) for pair, count in enumerate((3, 1, 2))]

    def gradients(batches: list[MicroBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        adapted.zero_grad()
        loss = sum(token_loss(adapted, batch, processor, CPU) for batch in batches)
        loss.backward()  # type: ignore[union-attr]
        return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[union-attr]

    loss, packed = gradients([micro_batch(processor, groups, torch.float32)])
    alone = [micro_batch(processor, [(pair, [one])], torch.float32) for pair, given in groups for one in given]
    other, unpacked = gradients(alone)
    # a branch that saw a sibling, or delta tokens of another pair, moves both by more than 1e-3
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=0)
    whole = torch.stack([gradient.norm() for gradient in unpacked.values()]).norm()
    assert any(".vdm." in name for name in packed)
    for name, gradient in unpacked.items():
        assert (packed[name] - gradient).norm() < 1e-4 * max(gradient.norm(), 1e-2 * whole), name


def test_rank_0_trains_the_whole_llm_and_adapters_only_the_linears(base: Path) -> None:
    names = {}
    for rank in (0, 2):
        made = settings(rank=rank, vision=None)
        model = prepare(FAMILY.load_base(base, made, torch.float32, "sdpa"), FAMILY, made)
        names[rank] = {name for name, p in model.named_parameters() if p.requires_grad}
        assert not [name for name in names[rank] if "vision_tower" in name]
    assert {"lm_head.weight", "model.language_model.embed_tokens.weight", "model.language_model.norm.weight"} <= names[
        0
    ]
    assert not [name for name in names[2] if "language_model" in name and "lora_" not in name]


def test_the_weights_keep_the_names_of_the_release(base: Path, tmp_path: Path) -> None:
    FAMILY.load_base(base, settings(), torch.float32, "sdpa").save_pretrained(tmp_path)
    written = set(load_file(tmp_path / "model.safetensors"))
    index = base / "model.safetensors.index.json"
    theirs = (
        set(json.loads(index.read_text())["weight_map"])
        if index.is_file()
        else set(load_file(base / "model.safetensors"))
    )
    assert theirs <= written
    assert all("vdm." in name for name in written - theirs)


@pytest.mark.parametrize("stock", [LlavaForConditionalGeneration, LlavaOnevisionForConditionalGeneration])
def test_stock_llava_refuses_a_model_with_a_module(stock: type, base: Path, tmp_path: Path) -> None:
    if ("1.5" in base.name) != (stock is LlavaForConditionalGeneration):
        pytest.skip("of the other base")
    model = FAMILY.load_base(base, settings(), torch.float32, "sdpa")
    model.save_pretrained(tmp_path / "with")
    inputs = pair_inputs(base, model, pairs=1)
    with pytest.raises(Exception, match=r"vdm|match|strategy"):
        stock.from_pretrained(tmp_path / "with")(**inputs)
    FAMILY.load_base(base, settings(None), torch.float32, "sdpa").save_pretrained(tmp_path / "without")
    assert type(stock.from_pretrained(tmp_path / "without")) is stock
    assert json.loads((tmp_path / "without" / "config.json").read_text())["architectures"] == [stock.__name__]


def test_a_trained_base_keeps_its_module(base: Path, tmp_path: Path) -> None:
    """The second phase begins with the first one's folder: no weight is made anew, whatever the seed."""
    first = trained(base, settings(rank=0))
    first.save_pretrained(tmp_path)
    torch.manual_seed(99)
    second = FAMILY.load_base(tmp_path, settings(rank=0), torch.float32, "sdpa")
    assert all(torch.equal(weight, second.state_dict()[name]) for name, weight in first.state_dict().items())


def test_the_module_starts_as_the_bert_in_the_bases_folder(onevision: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(onevision, tmp_path / "base")
    made = settings(JOINED | {"start": "bert", "heads": 3})
    with pytest.raises(ValueError, match="no BERT there"):
        FAMILY.load_base(folder, made, torch.float32, "sdpa")
    theirs = bert(folder / "bert")
    model = FAMILY.load_base(folder, made, torch.float32, "sdpa")
    assert torch.equal(model.model.vdm.layers[3].mlp[0].weight, theirs.encoder.layer[3].intermediate.dense.weight)
    with torch.no_grad():
        model.model.vdm.layers[3].mlp[0].weight.add_(1.0)
    model.save_pretrained(tmp_path / "trained")
    again = FAMILY.load_base(tmp_path / "trained", made, torch.float32, "sdpa")
    assert torch.equal(again.model.vdm.layers[3].mlp[0].weight, model.model.vdm.layers[3].mlp[0].weight)
    shutil.rmtree(folder / "bert")
    bare = FAMILY.load(folder, torch.float32, tmp_path / "trained")  # as under adapters, which hold its weights
    assert json.dumps(bare.config.vdm, sort_keys=True) == json.dumps(model.config.vdm, sort_keys=True)


def test_faults_name_what_the_base_cannot_give(onevision: Path, llava: Path) -> None:
    configs = {path: json.loads((path / "config.json").read_text()) for path in (onevision, llava)}
    assert FAMILY.faults(settings(), configs[llava]) == []
    deep = settings(JOINED | {"vision_feature_layers": (1, 5)})
    assert FAMILY.faults(deep, configs[llava]) == [
        "module.vision_feature_layers: 5 lies beyond the 4 layers of the vision encoder"
    ]
    placed = settings(SEPARATE | {"pos_embed_scale": 3.0, "tokens": 7})
    assert FAMILY.faults(placed, configs[onevision]) == [
        "module.tokens: pos_embed_scale binds each to a patch, so set them to 9, not 7"
    ]
    with pytest.raises(ValueError, match="set tokens to 9, not 7"):
        FAMILY.load_base(onevision, placed, torch.float32, "sdpa")
    assert FAMILY.faults(deep, None) == []
    published = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    assert FAMILY.faults(settings(asdict(VDMConfig())), published) == []
    siglip = {"model_type": "onediff", "vision_config": {"model_type": "siglip_vision_model"}}
    assert FAMILY.faults(deep, siglip) == [], "a trained one may leave out what is the default"
    for vision, named in (({"model_type": "dinov2"}, "dinov2"), ({}, "none")):
        (fault,) = FAMILY.faults(settings(), {"model_type": "llava", "vision_config": vision})
        assert fault.endswith(f"and train.base has {named}")
    own = published | {"vdm": asdict(VDMConfig(tokens=16))}
    assert "set tokens to 16 instead of 32" in FAMILY.faults(settings(asdict(VDMConfig())), own)[0]
    (fault,) = FAMILY.faults(settings(), published | {"vdm": None})
    assert "set null instead of {" in fault, "a control would train without the module and say nothing"
    assert FAMILY.faults(settings(None), published | {"vdm": None}) == []


@pytest.mark.parametrize("module", [JOINED, None], ids=["module", "none"])
@pytest.mark.parametrize("kind", ["blip-2", "m3diff", "llava_next"])
def test_a_base_of_another_kind_is_a_fault_with_a_module_and_without(
    kind: str, module: dict[str, Any] | None, onevision: Path
) -> None:
    config = json.loads((onevision / "config.json").read_text()) | {"model_type": kind}
    (fault,) = FAMILY.faults(settings(module), config)
    assert fault == (
        f"family onediff needs one of LLaVA-OneVision, LLaVA-1.5, OneDiff in train.base, and it has a {kind}"
    )


@pytest.mark.parametrize("module", [JOINED, None], ids=["module", "none"])
def test_what_is_read_of_a_clip_is_one_layer_without_its_class_token(
    module: dict[str, Any] | None, llava: Path, tmp_path: Path
) -> None:
    config = json.loads((llava / "config.json").read_text())
    for layer in (-5, 0, 4):
        assert FAMILY.faults(settings(module), config | {"vision_feature_layer": layer}) == []
    for layer in ([-2, -1], -6, 5):
        (fault,) = FAMILY.faults(settings(module), config | {"vision_feature_layer": layer})
        assert f"vision_feature_layer must be one whole number from -5 to 4, found {layer}" in fault
    (fault,) = FAMILY.faults(settings(module), config | {"vision_feature_select_strategy": "full"})
    assert "vision_feature_select_strategy is full, which keeps CLIP's class token" in fault
    FAMILY.load_base(llava, settings(module), torch.float32, "sdpa").save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert FAMILY.faults(settings(module), written) == [], "what was trained on it is a base again"


def test_the_published_shapes_give_the_published_number_of_parameters(tmp_path: Path) -> None:
    """LLaVA-1.5-7B has 7.06 B parameters; the VDM of the paper's setting about 54 M (6 layers of BERT 42.5 M, three
    cross-attentions, the linear to the LLM)."""
    config = FAMILY.planned_config(tmp_path / "models" / "llava-1.5-7b-hf", settings(asdict(VDMConfig())))
    assert config.name_or_path == "llava-hf/llava-1.5-7b-hf"
    assert config.image_tokens == 2 * 576 + 32
    with torch.device("meta"):
        made = replace(
            settings(asdict(VDMConfig()), rank=0), rates=Rates(vision=None, projector=1e-5, module=1e-5, llm=1e-5)
        )
        counts = parameter_counts(prepare(FAMILY.build(config), FAMILY, made), FAMILY)
    assert counts["module"] == pytest.approx(54e6, rel=0.02)
    assert counts["trainable"] + counts["frozen"] - counts["module"] == pytest.approx(7.06e9, rel=0.002)
    assert counts["llm"] == pytest.approx(6.74e9, rel=0.002)
    assert counts["vision"] == 0


@pytest.mark.parametrize(("module", "rank"), [(JOINED, 2), (SEPARATE, 0), (JOINED | {"projection": "shared"}, 2)])
def test_flops_are_those_that_torch_counts(module: dict[str, Any], rank: int, llava: Path) -> None:
    made = settings(module, rank=rank)
    model = FAMILY.load_base(llava, made, torch.float32, "eager").eval()
    prepare(model, FAMILY, made)
    model.requires_grad_(False)
    inputs = dict(pair_inputs(llava, model, pairs=1))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(**inputs, use_cache=False)
    counts, names = counter.get_flop_counts(), {m: name for name, m in model.named_modules()}

    def counted(part: nn.Module) -> int:
        return sum(counts[f"{type(model).__name__}.{names[part]}"].values())

    terms = {term.name: term.forward for term in FAMILY.flops(model.config, inputs["input_ids"].numel(), 1, made)}
    inner = model.model
    shared = module.get("projection") == "shared"
    through = counted(inner.multi_modal_projector) - terms["projector"]  # of the delta tokens, where it is shared
    assert (through > 0) == shared
    assert terms["VDM"] == counted(inner.vdm) + through
    assert terms["LLM linears"] + terms.get("LoRA", 0) + 2 * terms["LLM attention"] == sum(
        map(counted, inner.language_model.layers)
    )


def test_backward_factors_follow_from_what_trains(llava: Path) -> None:
    paper = replace(settings(asdict(VDMConfig()), rank=0), rates=Rates(None, 1e-5, 1e-5, 1e-5))
    aligned = replace(paper, rates=Rates(None, 1e-3, 3e-4, None))
    config = OneDiffConfig.published("", asdict(VDMConfig()))
    factors = [
        {term.name: term.backward_factor for term in FAMILY.flops(config, 1200, 10, one)} for one in (paper, aligned)
    ]
    common = {"LLM attention": 2, "vision encoder": 0, "projector": 2, "VDM": 1}
    assert factors[0] == common | {"LLM linears": 2, "head, supervised tokens": 2}
    assert factors[1] == common | {"LLM linears": 1, "head, supervised tokens": 1}


def test_maps_come_from_the_pass_that_captions(base: Path) -> None:
    model = trained(base, settings(SEPARATE)).get_base_model()
    inputs = pair_inputs(base, model)
    given = {name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values", "batch_num_images")}
    runs: list[int] = []
    hook = model.model.vision_tower.embeddings.register_forward_hook(lambda *_: runs.append(1))
    tokens, maps = FAMILY.generate(model, given, True, {"max_new_tokens": 2, "do_sample": False})
    side = int(model.config.patches**0.5)
    assert maps.shape == (2, side, side)
    assert len(runs) == 1, "the images are encoded once for both"
    hook.remove()
    with torch.no_grad():
        states = model.model.vision_hidden_states(inputs["pixel_values"])
        taps = [states[layer] for layer in SEPARATE["vision_feature_layers"]]
        by_hand = maps_by_hand(model.model.vdm, [tap[0::2] for tap in taps], [tap[1::2] for tap in taps])
    assert len(by_hand) == 2
    want = ((by_hand[0] + by_hand[1]) / 2).reshape(2, side, side)
    torch.testing.assert_close(maps, want, rtol=1e-3, atol=1e-5)
    assert (maps - 1 / side**2).abs().max() > 1e-3
    torch.testing.assert_close(saliency_map(model, inputs["pixel_values"]), want, rtol=1e-3, atol=1e-5)
    assert tokens.shape[0] == 2
    plain = FAMILY.load_base(base, settings(None), torch.float32, "sdpa")
    torch.testing.assert_close(saliency_map(plain, inputs["pixel_values"]), torch.full((2, side, side), 1 / side**2))
