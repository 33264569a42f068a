"""Small pretrain runs with expected logs, the weights that a BLIP-2 copies, and the tasks that a base learns."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from pydantic import ValidationError
from transformers import (
    AutoProcessor,
    Blip2ForConditionalGeneration,
    Blip2VisionConfig,
    Blip2VisionModel,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessor,
)
from transformers.utils import is_torchvision_available

from m3diff.datasets.minichange.language import NO_CHANGE_SENTENCES, SEPARATOR, describe_scene, describe_things
from m3diff.datasets.minichange.questions import OBJECTS_PER_QUESTION, ask_for_images, ask_for_objects
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import COLORS, KINDS, PLACE_NAMES, SAMPLERS, Level, Mark, Scene, Thing, View
from m3diff.models import FAMILIES
from m3diff.settings.load import load_params
from m3diff.stages.pretrain import params, stage
from m3diff.stages.pretrain.bases import (
    DESCRIBE_ONE_IMAGE,
    DESCRIBE_TWO_IMAGES,
    QUESTIONS,
    SPECIAL_TOKENS,
    Blip2Base,
    copy_vision_encoder,
    create_architecture,
    llava_config,
)
from m3diff.stages.pretrain.params import TASKS, Blip2, Pretrain
from m3diff.stages.pretrain.stage import (
    CLASS_COUNTS,
    MARK_CLASS,
    NOT_APPLICABLE,
    POINTS_PER_PATCH_SIDE,
    SIZES,
    PretrainOptimizer,
    PretrainTask,
    SceneBank,
    Segmentation,
    ask_without_images,
    classify_points,
    learning_rate_factor,
    make_curriculum,
    orthogonalize,
    pretrain,
    render_bank,
    train_tokenizer,
)
from tests.tiny import BASE, image_inputs, pair_inputs, pair_prompt

SMALL_SIZES = {"image_px": 64, "vision_px": 24, "patch_px": 8, "width": 32, "vision_layers": 1, "text_layers": 2}
DATA = {"seed": 11, "scenes": 60, "held_out": 12, "images_per_batch": 8, "levels": ("grid",)}
RATES = {"lr_matrices": 0.01, "lr": 0.01, "warmup_steps": 3, "weight_decay": 0.05}
STEPS = {"segmentation_steps": 0, "steps": 24, "first_task_steps": 6}
CFG = Pretrain(**SMALL_SIZES, **DATA, **RATES, **STEPS, threads=1)


@pytest.fixture(scope="module")
def embedded_tokenizer() -> Any:
    return FAMILIES["m3diff"].load_processor(BASE).tokenizer


@pytest.fixture(autouse=True)
def tokenizer(embedded_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the tokenizer of the embedded base, because training a tokenizer takes seconds and has a test of its own."""
    monkeypatch.setattr(stage, "train_tokenizer", lambda seed, levels: embedded_tokenizer if seed == CFG.seed else None)
    monkeypatch.setattr(stage, "LOG_EVERY_STEPS", 6)


def numbers_in_row(fields: list[str]) -> list[float]:
    """Return the numbers in a row of a log, with -1 for an empty field."""
    return [float(field or -1) for field in fields]


def assert_log(folder: Path, name: str, expected_rows: str) -> None:
    """Assert that a log has these rows, without the seconds. Machines differ in the last digits."""
    with (folder / f"{name}_log.csv").open() as file:
        rows = [numbers_in_row(list(row.values())[:-1]) for row in csv.DictReader(file)]
    expected = [numbers_in_row(fields) for fields in csv.reader(expected_rows.split())]
    assert rows == [pytest.approx(row, abs=0.02) for row in expected]


def test_a_small_run_is_a_llava_onevision_that_learns_and_is_reproducible(tmp_path):
    for name in ("a", "b"):
        pretrain(CFG, tmp_path / name)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    heading = (tmp_path / "a" / "training_log.csv").read_text().partition("\n")[0]
    tasks = "loss: asked for in two,loss: side by side,loss: asked for,loss: two images,loss: sentence"
    assert heading == f"step,images_seen,loss: image,{tasks},held_out_scene_accuracy,seconds"
    rows = "6,48,5.7606,,,,,,0.0 12,88,4.2198,4.1475,4.4188,3.7634,3.8093,5.5945,0.0"
    rows += " 18,128,3.0434,3.1943,3.6165,,,4.5624,0.0 24,168,2.6163,2.7935,3.1789,2.808,3.1701,4.0966,0.0"
    assert_log(tmp_path / "a", "training", rows)

    folder = tmp_path / "a"
    tokens = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    processors = {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
    weights = {"config.json", "generation_config.json", "model.safetensors", "recipe.json", "training_log.csv"}
    assert {path.name for path in folder.iterdir()} == tokens | processors | weights
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(folder)
    picture = render(SAMPLERS["grid"].sample_scene(np.random.default_rng(0)), 64, np.random.default_rng(0))
    inputs = pair_inputs(FAMILIES["m3diff"].load_processor(folder), [(picture, picture)], [QUESTIONS[0]])
    assert inputs["pixel_values"].shape == (2, 3, 24, 24)
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == 2 * (9 + 1)
    assert Pretrain.model_validate_json((folder / "recipe.json").read_text()) == CFG

    if not is_torchvision_available():
        with pytest.raises(ImportError, match="LlavaOnevisionVideoProcessor requires the Torchvision library"):
            AutoProcessor.from_pretrained(folder)
        return
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTIONS[0]}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs_of_transformers = processor(images=[[picture, picture]], text=[prompt], return_tensors="pt")
    assert isinstance(processor, LlavaOnevisionProcessor)
    assert inputs_of_transformers["input_ids"].tolist() == inputs["input_ids"].tolist()


