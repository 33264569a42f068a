"""Base-making in miniature: what is supervised, which parameter learns how fast, and a whole small run."""

import csv
import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError
from torch.optim import _muon as theirs
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
from m3diff.stages.pretrain import bases, stage
from m3diff.stages.pretrain.bases import LlavaOneVision, architecture_of, llava_config, train_tokenizer
from m3diff.stages.pretrain.curriculum import QUESTIONS, curriculum
from m3diff.stages.pretrain.params import Pretrain
from m3diff.stages.pretrain.stage import Bank, Muon, Optimizer, orthogonalised, plateau, pretrain
from tests.tiny import BASE, pair_inputs

CURRICULUM = curriculum(("grid",))
SIZES = {"image_px": 64, "vision_px": 24, "patch_px": 8, "width": 32, "vision_layers": 1, "text_layers": 2}
DATA = {"seed": 11, "scenes": 60, "held_out": 12, "images_per_batch": 8}
RATES = {"lr_matrices": 0.01, "lr": 0.01, "warmup_steps": 3, "weight_decay": 0.05}
CFG = Pretrain(**SIZES, **DATA, **RATES, steps=24, first_task_steps=6, threads=1)


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded base's: to train one takes seconds, and has a test of its own."""
    made = FAMILIES["m3diff"].load_processor(BASE).tokenizer
    monkeypatch.setattr(bases, "train_tokenizer", lambda seed, levels: made if seed == CFG.seed else None)
    monkeypatch.setattr(stage, "LOG_EVERY", 6)


@pytest.fixture
def llava() -> LlavaOneVision:
    made = architecture_of(CFG)
    assert isinstance(made, LlavaOneVision)
    return made


@pytest.fixture
def bank(llava: LlavaOneVision) -> Bank:
    return stage._render_bank(CFG, llava)


def log_of(folder: Path, name: str = "training") -> list[dict[str, str]]:
    return list(csv.DictReader((folder / f"{name}_log.csv").open()))


def test_a_whole_small_run_learns_comes_out_the_same_twice_and_is_a_llava_onevision(tmp_path: Path) -> None:
    for name in "ab":
        pretrain(CFG, tmp_path / name)
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b
    rows, others = log_of(tmp_path / "a"), log_of(tmp_path / "b")
    assert [row | {"seconds": ""} for row in rows] == [row | {"seconds": ""} for row in others]
    assert [row["step"] for row in rows] == ["6", "12", "18", "24"]
    assert float(rows[-1]["loss: image"]) < float(rows[0]["loss: image"]) - 0.5
    assert all(rows[-1][f"loss: {task.name}"] for task in CURRICULUM)
    assert [rows[0][f"loss: {name}"] for name in ("two images", "sentence", "asked for")] == ["", "", ""]
    assert [int(row["images_seen"]) for row in rows] == [8 * 6, 8 * 11, 8 * 16, 8 * 21], "sentences have no image"

    folder = tmp_path / "a"
    tokens = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    processors = {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
    weights = {"config.json", "generation_config.json", "model.safetensors", "recipe.json", "training_log.csv"}
    assert {path.name for path in folder.iterdir()} == tokens | processors | weights
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(folder)
    picture = render(LEVELS["grid"].sample_scene(np.random.default_rng(0)), 64, np.random.default_rng(0))
    ours = pair_inputs(FAMILIES["m3diff"].load_processor(folder), [(picture, picture)], [QUESTIONS[0]])
    assert ours["pixel_values"].shape == (2, 3, 24, 24)
    assert (ours["input_ids"] == model.config.image_token_id).sum() == 2 * (9 + 1)
    assert Pretrain.model_validate_json((folder / "recipe.json").read_text()) == CFG

    stock = AutoImageProcessor.from_pretrained(folder)([[picture, picture]], return_tensors="pt")
    pixels = stock["pixel_values"].reshape(2, 3, 24, 24)
    assert (pixels - ours["pixel_values"]).abs().max() < 0.016  # two grey levels, as in tests/models/test_modeling.py
    if not is_torchvision_available():  # transformers says so instead of giving a tokenizer
        with pytest.raises(ImportError, match="LlavaOnevisionVideoProcessor requires the Torchvision library"):
            AutoProcessor.from_pretrained(folder)
        return
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTIONS[0]}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    asked = processor(images=[[picture, picture]], text=[prompt], return_tensors="pt")
    assert isinstance(processor, LlavaOnevisionProcessor)
    assert asked["input_ids"].tolist() == ours["input_ids"].tolist()


