"""Base-making in miniature: what is supervised, which parameter learns how fast, and a whole small run."""

import csv
import hashlib
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessor,
)
from transformers.utils import is_torchvision_available

from m3diff.datasets.minichange.levels import LEVELS
from m3diff.datasets.minichange.render import render
from m3diff.models import FAMILIES
from m3diff.models.processing import M3DiffProcessor
from m3diff.stages.pretrain import bases, optimizer, stage
from m3diff.stages.pretrain.bases import LlavaOneVision, llava_config, make_processor, train_tokenizer
from m3diff.stages.pretrain.curriculum import QUESTIONS, curriculum
from m3diff.stages.pretrain.params import Pretrain
from m3diff.stages.pretrain.stage import Bank, Log, pretrain, task_of
from tests.tiny import pair_inputs

CURRICULUM = curriculum(("grid",))
CFG = Pretrain(
    seed=11,
    image_px=64,
    vision_px=24,
    patch_px=8,
    width=32,
    vision_layers=1,
    text_layers=2,
    scenes=60,
    held_out=12,
    images_per_batch=8,
    steps=24,
    first_task_steps=6,
    lr_matrices=0.01,
    lr=0.01,
    warmup_steps=3,
    weight_decay=0.05,
    threads=1,
)


@pytest.fixture(scope="module")
def processor() -> M3DiffProcessor:
    """With the embedded base's tokenizer: to train one takes seconds, and has a test of its own."""
    tokenizer = FAMILIES["m3diff"].load_processor(Path("data/00_base")).tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            bases,
            "train_tokenizer",
            lambda seed, levels: tokenizer if (seed, levels) == (CFG.seed, ("grid",)) else None,
        )
        return make_processor(CFG)


@pytest.fixture(scope="module")
def llava(processor) -> LlavaOneVision:
    return LlavaOneVision(CFG, processor)


@pytest.fixture(scope="module")
def bank(llava) -> Bank:
    return stage._render_bank(CFG, llava)


@pytest.fixture(scope="module")
def made(processor, tmp_path_factory) -> Path:
    """Two runs of the same recipe: `a` and `b`."""
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bases, "make_processor", lambda cfg: processor)
        patch.setattr(stage, "LOG_EVERY", 6)
        for name in "ab":
            pretrain(CFG, folder / name)
    return folder


def log_of(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "training_log.csv").open()))


def test_the_loss_of_the_first_task_falls_and_every_task_is_trained(made):
    rows = log_of(made / "a")
    assert [row["step"] for row in rows] == ["6", "12", "18", "24"]
    first = [float(row["loss: image"]) for row in rows]
    assert first[-1] < first[0] - 0.5
    assert all(rows[-1][f"loss: {task.name}"] for task in CURRICULUM)
    assert [rows[0][f"loss: {name}"] for name in ("two images", "sentence", "asked for")] == ["", "", ""]


def test_images_are_counted_as_seen_and_none_for_sentences(made):
    seen = [int(row["images_seen"]) for row in log_of(made / "a")]
    sentences = [sum(task_of(step, 6, CURRICULUM).images == 0 for step in range(1, end + 1)) for end in (6, 12, 18, 24)]
    assert sentences == [0, 1, 2, 3]
    assert seen == [8 * (end - without) for end, without in zip((6, 12, 18, 24), sentences, strict=True)]


def test_the_same_recipe_gives_the_same_weights(made):
    a, b = (hashlib.sha256((made / name / "model.safetensors").read_bytes()).hexdigest() for name in "ab")
    assert a == b
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in log_of(made / name)] for name in "ab"]
    assert rows[0] == rows[1]


def test_the_folder_is_a_llava_onevision_that_its_processor_can_feed(made):
    folder = made / "a"
    assert {path.name for path in folder.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "processor_config.json",
        "recipe.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_log.csv",
        "video_preprocessor_config.json",
    }
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(folder)
    own = FAMILIES["m3diff"].load_processor(folder)
    picture = render(LEVELS["grid"].sample_scene(np.random.default_rng(0)), 64, np.random.default_rng(0))
    inputs = pair_inputs(own, [(picture, picture)], [QUESTIONS[0]])
    assert inputs["pixel_values"].shape == (2, 3, 24, 24)
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == 2 * (9 + 1)
    assert Pretrain.model_validate_json((folder / "recipe.json").read_text()) == CFG


