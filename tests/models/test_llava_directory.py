"""Miniatures of llava-hf/llava-onevision-qwen2-7b-ov-hf and of the 0.5 B release, file by file: legacy weight names,
shards or one file, Qwen2's files."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaOnevisionForConditionalGeneration

from m3diff.commands.plan.plan import meta_model, parameters_of
from m3diff.models import FAMILIES
from m3diff.models.m3diff_model import M3DiffForConditionalGeneration
from m3diff.models.m3diff_settings import MDPConfig
from m3diff.models.processing import M3DiffImageProcessor
from tests.stages.train.toy import recipe, run, write_mixture
from tests.tiny import BASE, noise_image, pair_inputs, tiny_base, tiny_settings

ENCODER_LAYERS, WIDTH, SIDE, PATCH = 26, 16, 28, 14
CHAT = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + content['text'] }}"
    "{% endfor %}{{'<|im_end|>'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def published_config(tokenizer: object, vocabulary: int) -> dict:
    """The published config.json's keys; sizes made small, 26 layers of the vision encoder kept."""
    token = tokenizer.convert_tokens_to_ids  # type: ignore[attr-defined]
    return {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "hidden_size": WIDTH,
        "ignore_index": -100,
        "image_grid_pinpoints": [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE]],
        "image_token_index": token("<image>"),
        "model_type": "llava_onevision",
        "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "Qwen/Qwen2-7B-Instruct",
            "architectures": ["Qwen2ForCausalLM"],
            "bos_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|im_end|>"),
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "max_window_layers": 2,
            "model_type": "qwen2",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": vocabulary,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.45.0.dev0",
        "use_image_newline_parameter": True,
        "video_token_index": token("<video>"),
        "vision_aspect_ratio": "anyres_max_9",
        "vision_config": {
            "hidden_size": WIDTH,
            "image_size": SIDE,
            "intermediate_size": 2 * WIDTH,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 2,
            "num_hidden_layers": ENCODER_LAYERS,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


def legacy(name: str) -> str:
    """The name on the hub of a weight of today's LlavaOnevisionForConditionalGeneration."""
    inner = name.removeprefix("model.")
    if inner.startswith("vision_tower."):
        return inner.replace("vision_tower.", "vision_tower.vision_model.", 1)
    if inner.startswith("language_model."):
        return inner.replace("language_model.", "language_model.model.", 1)
    return {"lm_head.weight": "language_model.lm_head.weight"}.get(name, inner)


def small_config(tokenizer: object, vocabulary: int) -> dict:
    """The 0.5 B release's keys: the LLM's embeddings are its head's weights, which the LLM's configuration says and the
    model's own denies."""
    config = published_config(tokenizer, vocabulary)
    text = config["text_config"] | {"_name_or_path": "Qwen/Qwen2-0.5B-Instruct", "tie_word_embeddings": True}
    return config | {"text_config": text, "tie_word_embeddings": False}


def write_directory(folder: Path, base: Path, make_config: Callable[[object, int], dict]) -> dict:
    """Everything but the weights; the configuration."""
    tokenizer = FAMILIES["m3diff"].load_processor(base).tokenizer
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    config = make_config(tokenizer, len(tokenizer))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["text_config"]["eos_token_id"]}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT}))
    processing = {"do_rescale": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    processing |= {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": SIDE, "width": SIDE}}
    processing |= {"processor_class": "LlavaOnevisionProcessor", "image_grid_pinpoints": config["image_grid_pinpoints"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processing))
    names = {"num_image_tokens": (SIDE // PATCH) ** 2, "vision_feature_select_strategy": "full"}
    (folder / "processor_config.json").write_text(json.dumps(names | {"processor_class": "LlavaOnevisionProcessor"}))
    return config


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def directory(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava-onevision-qwen2-7b-ov-hf")
    write_directory(folder, base, published_config)
    write_shards(folder)
    return folder


@pytest.fixture(scope="module")
def small(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 0.5 B release: one file of weights, without the head's, which are the embeddings."""
    folder = tmp_path_factory.mktemp("small") / "llava-onevision-qwen2-0.5b-ov-hf"
    folder.mkdir()
    write_directory(folder, base, small_config)
    named = random_weights(folder)
    assert torch.equal(named["language_model.lm_head.weight"], named["language_model.model.embed_tokens.weight"])
    del named["language_model.lm_head.weight"]
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder


def random_weights(folder: Path) -> dict[str, torch.Tensor]:
    """By their names on the hub."""
    torch.manual_seed(0)
    kind = LlavaOnevisionForConditionalGeneration
    weights = kind(kind.config_class.from_pretrained(folder)).state_dict()
    return {legacy(name): weight.contiguous() for name, weight in weights.items()}


def write_shards(folder: Path) -> None:
    named = random_weights(folder)
    index: dict[str, str] = {}
    for number, start in enumerate(range(0, len(named), -(-len(named) // 4)), start=1):
        part = dict(list(named.items())[start : start + -(-len(named) // 4)])
        file = f"model-0000{number}-of-00004.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def test_the_model_loads_every_weight_and_only_the_mdp_module_is_new(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        model, info = M3DiffForConditionalGeneration.from_pretrained(
            directory, module={}, dtype=torch.float32, output_loading_info=True
        )
    assert model.model.mdp.cfg.vision_feature_layers == (17, 20, 23, 26)
    assert {name.split(".")[1] for name in info["missing_keys"]} == {"mdp"}
    assert not info["unexpected_keys"]
    assert f"{len(info['missing_keys'])} tensors of the new module" in caplog.text
    stock = LlavaOnevisionForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).state_dict()
    ours = model.state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in stock.items())


def test_the_processor_reads_the_published_files(directory: Path) -> None:
    processor = FAMILIES["m3diff"].load_processor(directory)
    assert isinstance(processor.image_processor, M3DiffImageProcessor)
    assert processor.image_processor.side == SIDE
    prompt = processor.encode_prompt("What changed?")
    assert sum(token == processor.tokenizer.convert_tokens_to_ids("<image>") for token in prompt) == 2 * 5
    assert processor.tokenizer.decode(prompt).startswith("<|im_start|>user <image>")
    inputs = pair_inputs(processor, [(noise_image(0), noise_image(1))], ["What changed?"])
    model = M3DiffForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert tokens.shape[1] > inputs["input_ids"].shape[1]


def test_the_embedded_base_has_the_same_layout_of_weights() -> None:
    from safetensors import safe_open

    with safe_open(BASE / "model.safetensors", "pt") as file:
        prefixes = {name.split(".")[0] for name in list(file.keys())}
    assert prefixes == {"image_newline", "language_model", "multi_modal_projector", "vision_tower"}


def test_the_small_release_loads_with_its_embeddings_as_head(small: Path) -> None:
    model, info = M3DiffForConditionalGeneration.from_pretrained(
        small, module={}, dtype=torch.float32, output_loading_info=True
    )
    assert {name.split(".")[1] for name in info["missing_keys"]} == {"mdp"}
    assert not info["unexpected_keys"]
    stored = load_file(small / "model.safetensors")["language_model.model.embed_tokens.weight"]
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, stored)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "a head of its own"])
def test_a_base_without_its_heads_weights_is_refused_unless_they_are_tied(
    tied: bool, small: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(small, tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(config))
    if tied:
        M3DiffForConditionalGeneration.from_pretrained(folder)
    else:
        with pytest.raises(ValueError, match="weights are missing .*lm_head.weight"):
            M3DiffForConditionalGeneration.from_pretrained(folder)


def test_the_small_release_is_planned_trained_and_saved_with_its_head_tied(small: Path, tmp_path: Path) -> None:
    made = recipe(small, model=replace(tiny_settings(), module=MDPConfig(heads=2)), epochs=0.5)
    family = FAMILIES["m3diff"]
    planned = parameters_of(meta_model(family.planned_config(small, made.model), family, made.model, "fp32"), family)
    trained = run(made, write_mixture(tmp_path / "mixture"), tmp_path)
    assert trained.report.steps >= 1
    assert trained.report.loss > 0
    for part, count in trained.report.parameters.items():
        assert planned[part] == count
    assert trained.report.parameters_frozen == sum(n for part, n in planned.items() if part.endswith("(frozen)"))
    model = M3DiffForConditionalGeneration.from_pretrained(tmp_path / "out" / "checkpoint")
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    before = load_file(small / "model.safetensors")
    embeddings = "language_model.model.embed_tokens.weight"
    assert torch.equal(model.lm_head.weight, before[embeddings]), "frozen"
    changed = "language_model.model.layers.0.mlp.down_proj.weight"
    now = model.model.language_model.layers[0].mlp.down_proj.weight
    assert not torch.equal(now, before[changed]), "its adapters were trained and merged"