def test_the_embedded_base_was_made_by_the_recipe_of_params_and_has_the_configuration_that_it_makes() -> None:
    given = yaml.safe_load(Path("params.yaml").read_text())["pretrain"]
    recipe = Pretrain.model_validate_json((BASE / "recipe.json").read_text())
    assert recipe == Pretrain.model_validate(given)
    assert recipe.model_dump(mode="json") == given
    made = llava_config(recipe, FAMILIES["m3diff"].load_processor(BASE)).to_dict()
    found = json.loads((BASE / "config.json").read_text())
    for part in ("vision_config", "text_config"):
        known = [key for key in found[part] if key in made[part] and key != "dtype"]
        assert {key: made[part][key] for key in known} == {key: found[part][key] for key in known}
    for key in ("image_token_index", "video_token_index", "image_token_id", "video_token_id", "image_grid_pinpoints"):
        assert made.get(key) == found.get(key), key


@pytest.mark.slow(45)
def test_the_tokenizer_is_the_embedded_base_s_for_its_seed(tmp_path: Path) -> None:
    train_tokenizer(2417, ("grid", "free")).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (BASE / "tokenizer.json").read_bytes()


def test_the_answer_s_tokens_and_its_end_are_supervised_and_nothing_else(llava: LlavaOneVision) -> None:
    processor = llava.processor
    asked = [("Describe the image.", "at the top a small red box"), ("Describe the ball.", "nothing")]
    ids, supervised = stage._encode(llava, asked, 1)
    labels = ids.roll(-1, dims=1)
    for row, (question, answer) in enumerate(asked):
        prompt, reference = processor.encode_prompt(question, 1), processor.encode_reference(answer)
        assert labels[row][supervised[row]].tolist() == reference
        assert tuple(ids[row, : len(prompt)].tolist()) == tuple(prompt)
        assert ids[row, len(prompt) + len(reference) :].eq(processor.pad_id).all()
    assert not supervised[:, -1].any()


class Answering:
    """A model that gives the next token a logit of `sure`, but for the samples of `wrong`, where it misses the last."""

    def __init__(self, sure: float, vocabulary: int, wrong: tuple[int, ...] = ()) -> None:
        self.sure, self.vocabulary, self.wrong, self.given = sure, vocabulary, wrong, {}

    def __call__(self, input_ids: torch.Tensor, logits_to_keep: torch.Tensor, **given: Any) -> SimpleNamespace:
        self.given = given
        labels = input_ids.roll(-1, dims=1)[logits_to_keep]
        rows = logits_to_keep.nonzero()[:, 0]
        for row in self.wrong:
            last = (rows == row).nonzero()[-1]
            labels[last] = (labels[last] + 1) % self.vocabulary
        return SimpleNamespace(logits=self.sure * torch.nn.functional.one_hot(labels, self.vocabulary).float())