def test_the_embedded_base_was_made_by_the_recipe_of_params_yaml():
    section = yaml.safe_load(Path("params.yaml").read_text())["pretrain"]
    recipe = Pretrain.model_validate_json((BASE / "recipe.json").read_text())
    assert recipe == Pretrain.model_validate(section)
    assert recipe.model_dump(mode="json") == section
    config = llava_config(recipe, FAMILIES["m3diff"].load_processor(BASE)).to_dict()
    saved_config = json.loads((BASE / "config.json").read_text())
    for part in ("vision_config", "text_config"):
        saved_fields = saved_config[part]
        common_keys = [key for key in saved_fields if key in config[part] and key != "dtype"]
        assert {key: config[part][key] for key in common_keys} == {key: saved_fields[key] for key in common_keys}
    for key in ("image_token_index", "video_token_index", "image_token_id", "video_token_id", "image_grid_pinpoints"):
        assert config.get(key) == saved_config.get(key), key


@pytest.mark.slow(14)
def test_the_tokenizer_is_the_embedded_base_s_for_its_seed(tmp_path):
    train_tokenizer(2417, ("grid", "free")).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (BASE / "tokenizer.json").read_bytes()


class FakeSampler:
    """A sampler of a level that returns names instead of scenes and counts them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scenes = 0

    def sample_scene(self, rng: np.random.Generator) -> str:
        self.scenes += 1
        return self.name

    def sample_pair(self, rng: np.random.Generator, types: tuple[str, ...]) -> SimpleNamespace:
        return SimpleNamespace(changes=types)


def fake_references(changes: tuple[str, ...], count: int) -> list[str]:
    return [f"what {' '.join(changes) or 'nothing'} {number}" for number in range(count)]


@pytest.fixture(scope="module")
def small_tokenizer() -> Any:
    """Train a tokenizer on the sentences of fake samplers, because drawing scenes takes seconds."""
    samplers = {name: FakeSampler(name) for name in ("grid", "free")}
    tasks = [
        PretrainTask("image", 1, lambda rng, scenes: (f"which level of {len(scenes)}", " ".join(scenes))),
        PretrainTask("two images", 2, lambda rng, scenes: (f"which levels of {len(scenes)}", " ".join(scenes))),
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(stage, "SAMPLERS", samplers)
        monkeypatch.setattr(stage, "make_curriculum", lambda levels: tasks)
        monkeypatch.setattr(stage, "references", fake_references)
        tokenizer = train_tokenizer(3, ("grid", "free"))
    assert samplers["grid"].scenes == samplers["free"].scenes, "the levels take turns"
    return tokenizer


WORDS = ["system", " user", " assistant", "which", " levels", " grid", " free", "what", " color", " nothing"]


@pytest.mark.parametrize("word", WORDS)
def test_a_frequent_word_of_questions_answers_and_captions_is_a_token(word, small_tokenizer):
    assert len(small_tokenizer.encode(word)) == 1


def test_a_tokenizer_encodes_any_text_and_its_special_tokens(small_tokenizer):
    text = "größer 🙂\n\t<a>"
    assert small_tokenizer.decode(small_tokenizer.encode(text)) == text
    for token in SPECIAL_TOKENS:
        assert small_tokenizer.encode(f"a{token}a")[1:-1] == [small_tokenizer.convert_tokens_to_ids(token)]
        assert token in small_tokenizer.all_special_tokens
    assert small_tokenizer.eos_token == "<|im_end|>"


def test_the_learning_rate_rises_stays_for_half_the_run_and_falls_to_a_hundredth():
    rates = [learning_rate_factor(4, 100, step) for step in range(100)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:51] == [1.0] * 47
    assert rates[75] == pytest.approx(0.505)
    assert all(rates[n + 1] < rates[n] for n in range(50, 99))
    assert learning_rate_factor(4, 100, 100) == learning_rate_factor(4, 100, 130) == pytest.approx(0.01)


COEFFICIENTS = (3.4445, -4.775, 2.0315)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_muon_s_iteration_makes_a_matrix_about_orthogonal_in_fp32(shape):
    torch.manual_seed(0)
    grad = torch.randn(shape)
    orthogonal = orthogonalize(grad, COEFFICIENTS, 5, 1e-7)
    assert orthogonal.shape == shape
    assert orthogonal.dtype == torch.float32
    left_vectors, sizes, right_vectors = torch.linalg.svd(orthogonal, full_matrices=False)
    assert 0.6 < sizes.min() <= sizes.max() < 1.3
    decomposition = torch.linalg.svd(grad, full_matrices=False)
    assert (left_vectors @ right_vectors - decomposition.U @ decomposition.Vh).norm() < 1e-2
    zeros = torch.zeros(shape)
    assert torch.equal(orthogonalize(zeros, COEFFICIENTS, 5, 1e-7), zeros)


@pytest.mark.parametrize(
    ("has_avx512", "has_amx", "is_replaced"),
    [(False, False, True), (True, False, False), (False, True, False)],
    ids=["neither", "AVX-512", "AMX"],
)
def test_muon_s_iteration_is_replaced_only_if_the_processor_has_no_bf16(has_avx512, has_amx, is_replaced, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(stage.torch_muon, "_zeropower_via_newtonschulz", None)
    stage.avoid_emulated_bf16()
    assert stage.torch_muon._zeropower_via_newtonschulz is (orthogonalize if is_replaced else None)


MINIMUMS = {"image_px": 32, "vision_px": 8, "patch_px": 4, "segmentation_steps": 0, "first_task_steps": 0}
MINIMUMS |= {"weight_decay": 0, "threads": 1, "warmup_steps": 1, "steps": 1, "images_per_batch": 1, "held_out": 1}
MINIMUMS |= {"scenes": 1, "text_layers": 1, "vision_layers": 1, "width": 8}


def test_parameters_have_a_minimum():
    for field, minimum in MINIMUMS.items():
        assert getattr(Pretrain.model_validate(CFG.model_dump() | {field: minimum}), field) == minimum
    for field, minimum in {**MINIMUMS, "lr": 1, "lr_matrices": 1}.items():
        with pytest.raises(ValidationError, match=field):
            Pretrain.model_validate(CFG.model_dump() | {field: minimum - 1})


def test_a_blip2_has_at_least_one_query_and_two_layers_of_the_qformer():
    for field, minimum in {"queries": 1, "qformer_layers": 2}.items():
        assert getattr(Blip2.model_validate(STACKED_BLIP2.model_dump() | {field: minimum}), field) == minimum
        with pytest.raises(ValidationError, match=field):
            Blip2.model_validate(STACKED_BLIP2.model_dump() | {field: minimum - 1})


@pytest.mark.parametrize("change", [{"levels": []}, {"levels": ["hard"]}, {"tasks": ["image", "poem"]}])
def test_levels_and_tasks_must_exist(change):
    with pytest.raises(ValidationError):
        Pretrain.model_validate(CFG.model_dump() | change)


def test_the_default_is_both_levels_and_all_tasks():
    values = {key: value for key, value in CFG.model_dump().items() if key not in ("levels", "tasks")}
    assert Pretrain.model_validate(values) == CFG.model_copy(update={"levels": ("grid", "free")})


def test_both_levels_are_learnt_in_turn_with_an_encoder_frozen_for_the_first_task(tmp_path):
    changes = {"segmentation_steps": 8, "levels": ("grid", "free"), "scenes": 96}
    pretrain(CFG.model_copy(update=changes), tmp_path)
    assert_log(tmp_path, "segmentation", "6,48,8.5223,0.0545,0.0716 8,64,8.0923,0.0545,0.0657")
    rows = "6,48,5.7069,,,,,,0.0,0.0 12,88,4.2179,4.079,4.4398,3.7661,3.7918,5.7622,0.0,0.0"
    rows += " 18,128,3.1096,3.3288,3.7299,,,4.9845,0.0,0.0 24,168,2.8214,2.9506,3.2567,3.1028,3.2786,4.7198,0.0,0.0"
    assert_log(tmp_path, "training", rows)


STACKED_BLIP2 = Blip2(start=Path("data/00_base"), queries=6, qformer_layers=2, stacked=True)
LARGER = {"vision_px": 48, "patch_px": 12, "width": 128, "vision_layers": 4, "text_layers": 4}
LARGER |= {"segmentation_steps": 12, "steps": 16, "lr_matrices": 0.0025, "lr": 0.002}
BLIP2 = Pretrain(**CFG.model_dump() | LARGER | {"blip2": STACKED_BLIP2.model_dump()})
SINGLE = {"blip2": STACKED_BLIP2.model_copy(update={"stacked": False}), "tasks": ("image", "asked for", "sentence")}


@pytest.fixture(scope="module")
def base() -> Blip2Base:
    architecture = create_architecture(BLIP2, None)
    assert isinstance(architecture, Blip2Base)
    return architecture


@pytest.fixture(scope="module")
def model(base: Blip2Base) -> Any:
    torch.manual_seed(0)
    return base.make_model().eval()


@pytest.fixture(scope="module")
def pictures(base: Blip2Base) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([base.prepare_image(render(SAMPLERS["grid"].sample_scene(rng), 64, rng)) for _ in range(4)])


def test_the_blip2_computes_as_the_llm_and_encoder_that_it_takes_over(base, model):
    ids = torch.tensor([base.processor.encode_answer("the small red box moved to the top")])
    assert torch.equal(model.language_model(input_ids=ids).logits, base.llava(input_ids=ids).logits)
    assert model.language_model.lm_head.weight is model.get_input_embeddings().weight
    patches = torch.randn(2, 5, 128)
    layers = model.vision_model.encoder.layers
    llava_layers = base.llava.model.vision_tower.encoder.layers
    for layer, llava_layer in zip(layers, llava_layers, strict=True):
        torch.testing.assert_close(layer(patches), llava_layer(patches, attention_mask=None), rtol=1e-5, atol=1e-5)
    queries = model.query_tokens[0]
    assert queries.shape == (6, 128)
    assert torch.cdist(queries, queries)[~torch.eye(6, dtype=torch.bool)].min() > 0.05, "queries start unlike"
    assert 0.015 < queries.std() < 0.025


def test_patches_of_the_same_size_are_read_alike(base):
    """Patches of another size are tested by the logs below."""
    siglip = base.llava.model.vision_tower
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    encoder = Blip2VisionModel(Blip2VisionConfig(image_size=100, patch_size=20, **sizes))
    copy_vision_encoder(encoder, siglip)
    pixels = torch.randn(1, 3, 100, 100)
    torch.testing.assert_close(encoder.embeddings(pixels)[:, 1:], siglip.embeddings(pixels), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(encoder.post_layernorm.weight, siglip.post_layernorm.weight)


def test_blip2_captions_without_a_question_and_reads_others_after_the_start_token(base):
    image = base.processor.prompt[0]
    start = base.processor.start_id
    for question in (DESCRIBE_ONE_IMAGE, DESCRIBE_TWO_IMAGES, *QUESTIONS):
        assert base.encode_prompt(question, 1) == pair_prompt(base.processor, question)
        assert base.encode_prompt(question, 0) == (start,)
    prompt = base.encode_prompt("Describe the small red box.", 2)
    assert prompt[:7] == (image,) * 6 + (start,)
    assert base.processor.tokenizer.decode(prompt[7:]) == "Describe the small red box.\n"


def test_two_images_are_stacked_as_the_family_stacks_a_pair(base, pictures):
    images = [Image.fromarray(picture) for picture in pictures]
    pixels_of_pairs = image_inputs(base.processor, [images[:2], images[2:]])["pixel_values"]
    assert torch.equal(base.to_pixels(pictures, 2), pixels_of_pairs)
    assert pixels_of_pairs.shape == (2, 3, 48, 48)
    single = base.to_pixels(pictures[:1], 1)
    stretched = np.asarray(Image.fromarray(pictures[0]).resize((48, 48), Image.Resampling.BICUBIC))
    assert torch.equal(single[0], base.processor.image_processor.to_pixels(torch.tensor(stretched)))


STACKED_LOG = (
    "6,48,0.9018,,,,,,0.0 12,88,0.6854,1.3199,1.4238,1.3274,1.2394,2.1684,0.0 16,112,0.711,0.6922,1.0995,,,1.5894,0.0"
)
SINGLE_LOG = "6,48,0.902,,,0.0 12,80,0.7153,1.1404,1.8539,0.0 16,104,0.717,0.6437,1.1989,0.0"
SMALL = [
    pytest.param(BLIP2, "6,48,8.5463,0.1019 12,96,7.9072,0.1019", STACKED_LOG, marks=pytest.mark.slow),
    (BLIP2.model_copy(update=SINGLE), "6,48,8.5311,0.1005 12,96,7.7314,0.0978", SINGLE_LOG),
]


@pytest.mark.parametrize(("cfg", "segmentation", "training"), SMALL, ids=["stacked", "single"])
def test_a_small_run_is_a_blip2_that_learns(cfg, segmentation, training, tmp_path):
    pretrain(cfg, tmp_path)
    assert_log(tmp_path, "segmentation", segmentation)
    assert_log(tmp_path, "training", training)
    model = Blip2ForConditionalGeneration.from_pretrained(tmp_path)
    processor = FAMILIES["blip2idc"].load_processor(tmp_path)
    assert model.config.num_query_tokens == 6
    assert processor.end_id == model.config.text_config.eos_token_id
    assert processor.decode(torch.tensor([processor.encode_answer("a small red box")])) == ["a small red box"]
    assert type(AutoProcessor.from_pretrained(tmp_path)).__name__ == "Blip2Processor"
    assert Pretrain.model_validate_json((tmp_path / "recipe.json").read_text()) == cfg


@pytest.mark.parametrize(("name", "stacked"), [("blip2idc", False), ("blip2idc-stacked", True)])
def test_the_blip2_recipes_differ_only_in_stacking_and_made_the_bases_on_disk(name, stacked):
    params = load_params(Path(f"infra/base-{name}.yaml"))
    recipe = params.pretrain
    assert recipe.blip2 is not None
    assert recipe.blip2.stacked is stacked
    single_recipe = load_params(Path("infra/base-blip2idc.yaml")).pretrain
    expected_changes = {"tasks": single_recipe.tasks, "blip2": single_recipe.blip2}
    assert recipe.model_copy(update=expected_changes) == single_recipe
    if (params.paths.base / "recipe.json").is_file():
        assert Pretrain.model_validate_json((params.paths.base / "recipe.json").read_text()) == recipe


def scenes(count: int, seed: int, level: Level = "grid") -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [SAMPLERS[level].sample_scene(rng) for _ in range(count)]


@pytest.mark.parametrize("level", SAMPLERS)
@pytest.mark.parametrize("image_count", [1, 2])
def test_the_answer_names_the_object_in_question_and_its_place_or_nothing(image_count, level):
    rng = np.random.default_rng(0)
    is_nothing = []
    for seed in range(40):
        sample_scenes = scenes(image_count, seed, level)
        objects = []  # such as `top left a small red box`
        for scene in sample_scenes:
            objects += [f"{PLACE_NAMES[cell]} {text}" for cell, text in describe_things(scene)]
        question, answer = ask_for_objects(rng, sample_scenes)
        appearances = question.removeprefix("Describe the ").removesuffix(".").split(", the ")
        answers = answer.split(", ")
        assert len(appearances) == len(answers) == OBJECTS_PER_QUESTION
        for appearance, object_answer in zip(appearances, answers, strict=True):
            words = set(appearance.split())
            matching = [text for text in objects if words <= set(text.split(" a ", 1)[1].split()[:3])]
            assert matching == ([] if object_answer == "nothing" else [object_answer]), (appearance, object_answer)
            is_nothing.append(object_answer == "nothing")
    assert any(is_nothing)
    assert not all(is_nothing)


def test_two_images_are_described_in_turn_and_only_sentences_mention_change():
    scene_1, scene_2 = scenes(2, 9)
    rng = np.random.default_rng(0)
    _, answer = ask_for_images(rng, [scene_1, scene_2])
    assert answer == f"image 1: {describe_scene(scene_1)}; image 2: {describe_scene(scene_2)}"
    words = ("changed", "different", "turned", "became", "replaced", "removed", "appeared")
    for task in make_curriculum(("grid",)):
        for seed in range(20):
            _, answer = task.ask(rng, scenes(task.image_count, seed))
            assert task.image_count == 0 or not any(word in answer for word in words), answer
    assert list(QUESTIONS) == yaml.safe_load(Path("profiles/questions.yaml").read_text())["difference"]


def test_a_curriculum_of_fewer_tasks_keeps_their_order():
    names = [task.name for task in make_curriculum(("grid",))]
    assert names == [*TASKS[:5], "asked for in two", "side by side", "sentence"]
    tasks = make_curriculum(("grid",), ("image", "asked for", "sentence"))
    assert [(task.name, task.image_count) for task in tasks] == [("image", 1), ("asked for", 1), ("sentence", 0)]
    assert get_args(params.Level) == tuple(SAMPLERS)


def test_an_object_covers_its_square_and_moves_with_the_camera():
    box = Thing("box", "blue", "large", cell=2)  # on the grid, 0.285 wide around (0.8, 0.2)
    classes = classify_points(Scene((box,), (Mark(0), Mark(2)), view=View()), 100, 100)
    rows, columns = np.nonzero((classes[..., 0] > 0) & (classes[..., 0] < MARK_CLASS))
    assert rows.min() == 6
    assert rows.max() == 33
    assert columns.min() == 66
    assert columns.max() == 93
    assert (classes[20, 80] == (1 + KINDS.index("box"), COLORS.index("blue"), SIZES.index("large"), -1)).all()
    assert classes[80, 20].tolist() == [0, -1, -1, -1]
    assert classes[20, 20].tolist() == [MARK_CLASS, -1, -1, -1]
    scene = Scene((Thing("ball", "red", "large", 4),), view=View(x=0.2, y=-0.1, zoom=2.0))
    rows, columns = np.nonzero(classify_points(scene, 200, 200)[..., 0])
    assert columns.min() == 0, "cut at the frame's border"
    assert (columns.max() + 1) / 200 == pytest.approx(0.1 + 0.285, abs=0.01), "cut at the frame's border"
    assert rows.min() / 200 == pytest.approx(0.7 - 0.285, abs=0.01)
    assert (rows.max() + 1) / 200 == pytest.approx(0.7 + 0.285, abs=0.01)


def test_a_point_on_the_edge_of_a_square_is_outside_it(monkeypatch):
    monkeypatch.setattr(stage, "MARK_WIDTH", 0.5)
    scene = Scene((), (Mark(4),), view=View())  # from 0.25 to 0.75
    assert classify_points(scene, 3, 3)[1, 1, 0] == MARK_CLASS
    assert not classify_points(scene, 3, 2)[..., 0].any()
    assert not classify_points(scene, 2, 3)[..., 0].any()


@pytest.mark.parametrize("level", ["grid", "free"])
def test_the_classes_lie_where_the_picture_shows_the_objects(level):
    """Inside an object, the picture has the object's colours and not the table's."""
    rng = np.random.default_rng(5)
    scene = SAMPLERS[level].sample_scene(rng)
    scene = replace(scene, view=replace(scene.view, brightness=1.0, noise=0.0))
    picture = np.asarray(render(scene, 128, rng), dtype=float)
    empty_picture = np.asarray(render(replace(scene, things=(), marks=()), 128, rng), dtype=float)
    differences = np.abs(picture - empty_picture).mean(-1)
    kinds = classify_points(scene, 128, 128)[..., 0]
    is_object = (kinds > 0) & (kinds < MARK_CLASS)
    assert differences[is_object].mean() > 6 * differences[~is_object].mean()


PATCHES_PER_SIDE = 4
POINTS_PER_SIDE = PATCHES_PER_SIDE * POINTS_PER_PATCH_SIDE


def classes_in_pictures(pictures: list[list[Scene]]) -> np.ndarray:
    """Return the classes of pictures, whose scenes are stacked from top to bottom, [pictures, rows, columns, 4]."""
    stacked = []
    for scenes_of_picture in pictures:
        rows = POINTS_PER_SIDE // len(scenes_of_picture)
        stacked.append(np.concatenate([classify_points(scene, rows, POINTS_PER_SIDE) for scene in scenes_of_picture]))
    return np.stack(stacked)


def head_that_knows(classes: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return patch features, and the weight of a head that predicts these classes from them."""
    pictures = len(classes)
    patches = pictures * PATCHES_PER_SIDE**2
    weight = torch.zeros(POINTS_PER_PATCH_SIDE, POINTS_PER_PATCH_SIDE, sum(CLASS_COUNTS), patches)
    first_class = np.cumsum([0, *CLASS_COUNTS])
    for picture, row, column, number in np.argwhere(classes != NOT_APPLICABLE):
        patch_row, point_row = divmod(row, POINTS_PER_PATCH_SIDE)
        patch_column, point_column = divmod(column, POINTS_PER_PATCH_SIDE)
        patch = (picture * PATCHES_PER_SIDE + patch_row) * PATCHES_PER_SIDE + patch_column
        weight[point_row, point_column, first_class[number] + classes[picture, row, column, number], patch] = 40
    return torch.eye(patches).view(pictures, PATCHES_PER_SIDE**2, patches), weight.flatten(0, 2)


