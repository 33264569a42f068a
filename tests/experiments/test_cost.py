"""The measured cost of a variant: its learning curve, captions, steps and "no change"."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.experiments import cost
from m3diff.records.schemas import NO_CHANGE
from m3diff.settings.load import load_params
from tests.tiny import noise_image
from tests.toy import REPOSITORY

PARAMS = load_params(REPOSITORY / "params.yaml")


def test_the_learning_curve_is_a_running_mean_at_every_tenth_step_and_the_measured_ones(monkeypatch) -> None:
    lines = [f"{n},{1 if n < 20 else 2},{0.7 if n == 13 else ''},{0.2 if n == 17 else ''}" for n in range(1, 26)]
    text = "\n".join(["step,loss,val_loss,module_score/4", *lines])
    monkeypatch.setattr(cost, "read", lambda experiment, path: text.encode())
    assert cost.learning_curve("name", PARAMS.paths) == [
        {"step": 10, "loss": 1.0},
        {"step": 13, "loss": 1.0, "val_loss": 0.7},
        {"step": 17, "loss": 1.0, "module_score/4": 0.2},
        {"step": 20, "loss": 1.03},
        {"step": 25, "loss": round(2 - 0.97**6, 4)},
    ]


class Words:
    """A processor whose tokens are letters and whose images are their mean."""

    def encode_reference(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def prepare_image(self, image: Any) -> np.ndarray:
        return np.asarray(image.resize((1, 1)), dtype=np.uint8)

    def prompt_inputs(self, questions: list[str]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(len(questions), 3, dtype=torch.long)}

    def image_inputs(self, prepared: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"pixels": prepared.float().mean(dim=(1, 2, 3))}


def test_the_probability_of_no_change_is_of_how_its_references_begin(tmp_path: Path) -> None:
    """Three of 4 references with a first token `n` say so, and one of 2 with `s`: 0.75 P(n) + 0.5 P(s)."""
    texts = [("no", NO_CHANGE), ("none", NO_CHANGE), ("nil", NO_CHANGE), ("new", "addition")]
    texts += [("same", NO_CHANGE), ("star", "removal"), ("ball", "removal")]
    rows = [{"references": [text], "change_types": [kind]} for text, kind in texts]
    captioner: Any = SimpleNamespace(processor=Words())
    shares = cost.no_change_shares(captioner, rows)
    assert shares == {13: 0.75, 18: 0.5}

    images = []
    for number, grey in enumerate((10, 10, 200, 60)):
        noise_image(number).point(lambda _, grey=grey: grey).save(tmp_path / f"{number}.png")
        images.append(str(tmp_path / f"{number}.png"))
    pairs = [(0, 1, NO_CHANGE), (0, 2, "color"), (1, 3, "color"), (2, 2, NO_CHANGE)]
    test = [{"before": images[a], "after": images[b], "change_types": [kind]} for a, b, kind in pairs]

    def model(input_ids: torch.Tensor, pixels: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        """Says `n` of equal images, `b` of others; the more they differ, the surer."""
        logits = torch.zeros(len(input_ids), 3, 26)
        logits[:, -1, 1] = (pixels[1::2] - pixels[0::2]).abs() / 10
        logits[:, -1, 13] = 2.0
        return SimpleNamespace(logits=logits)

    captioner.model = model
    assert cost.area(captioner, test, shares) == 1.0
    swapped = [one | {"change_types": ["color"] if one["change_types"] == [NO_CHANGE] else [NO_CHANGE]} for one in test]
    assert cost.area(captioner, swapped, shares) == 0.0
    for alike in ([test[0], test[3]], test[1:3], []):
        assert cost.area(captioner, alike, shares) is None, "no pair without a change, or none with one"
    assert cost.area(captioner, test, {}) is None, "no reference says that nothing changed"


def test_a_variant_is_measured_with_its_own_base_and_model_for_so_many_steps(tmp_path: Path) -> None:
    train, settings = cost.changed({"train.model": "onediff", "train.base": "data/other"}, PARAMS)
    assert (train.base, settings) == (Path("data/other"), PARAMS.models["onediff"])
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table({"pair": ["a", "a", "b", "c", "d", "e"]}), tmp_path / "train" / "0.parquet")
    assert cost.epochs_of(6, tmp_path, SimpleNamespace(global_batch=2)) == 2.0