def test_transformers_own_processor_is_found_in_the_folder_and_takes_images_alike(made):
    """Its video part needs torchvision: where that is missing, transformers says so instead of giving a tokenizer."""
    folder = made / "a"
    own = FAMILIES["m3diff"].load_processor(folder)
    picture = render(LEVELS["grid"].sample_scene(np.random.default_rng(0)), 64, np.random.default_rng(0))
    ours = pair_inputs(own, [(picture, picture)], [QUESTIONS[0]])
    theirs = AutoImageProcessor.from_pretrained(folder)([[picture, picture]], return_tensors="pt")
    pixels = theirs["pixel_values"].reshape(2, 3, 24, 24)
    assert (pixels - ours["pixel_values"]).abs().max() < 0.016  # two grey levels, as in tests/models/test_modeling.py
    if not is_torchvision_available():
        with pytest.raises(ImportError, match="LlavaOnevisionVideoProcessor requires the Torchvision library"):
            AutoProcessor.from_pretrained(folder)
        return
    stock = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTIONS[0]}]
    prompt = stock.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    asked = stock(images=[[picture, picture]], text=[prompt], return_tensors="pt")
    assert isinstance(stock, LlavaOnevisionProcessor)
    assert asked["input_ids"].tolist() == ours["input_ids"].tolist()


def test_the_embedded_base_was_made_by_the_recipe_of_params():
    given = yaml.safe_load(Path("params.yaml").read_text())["pretrain"]
    recipe = Pretrain.model_validate_json(Path("data/00_base/recipe.json").read_text())
    assert recipe == Pretrain.model_validate(given)
    assert Pretrain.model_validate(given).model_dump(mode="json") == given


def test_the_embedded_base_has_the_configuration_that_its_recipe_makes():
    recipe = Pretrain.model_validate_json(Path("data/00_base/recipe.json").read_text())
    own = FAMILIES["m3diff"].load_processor(Path("data/00_base"))
    made = llava_config(recipe, own).to_dict()
    given = json.loads(Path("data/00_base/config.json").read_text())
    for part in ("vision_config", "text_config"):
        assert {key: made[part][key] for key in given[part] if key in made[part] and key != "dtype"} == {
            key: value for key, value in given[part].items() if key in made[part] and key != "dtype"
        }
    for key in ("image_token_index", "video_token_index", "image_token_id", "video_token_id", "image_grid_pinpoints"):
        assert made.get(key) == given.get(key), key


@pytest.mark.slow(45)
def test_the_tokenizer_is_the_embedded_base_s_for_its_seed(tmp_path):
    train_tokenizer(2417, ("grid", "free")).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == Path("data/00_base/tokenizer.json").read_bytes()


def test_scenes_have_the_pinned_pixels(bank):
    assert hashlib.sha256(bank.pixels.tobytes()).hexdigest()[:16] == "fc5446b29ab98dd1"


def test_the_answer_s_tokens_and_its_end_are_supervised_and_nothing_else(llava, processor):
    asked = [("Describe the image.", "at the top a small red box"), ("Describe the ball.", "nothing")]
    ids, supervised = stage._encode(llava, asked, 1)
    assert ids.shape == supervised.shape
    labels = ids.roll(-1, dims=1)
    for row, (question, answer) in enumerate(asked):
        assert labels[row][supervised[row]].tolist() == processor.encode_reference(answer)
        prompt = list(processor.encode_prompt(question, 1))
        assert ids[row, : len(prompt)].tolist() == prompt
        assert ids[row, len(prompt) + len(processor.encode_reference(answer)) :].eq(processor.pad_id).all()
    assert not supervised[:, -1].any()