@pytest.mark.parametrize("images_per_picture", [1, 2])
def test_an_encoder_that_knows_the_classes_of_all_points_has_no_loss(images_per_picture):
    sample_scenes = scenes(4, seed=5)
    pictures = [sample_scenes[n : n + images_per_picture] for n in range(0, 4, images_per_picture)]
    features, weight = head_that_knows(classes_in_pictures(pictures))
    segmentation = Segmentation(torch.nn.Identity(), width=len(weight[0])).requires_grad_(False)
    segmentation.head.load_state_dict({"weight": weight, "bias": torch.zeros(len(weight))})
    loss, accuracy = segmentation.loss_and_accuracy(features, sample_scenes, images_per_picture)
    assert accuracy == 1
    assert float(loss) == pytest.approx(0, abs=1e-6)
    other_loss, other_accuracy = segmentation.loss_and_accuracy(features, sample_scenes[::-1], images_per_picture)
    assert other_accuracy < 1
    assert float(other_loss) > 1


def test_the_loss_of_segmentation_is_the_sum_over_kind_color_size_and_state():
    segmentation = Segmentation(torch.nn.Identity(), width=3).requires_grad_(False)
    torch.nn.init.zeros_(segmentation.head.weight)
    torch.nn.init.zeros_(segmentation.head.bias)
    loss, accuracy = segmentation.loss_and_accuracy(torch.zeros(2, PATCHES_PER_SIDE**2, 3), scenes(2, seed=5), 1)
    assert float(loss) == pytest.approx(sum(np.log(CLASS_COUNTS)), rel=1e-5)
    assert accuracy == 0, "where nothing is, nothing is counted"