def test_the_loss_is_the_mean_over_the_answers_tokens_and_right_is_what_is_right_to_the_last(
    llava: LlavaOneVision, bank: Bank
) -> None:
    size, chosen, pixels = len(llava.processor.tokenizer), np.arange(8), llava.processor.image_processor.to_pixels
    for task in CURRICULUM:
        model: Any = Answering(3.0, size)
        loss, right = stage._loss(llava, model, bank, chosen, task, np.random.default_rng(0))
        assert float(loss) == pytest.approx(math.log(math.exp(3) + size - 1) - 3, rel=1e-4)
        assert right.tolist() == [True] * (8 // (task.images or 1))
        assert ("pixel_values" in model.given) == (task.images > 0)
        assert model.given["use_cache"] is False
        if task.images:
            assert torch.equal(model.given["pixel_values"], pixels(torch.from_numpy(bank.pixels[chosen])))
            assert model.given["image_sizes"].tolist() == [[24, 24]] * 8
            assert model.given["batch_num_images"] == [8]
    model = Answering(5.0, size, wrong=(2, 7))
    _, right = stage._loss(llava, model, bank, chosen, CURRICULUM[0], np.random.default_rng(0))
    assert [number for number, whole in enumerate(right.tolist()) if not whole] == [2, 7]


class Steps:
    """An optimizer of three steps that takes none."""

    steps = 3

    def __call__(self, loss: Any) -> float:
        return loss


def test_a_row_of_the_log_is_the_mean_since_the_last_row_and_what_is_right_of_each_level(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(stage, "LOG_EVERY", 2)
    done: Any = iter([("a", 1.0, 8), ("a", 1.24691, 8), ("b", 0.5, 0)])
    right = {"grid": 0.5, "free": 0.123456}
    made: Any = Steps()
    text = stage._run(made, ["a", "b"], lambda step: next(done), ("grid", "free"), "right", right.__getitem__)
    heading, *rows = csv.reader(text.splitlines())
    assert heading == ["step", "images_seen", "loss: a", "loss: b", "right: grid", "right: free", "seconds"]
    assert [row[:-1] for row in rows] == [
        ["2", "16", "1.1235", "", "0.5", "0.1235"],
        ["3", "16", "", "0.5", "0.5", "0.1235"],
    ]
    assert 0 <= float(rows[0][-1]) < 60
    assert "2 16 1.1235" in capsys.readouterr().out


def test_the_learning_rate_rises_stays_for_half_the_run_and_falls_to_a_hundredth() -> None:
    rates = [plateau(4, 100, step) for step in range(100)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:51] == [1.0] * 47
    assert rates[75] == pytest.approx(0.505)
    assert all(rates[n + 1] < rates[n] for n in range(50, 99))
    assert plateau(4, 100, 100) == plateau(4, 100, 130) == pytest.approx(0.01)


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = torch.nn.Embedding(5, 4)
        self.patch = torch.nn.Conv2d(1, 2, 2)
        self.linear = torch.nn.Linear(4, 3)
        self.norm = torch.nn.LayerNorm(3)

    def forward(self) -> torch.Tensor:
        return (self.norm(self.linear(self.embed_tokens.weight)) ** 3).sum() + self.patch.weight.sum()


def test_a_step_clips_the_gradient_at_1_adds_up_none_and_follows_the_schedule() -> None:
    model = Small()
    step_with = Optimizer(model, CFG, CFG.steps)
    muon, adamw = (each.param_groups[0] for each in step_with.optimizers)
    others = (model.embed_tokens.weight, model.patch.weight, model.patch.bias, model.linear.bias)
    assert [id(p) for p in muon["params"]] == [id(model.linear.weight)]
    assert [id(p) for p in adamw["params"]] == [id(p) for p in (*others, model.norm.weight, model.norm.bias)]
    assert (adamw["betas"], muon["adjust_lr_fn"]) == ((0.9, 0.98), "match_rms_adamw")
    assert (adamw["weight_decay"], muon["weight_decay"]) == (0.05, 0.05)
    for step in range(5):
        assert (muon["lr"], adamw["lr"]) == pytest.approx([0.01 * plateau(3, 24, step)] * 2)
        before, loss = [p.detach().clone() for p in model.parameters()], model()
        assert step_with(loss) == float(loss.detach())
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        assert float(norm) == pytest.approx(1.0, rel=1e-3)
        moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert sum(moved) >= len(moved) - 1  # the convolution's bias is in no loss
    step_with(1e-4 * model.patch.weight.sum())
    assert torch.allclose(model.patch.weight.grad, torch.full_like(model.patch.weight, 1e-4))


COEFFICIENTS = (3.4445, -4.775, 2.0315)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_muon_s_iteration_is_torch_s_but_for_rounding(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    grad = torch.randn(shape)
    found = orthogonalised(grad, COEFFICIENTS, 5, 1e-7)
    want = theirs._zeropower_via_newtonschulz(grad, COEFFICIENTS, 5, 1e-7).float()
    assert (found.shape, found.dtype) == (shape, torch.float32)
    assert (found - want).norm() < 0.03 * want.norm()
    sizes = torch.linalg.svdvals(found)
    assert 0.6 < sizes.min() <= sizes.max() < 1.3, "about orthogonal"
    zeros = torch.zeros(shape)
    assert torch.equal(orthogonalised(zeros, COEFFICIENTS, 5, 1e-7), zeros)


@pytest.mark.parametrize("native", [True, False])
def test_the_processor_decides_whose_iteration_runs_and_torch_keeps_its_own(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[torch.dtype] = []
    own = theirs._zeropower_via_newtonschulz

    def counted(grad: torch.Tensor, *args: Any) -> torch.Tensor:
        ran.append(grad.dtype)
        if len(ran) > 1:
            raise RuntimeError("a matrix is no matrix")
        return orthogonalised(grad, *args)

    monkeypatch.setattr(stage, "has_bf16_products", lambda: native)
    monkeypatch.setattr(stage, "orthogonalised", counted)
    weight = torch.nn.Parameter(torch.eye(4))
    made = Muon([weight], lr=0.1, adjust_lr_fn="match_rms_adamw")
    weight.grad = torch.randn(4, 4)
    made.step()
    assert ran == ([] if native else [torch.float32])
    assert not torch.equal(weight, torch.eye(4))
    if not native:
        with pytest.raises(RuntimeError, match="no matrix"):
            made.step()
    assert theirs._zeropower_via_newtonschulz is own


LEAST = {"image_px": 32, "vision_px": 8, "patch_px": 4, "segmentation_steps": 0, "first_task_steps": 0}
LEAST |= {"weight_decay": 0, "threads": 1, "warmup_steps": 1, "steps": 1, "images_per_batch": 1, "held_out": 1}
LEAST |= {"scenes": 1, "text_layers": 1, "vision_layers": 1, "width": 8}


def test_parameters_have_a_least_value() -> None:
    for field, least in LEAST.items():
        assert getattr(Pretrain.model_validate(CFG.model_dump() | {field: least}), field) == least
    for field, least in {**LEAST, "lr": 1, "lr_matrices": 1}.items():
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
def test_levels_and_tasks_that_do_not_fit_are_refused(field: str, value: list[str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Pretrain.model_validate(CFG.model_dump() | {field: value})
    old = {key: value for key, value in CFG.model_dump().items() if key not in ("levels", "tasks")}
    assert Pretrain.model_validate(old) == CFG, "the grid and all tasks where none are named"


def test_scenes_are_of_the_levels_in_turn_and_so_are_steps_and_what_is_held_out(
    llava: LlavaOneVision, bank: Bank
) -> None:
    assert hashlib.sha256(bank.pixels.tobytes()).hexdigest()[:16] == "fc5446b29ab98dd1"
    mine = bank.sample(np.random.default_rng(3), 17, 8)
    assert mine.tolist() == np.random.default_rng(3).choice(48, 8, replace=False).tolist(), "one level: as numpy does"
    both = stage._render_bank(CFG.model_copy(update={"levels": ("free", "grid"), "scenes": 20, "held_out": 7}), llava)
    assert [scene.level for scene in both.scenes] == ["free", "grid"] * 10
    rng = np.random.default_rng(0)
    for turn in range(4):
        chosen = both.sample(rng, turn, 5)
        assert len(set(chosen)) == 5
        assert chosen.max() < 13
        assert {both.scenes[number].level for number in chosen} == {("free", "grid")[turn % 2]}
    assert both.held_out_of("free").tolist() == [14, 16, 18]
    assert both.held_out_of("grid").tolist() == [13, 15, 17, 19]


def test_an_encoder_learns_to_segment_and_is_frozen_while_the_first_task_comes_alone_then_all_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both levels, whose accuracies are logged by themselves."""
    encoders: list[torch.Tensor] = []
    tasks: list[str] = []
    loss_of = stage._loss

    def state(of: Any, model: Any) -> torch.Tensor:
        return torch.cat([p.detach().flatten().clone() for p in of.encoder(model).parameters()])

    class Spy(stage.Segmentation):
        def __init__(self, encoder: torch.nn.Module, width: int) -> None:
            super().__init__(encoder, width)
            encoders.append(torch.cat([p.detach().flatten().clone() for p in encoder.parameters()]))

    def watched(of: Any, model: Any, bank: Bank, chosen: Any, task: Any, rng: Any) -> Any:
        if torch.is_grad_enabled():
            encoders.append(state(of, model))
            tasks.append(task.name)
        return loss_of(of, model, bank, chosen, task, rng)

    monkeypatch.setattr(stage, "_loss", watched)
    monkeypatch.setattr(stage, "Segmentation", Spy)
    monkeypatch.setattr(stage, "LOG_EVERY", 20)
    changes = {"segmentation_steps": 60, "steps": 11, "first_task_steps": 4, "levels": ("grid", "free"), "scenes": 96}
    pretrain(CFG.model_copy(update=changes), tmp_path)
    assert tasks == ["image"] * 4 + [CURRICULUM[step % 8].name for step in range(5, 12)]
    assert not torch.equal(encoders[0], encoders[1]), "the encoder of the model is what learns to segment"
    assert all(torch.equal(encoders[1], encoders[step]) for step in (2, 3, 4, 5)), "frozen for four steps"
    assert not torch.equal(encoders[5], encoders[6])
    rows = log_of(tmp_path, "segmentation")
    assert [(row["step"], row["images_seen"]) for row in rows] == [("20", "160"), ("40", "320"), ("60", "480")]
    assert float(rows[2]["loss: segmentation"]) < float(rows[0]["loss: segmentation"]) - 0.3
    assert 0 <= float(rows[-1]["held_out_kind_accuracy: grid"]) <= 1
    (row,) = log_of(tmp_path)
    assert row["step"] == "11"
    assert {"held_out_scene_accuracy: grid", "held_out_scene_accuracy: free"} <= row.keys()