class Answering:
    """A model that gives the next token a logit of `sure`, but for the samples of `wrong`, where it misses the last."""

    def __init__(self, sure: float, vocabulary: int, wrong: tuple[int, ...] = ()) -> None:
        self.sure, self.vocabulary, self.wrong, self.given = sure, vocabulary, wrong, {}

    def __call__(self, input_ids, logits_to_keep, **given) -> SimpleNamespace:
        self.given = given
        labels = input_ids.roll(-1, dims=1)[logits_to_keep]
        rows = logits_to_keep.nonzero()[:, 0]
        for row in self.wrong:
            last = (rows == row).nonzero()[-1]
            labels[last] = (labels[last] + 1) % self.vocabulary
        return SimpleNamespace(logits=self.sure * torch.nn.functional.one_hot(labels, self.vocabulary).float())


def test_held_out_accuracy_is_the_share_of_descriptions_that_are_right_to_the_last_token(llava, processor, bank):
    size = len(processor.tokenizer)
    assert stage._held_out_accuracy(llava, Answering(5.0, size), bank, "grid") == 1.0
    model = Answering(5.0, size, wrong=(2, 7, 11))
    assert stage._held_out_accuracy(llava, model, bank, "grid") == 0.75
    assert (model.given["pixel_values"].shape, model.given["batch_num_images"]) == ((12, 3, 24, 24), [12])
    whole = processor.image_processor.to_pixels(torch.from_numpy(bank.pixels[48:]))
    assert torch.equal(model.given["pixel_values"], whole)