class Letters:
    """An architecture with one token per letter that predicts the letters of `prediction`."""

    def __init__(self, prediction: str) -> None:
        self.prediction = prediction
        self.processor = self
        self.pad_id = ord("_")

    def encode_prompt(self, question: str, image_count: int) -> tuple[int, ...]:
        return tuple(map(ord, "i" * image_count + question))

    def encode_answer(self, answer: str) -> list[int]:
        return [*map(ord, answer), ord(".")]

    def compute_logits(self, model: Any, images: Any, images_per_sample: int, ids: Any, is_supervised: Any) -> Any:
        assert images.tolist() == [[3.0], [5.0], [4.0], [6.0]]
        logits = torch.zeros(int(is_supervised.sum()), 128)
        logits[range(len(logits)), list(map(ord, self.prediction))] = 30
        return logits


BANK = SceneBank(np.arange(8.0)[:, None], scenes(8, seed=1), ("grid",), held_out=2)


def ask_about_scenes(rng: np.random.Generator, sample_scenes: list[Scene]) -> tuple[str, str]:
    numbers = [str(BANK.scenes.index(scene)) for scene in sample_scenes]
    return f"{len(numbers)}?", "".join(numbers)


@pytest.mark.parametrize(
    ("prediction", "are_right", "loss"),
    [("35.46.", [True, True], 0), ("35.47.", [True, False], 30 / 6), ("35446.", [False, True], 30 / 6)],
    ids=["both", "the first", "the second"],
)
def test_a_sample_is_right_if_every_token_of_its_answer_is(prediction, are_right, loss):
    architecture: Any = Letters(prediction)
    task = PretrainTask("two images", 2, ask_about_scenes)
    indices = np.array([3, 5, 4, 6])
    rng = np.random.default_rng(0)
    actual_loss, is_right = stage._loss_and_correctness(architecture, None, BANK, indices, task, rng)
    assert is_right.tolist() == are_right
    assert float(actual_loss) == pytest.approx(loss, abs=1e-3)