def test_the_loss_is_the_mean_over_the_answers_tokens(llava, processor, bank):
    size = len(processor.tokenizer)
    chosen = np.arange(8)
    for task in CURRICULUM:
        model = Answering(3.0, size)
        loss, right = stage._loss(llava, model, bank, chosen, task, np.random.default_rng(0))
        assert float(loss) == pytest.approx(math.log(math.exp(3) + size - 1) - 3, rel=1e-4)
        assert right.tolist() == [True] * (8 // (task.images or 1))
        assert ("pixel_values" in model.given) == (task.images > 0)
        assert model.given["use_cache"] is False
        if task.images:
            want = processor.image_processor.to_pixels(torch.from_numpy(bank.pixels[chosen]))
            assert torch.equal(model.given["pixel_values"], want)
            assert model.given["image_sizes"].tolist() == [[24, 24]] * 8
            assert model.given["batch_num_images"] == [8]


def test_the_first_task_comes_alone_then_all_in_turn():
    names = [task_of(step, 4, CURRICULUM) for step in range(1, 14)]
    assert names[:4] == [CURRICULUM[0]] * 4
    assert names[4:] == [CURRICULUM[step % 8] for step in range(5, 14)]
    assert task_of(8, 4, CURRICULUM) is CURRICULUM[0]


def test_the_learning_rate_rises_stays_for_half_the_run_and_falls_to_a_hundredth():
    rates = [optimizer.plateau(4, 100, step) for step in range(100)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:51] == [1.0] * 47
    assert rates[75] == pytest.approx(0.505)
    assert all(rates[n + 1] < rates[n] for n in range(50, 99))
    assert optimizer.plateau(4, 100, 100) == optimizer.plateau(4, 100, 130) == pytest.approx(0.01)


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(5, 4)
        self.patch = torch.nn.Conv2d(1, 2, 2)
        self.linear = torch.nn.Linear(4, 3)
        self.norm = torch.nn.LayerNorm(3)

    def forward(self) -> torch.Tensor:
        return (self.norm(self.linear(self.embed_tokens.weight)) ** 3).sum() + self.patch.weight.sum()


def test_a_step_clips_the_gradient_at_1_and_follows_the_schedule(monkeypatch):
    seen: list[tuple[float, float, float]] = []
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for place, kind in ((optimizer, optimizer.Muon), (torch.optim, torch.optim.AdamW)):

        class Spy(kind):  # type: ignore[misc, valid-type]
            kind_name = kind.__name__

            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(*args, **kwargs)
                optimizers[self.kind_name] = self

        monkeypatch.setattr(place, kind.__name__, Spy)
    torch.manual_seed(0)
    model = Small()
    step_with = optimizer.Optimizer(model, CFG, CFG.steps)
    others = (model.embed_tokens.weight, model.patch.weight, model.patch.bias, model.linear.bias)
    rest = (*others, model.norm.weight, model.norm.bias)
    for kind, parameters in (("Muon", (model.linear.weight,)), ("AdamW", rest)):
        assert [id(p) for p in optimizers[kind].param_groups[0]["params"]] == [id(p) for p in parameters]
    assert [group["betas"] for group in optimizers["AdamW"].param_groups] == [(0.9, 0.98)]
    assert optimizers["Muon"].param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    assert all(each.param_groups[0]["weight_decay"] == 0.05 for each in optimizers.values())
    for _ in range(5):
        rates = [each.param_groups[0]["lr"] for each in optimizers.values()]
        before = [p.detach().clone() for p in model.parameters()]
        loss = model()
        given = step_with(loss)
        assert given == float(loss.detach())
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
        seen.append((*rates, float(norm)))
        moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert sum(moved) >= len(moved) - 1  # the convolution's bias is in no loss
    assert [rates[:2] for rates in seen] == [
        pytest.approx((0.01 * optimizer.plateau(3, 24, n), 0.01 * optimizer.plateau(3, 24, n))) for n in range(5)
    ]
    assert [norm for *_, norm in seen] == pytest.approx([1.0] * 5, rel=1e-3)


def test_gradients_do_not_add_up_over_steps():
    torch.manual_seed(0)
    model = Small()
    step_with = optimizer.Optimizer(model, CFG, CFG.steps)
    for _ in range(2):
        step_with(1e-4 * model.patch.weight.sum())
    assert torch.allclose(model.patch.weight.grad, torch.full_like(model.patch.weight, 1e-4))


def test_a_row_of_the_log_is_the_mean_since_the_last_row(capsys):
    log = Log((task.name for task in CURRICULUM), ("grid",), "held_out_scene_accuracy")
    log.recent["image"] += [1.0, 2.0]
    log.recent["two images"] += [0.12345]
    log.images = 640
    log.add(200, [0.5])
    log.add(400, [0.75])
    heading, first, second = csv.reader(io.StringIO(log.text))
    names = [f"loss: {name}" for name in dict.fromkeys(task.name for task in CURRICULUM)]
    assert heading == ["step", "images_seen", *names, "held_out_scene_accuracy", "seconds"]
    one, two = dict(zip(heading, first, strict=True)), dict(zip(heading, second, strict=True))
    assert (one["loss: image"], one["loss: two images"], one["loss: sentence"]) == ("1.5", "0.1235", "")
    assert (one["step"], one["images_seen"], one["held_out_scene_accuracy"]) == ("200", "640", "0.5")
    assert {two[name] for name in names} == {""}
    assert 0 <= float(one["seconds"]) < 60
    assert "200 640 1.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("field", "least"),
    [
        ("image_px", 32),
        ("vision_px", 8),
        ("patch_px", 4),
        ("width", 8),
        ("vision_layers", 1),
        ("text_layers", 1),
        ("scenes", 1),
        ("held_out", 1),
        ("images_per_batch", 1),
        ("steps", 1),
        ("segmentation_steps", 0),
        ("first_task_steps", 0),
        ("warmup_steps", 1),
        ("weight_decay", 0),
        ("threads", 1),
    ],
)
def test_parameters_have_a_least_value(field, least):
    assert getattr(Pretrain.model_validate(CFG.model_dump() | {field: least}), field) == least
    with pytest.raises(ValidationError, match=field):
        Pretrain.model_validate(CFG.model_dump() | {field: least - 1})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("levels", [], "at least 1 item"),
        ("levels", ["hard"], "'grid' or 'free'"),
        ("levels", ["free", "free"], "expected each name once, found free, free"),
        ("tasks", ["sentence"], "expected 'image' among the tasks, found sentence"),
        ("tasks", ["image", "image"], "expected each name once, found image, image"),
        ("tasks", ["image", "poem"], "'image', 'asked for in two'"),
    ],
)
def test_levels_and_tasks_that_do_not_fit_are_refused(field, value, message):
    with pytest.raises(ValidationError, match=message):
        Pretrain.model_validate(CFG.model_dump() | {field: value})