def test_samples_are_padded_on_the_right_and_answers_alone_are_supervised():
    architecture: Any = Letters("")
    ids, is_supervised = stage._encode_samples(architecture, [("ab?", "c"), ("d?", "efgh")], 1)
    assert ["".join(map(chr, row)) for row in ids.tolist()] == ["iab?c.__", "id?efgh."]
    next_ids = ids.roll(-1, dims=1)
    answers = ["".join(map(chr, row[mask].tolist())) for row, mask in zip(next_ids, is_supervised, strict=True)]
    assert answers == ["c.", "efgh."]


def test_training_scenes_are_of_one_level_a_step_and_none_is_held_out():
    bank = SceneBank(np.zeros(0), scenes(20, seed=1), ("grid", "free"), held_out=6)
    rng = np.random.default_rng(0)
    even, odd = (bank.sample_training_scenes(rng, turn, 7) for turn in (2, 5))
    assert sorted(even) == list(range(0, 14, 2))
    assert sorted(odd) == list(range(1, 14, 2))
    assert list(bank.held_out_scenes("grid")) == [14, 16, 18]
    assert list(bank.held_out_scenes("free")) == [15, 17, 19]


def test_all_steps_are_taken_and_the_log_has_the_mean_loss_of_each_task():
    optimizer: Any = SimpleNamespace(steps=5, take_step=float)
    steps = []

    def batch_loss(step: int) -> stage.BatchLoss:
        steps.append(step)
        return stage.BatchLoss(task="describe" if step % 2 else "find", loss=torch.tensor(step**3), image_count=2)

    log = stage._train(optimizer, ["find", "describe"], batch_loss, ("grid",), "accuracy", lambda level: 0.25)
    assert steps == [1, 2, 3, 4, 5]
    header, row = csv.reader(log.splitlines())
    assert header == ["step", "images_seen", "loss: find", "loss: describe", "accuracy", "seconds"]
    assert row[:-1] == ["5", "10", "36.0", "51.0", "0.25"]


def test_a_large_gradient_is_scaled_to_a_norm_of_one():
    model = torch.nn.Linear(3, 2)
    optimizer = PretrainOptimizer(model, CFG, 10)
    loss = 1000 * model(torch.ones(1, 3)).sum()
    assert optimizer.take_step(loss) == float(loss.detach())
    squares = [parameter.grad.square().sum() for parameter in model.parameters()]
    assert float(sum(squares)) == pytest.approx(1, abs=1e-3)


class Pictures:
    """An architecture whose encoder reads ones, and that records the number of images in each batch's pictures."""

    def __init__(self) -> None:
        self.images_per_picture: list[int] = []

    def vision_encoder(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def encode_patches(self, encoder: Any, images: np.ndarray, images_per_picture: int) -> torch.Tensor:
        self.images_per_picture.append(images_per_picture)
        return encoder(torch.ones(len(images) // images_per_picture, PATCHES_PER_SIDE**2, CFG.width))


@pytest.mark.parametrize(
    ("blip2", "images_per_picture"),
    [(STACKED_BLIP2, [2, 1, 2, 1]), (SINGLE["blip2"], [1, 1, 1, 1]), (None, [1, 1, 1, 1])],
    ids=["stacked", "single", "no BLIP-2"],
)
def test_an_encoder_segments_stacked_images_in_every_second_batch_if_asked(blip2, images_per_picture):
    architecture: Any = Pictures()
    cfg = CFG.model_copy(update={"segmentation_steps": 4, "images_per_batch": 2, "blip2": blip2})
    stage._train_encoder_to_segment(architecture, torch.nn.Linear(CFG.width, CFG.width), BANK, cfg)
    accuracy_of_single_images = [1]
    assert architecture.images_per_picture == images_per_picture + accuracy_of_single_images


class Solver(Letters):
    """An architecture that predicts every answer, and records what it is asked and whether its encoder learns."""

    def __init__(self) -> None:
        super().__init__("")
        self.texts: list[list[str]] = []
        self.images: list[list[list[float]]] = []
        self.is_encoder_trained: list[bool] = []

    def vision_encoder(self, model: Any) -> torch.nn.Module:
        return model["encoder"]

    def compute_logits(self, model: Any, images: Any, images_per_sample: int, ids: Any, is_supervised: Any) -> Any:
        self.texts.append(["".join(map(chr, row)).rstrip("_") for row in ids.tolist()])
        self.images.append(images.tolist())
        self.is_encoder_trained.append(model["encoder"].weight.requires_grad)
        answers = torch.nn.functional.one_hot(ids.roll(-1, dims=1)[is_supervised], 128)
        learnable_share = sum(parameter.mean() for parameter in model.parameters())
        return answers * (10 + learnable_share)


def describe_with_solver(**changes: Any) -> tuple[Solver, list[str]]:
    """Train a toy model for three steps, two of them on the first task. Return its architecture and the log."""
    architecture: Any = Solver()
    model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(2, 2), "llm": torch.nn.Linear(2, 2)})
    cfg = CFG.model_copy(update={"steps": 3, "first_task_steps": 2, "images_per_batch": 2} | changes)
    return architecture, stage._train_model_to_describe(architecture, model, BANK, cfg).splitlines()


def test_the_accuracy_is_the_share_of_held_out_scenes_that_are_described():
    architecture, log = describe_with_solver()
    held_out_scenes = BANK.scenes[-BANK.held_out :]
    assert architecture.texts[-1] == [f"i{DESCRIBE_ONE_IMAGE}{describe_scene(scene)}." for scene in held_out_scenes]
    assert architecture.images[-1] == BANK.pixels[-BANK.held_out :].tolist()
    (row,) = csv.DictReader(log)
    assert row["held_out_scene_accuracy"] == "1.0"
    assert row["images_seen"] == "6"


@pytest.mark.parametrize(
    ("segmentation_steps", "is_encoder_trained"), [(1, [False, False, True]), (0, [True, True, True])], ids=str
)
def test_an_encoder_that_can_segment_is_frozen_for_the_first_task(segmentation_steps, is_encoder_trained):
    architecture, _ = describe_with_solver(segmentation_steps=segmentation_steps)
    *steps, _ = architecture.is_encoder_trained
    assert steps == is_encoder_trained


def test_a_scene_depends_only_on_seed_and_number_and_about_a_fifth_are_dark():
    architecture: Any = SimpleNamespace(prepare_image=np.asarray)
    changes = {"levels": ("grid", "free"), "image_px": 32, "scenes": 40}
    bank = render_bank(CFG.model_copy(update=changes), architecture)
    assert [scene.level for scene in bank.scenes] == ["grid", "free"] * 20
    dark_scenes = []
    for scene in bank.scenes:
        if scene.view.brightness == SAMPLERS[scene.level].dark_brightness:
            dark_scenes.append(scene)
    assert 4 <= len(dark_scenes) <= 14
    smaller_bank = render_bank(CFG.model_copy(update=changes | {"scenes": 3}), architecture)
    assert smaller_bank.scenes == bank.scenes[:3]
    assert (smaller_bank.pixels == bank.pixels[:3]).all()
    other_bank = render_bank(CFG.model_copy(update=changes | {"scenes": 3, "seed": 12}), architecture)
    assert other_bank.scenes != smaller_bank.scenes


def test_a_sentence_without_an_image_has_one_or_more_changes_or_denies_any():
    rng = np.random.default_rng(0)
    samples = [ask_without_images(("grid", "free"), rng, []) for _ in range(40)]
    assert {question for question, _ in samples} == set(QUESTIONS)
    answers = [answer for _, answer in samples]
    denials = [answer for answer in answers if answer in NO_CHANGE_SENTENCES]
    several_changes = [answer for answer in answers if SEPARATOR in answer]
    assert 2 <= len(denials) <= 12
    assert 4 <= len(several_changes) <= 20