def test_a_recipe_that_names_no_levels_or_tasks_has_the_grid_and_all_tasks():
    old = {key: value for key, value in CFG.model_dump().items() if key not in ("levels", "tasks")}
    assert Pretrain.model_validate(old) == CFG


def test_scenes_are_of_the_levels_in_turn_and_so_are_steps_and_what_is_held_out(llava):
    both = CFG.model_copy(update={"levels": ("free", "grid"), "scenes": 20, "held_out": 7})
    bank = stage._render_bank(both, llava)
    assert [scene.level for scene in bank.scenes] == ["free", "grid"] * 10
    rng = np.random.default_rng(0)
    for turn in range(4):
        chosen = bank.sample(rng, turn, 5)
        assert len(set(chosen)) == 5
        assert chosen.max() < 13
        assert {bank.scenes[number].level for number in chosen} == {("free", "grid")[turn % 2]}
    assert bank.held_out_of("free").tolist() == [14, 16, 18]
    assert bank.held_out_of("grid").tolist() == [13, 15, 17, 19]


def test_one_level_is_sampled_as_numpy_samples_all_scenes_that_train(bank):
    mine = bank.sample(np.random.default_rng(3), 17, 8)
    assert mine.tolist() == np.random.default_rng(3).choice(48, 8, replace=False).tolist()


def test_an_encoder_learns_to_segment_and_is_frozen_while_the_first_task_comes_alone(processor, tmp_path, monkeypatch):
    weights: list[tuple[str, torch.Tensor]] = []
    real = stage.task_of

    def task_of(step, first, tasks):
        weights.append((step, state()))
        return real(step, first, tasks)

    def state() -> torch.Tensor:
        return torch.cat([p.detach().flatten().clone() for p in seen[0].parameters()])

    seen: list[torch.nn.Module] = []

    class Spy(stage.Segmentation):
        def __init__(self, encoder, width) -> None:
            super().__init__(encoder, width)
            seen.append(encoder)
            weights.append((0, state()))

    monkeypatch.setattr(bases, "make_processor", lambda cfg: processor)
    monkeypatch.setattr(stage, "task_of", task_of)
    monkeypatch.setattr(stage, "Segmentation", Spy)
    monkeypatch.setattr(stage, "LOG_EVERY", 20)
    pretrain(CFG.model_copy(update={"segmentation_steps": 60, "steps": 8, "first_task_steps": 4}), tmp_path)
    rows = list(csv.DictReader((tmp_path / "segmentation_log.csv").open()))
    assert [row["step"] for row in rows] == ["20", "40", "60"]
    assert [row["images_seen"] for row in rows] == ["160", "320", "480"]
    losses = [float(row["loss: segmentation"]) for row in rows]
    assert losses[2] < losses[0] - 0.3
    assert 0 <= float(rows[-1]["held_out_kind_accuracy"]) <= 1
    at = dict(weights)
    assert not torch.equal(at[0], at[1]), "the encoder of the model is what learns to segment"
    assert all(torch.equal(at[1], at[step]) for step in (2, 3, 4, 5)), "frozen for four steps"
    assert not torch.equal(at[5], at[6])
    assert [row["step"] for row in log_of(tmp_path)] == ["8"]


def test_a_base_of_both_levels_without_two_images_logs_accuracy_by_level(processor, tmp_path, monkeypatch):
    control = {"levels": ("grid", "free"), "tasks": ("image", "asked for", "sentence"), "steps": 6, "scenes": 44}
    monkeypatch.setattr(bases, "make_processor", lambda cfg: processor)
    pretrain(CFG.model_copy(update=control), tmp_path)
    (row,) = log_of(tmp_path)
    assert [key for key in row if key.startswith("loss")] == ["loss: image", "loss: asked for", "loss: sentence"]
    assert [key for key in row if "accuracy" in key] == [
        "held_out_scene_accuracy: grid",
        "held_out_scene_accuracy: free",
    ]


def test_a_learning_rate_of_0_is_refused():
    for field in ("lr", "lr_matrices"):
        with pytest.raises(ValidationError, match=field):
            Pretrain.model_validate(CFG.model_dump() | {field: 0})
