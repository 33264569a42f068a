"""RSRCC, ChangeChat-105k and pairs with a text beside them: a small run of each, from published rows to the report.

The rows have the published form, the texts are our own, and the images show one of two drawn scenes. The model learns
the answers about both scenes from the train split, so its answers about the test split are known. Some references of
the test split differ from them on purpose, so that no score is 0 or 1 merely because a part does nothing.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from m3diff.settings.compute import Compute
from m3diff.settings.load import load_params
from m3diff.stages.convert.params import Convert
from m3diff.stages.convert.stage import convert
from m3diff.stages.evaluate.params import Evaluate
from m3diff.stages.evaluate.stage import evaluate
from m3diff.stages.predict.params import Predict
from m3diff.stages.predict.stage import predict
from tests import layouts
from tests.layouts import ROAD_OPTIONS, edit_json, make_entry, rsrcc_text, run_ingest, run_validate
from tests.scoring.bench import table
from tests.stages.train.toy import COMPUTE, recipe, run
from tests.tiny import BASE
from tests.toy import REPOSITORY

Scene = tuple[str, str]  # the colours before and after
BUILT: Scene = ("navy", "gold")
QUIET: Scene = ("green", "darkgreen")


@dataclass(frozen=True)
class ProtocolResult:
    """What metrics.json has about a protocol.

    Attributes:
        pairs: number of records.
        scores: some scores over all records.
        by_kind: some scores by kind of question.
    """

    pairs: int
    scores: Mapping[str, float]
    by_kind: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class SmallRun:
    """A dataset and the result of a run on it.

    Attributes:
        write: function that writes the dataset to a folder.
        predictions: the model's answer by record, without the dataset's name.
        protocols: results by protocol, without the dataset's name.
    """

    write: Callable[[Path], None]
    predictions: Mapping[str, str]
    protocols: Mapping[str, ProtocolResult]


def draw_scene(scene: Scene, number: int, before: Path, after: Path) -> None:
    """Save the two images of a scene. The number places a small block, so that no two pairs are equal."""
    for colour, path in zip(scene, (before, after), strict=True):
        image = Image.new("RGB", (40, 40), colour)
        image.paste("white", (3 * number, 3, 3 * number + 3, 6))
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)


# RSRCC: a yes/no question and a choice question about each pair. One letter of test differs from the model's

SCENE_OF_RSRCC = {"1a_2b": BUILT, "1c_2d": QUIET, "3c_4d": QUIET, "5e_6f": BUILT, "7a_8b": QUIET}


def rsrcc_rows(pair: str, truth: str, letter: str) -> list[tuple[str, str]]:
    choice = rsrcc_text("What happened to the road?", letter, *ROAD_OPTIONS)
    return [(pair, rsrcc_text("Was a house built?", truth)), (pair, choice)]


def write_rsrcc(root: Path) -> None:
    rows = {
        "train": rsrcc_rows("1a_2b", "Yes", "D") + rsrcc_rows("1c_2d", "No", "C"),
        "val": rsrcc_rows("3c_4d", "No", "C"),
        "test": rsrcc_rows("5e_6f", "Yes", "D") + rsrcc_rows("7a_8b", "No", "B"),
    }
    layouts.write_rsrcc(root, rows)
    for number, before in enumerate(sorted(root.rglob("*_before.png"))):
        pair = before.name.removesuffix("_before.png")
        draw_scene(SCENE_OF_RSRCC[pair], number, before, before.with_name(f"{pair}_after.png"))


RSRCC = SmallRun(
    write_rsrcc,
    predictions={"5e_6f?0": "Yes", "5e_6f?1": "D", "7a_8b?0": "No", "7a_8b?1": "C"},
    protocols={
        "published": ProtocolResult(
            pairs=4,
            scores={
                "first_answer_accuracy": 3 / 4,
                "first_choice_accuracy": 1 / 2,
                "first_yes_no_accuracy": 1.0,
                "exact_match": 3 / 4,
                "choice_accuracy": 1 / 2,
                "yes_no_accuracy": 1.0,
            },
            by_kind={
                "choice": {"pairs": 2, "first_choice_accuracy": 1 / 2, "exact_match": 1 / 2},
                "yes/no": {"pairs": 2, "first_yes_no_accuracy": 1.0, "exact_match": 1.0},
            },
        )
    },
)

# ChangeChat-105k: all six kinds about a pair of each scene. Some answers of test differ from the model's

CHANGECHAT_ANSWERS = {
    "caption": [["Two new villas are built."] * 5, ["Nothing has changed here."] * 5],
    "binary": ["Yes", "No"],
    "count": ["There are 2 new roads and 10 new buildings.", "There are no new roads and no new buildings."],
    "localisation": ["roads ['top-left'] buildings ['center-center', 'top-left']", "roads [] buildings []"],
    "open": [{"Where are the villas?": "They are at the top."}, {"Has the forest changed?": "No, it has not."}],
}
BUILT_IMAGES = ("train_000001.png", "test_000004.png")
CHANGECHAT_PREDICTIONS = {
    "": ["Two new villas are built.", "Nothing has changed here."],
    "?binary-0": CHANGECHAT_ANSWERS["binary"],
    "?count-0": CHANGECHAT_ANSWERS["count"],
    "?localisation-0": CHANGECHAT_ANSWERS["localisation"],
    "?open-0": ["They are at the top.", "No, it has not."],
    "?dialogue-0@0": CHANGECHAT_ANSWERS["binary"],
    "?dialogue-0@1": CHANGECHAT_ANSWERS["count"],
    "?dialogue-0@2": ["Two new villas are built.", "Nothing has changed here."],
}


def write_changechat(root: Path) -> None:
    layouts.write_changechat(root, CHANGECHAT_ANSWERS)
    for number, before in enumerate(sorted(root.rglob("A/*.png"))):
        scene = BUILT if before.name in BUILT_IMAGES else QUIET
        draw_scene(scene, number, before, before.parents[1] / "B" / before.name)
    change_answer(root, "binary", 1, "Yes")
    change_answer(root, "count", 0, "There are 3 new roads and 10 new buildings.")
    change_answer(root, "loc", 0, "roads ['top-left'] buildings ['center-center', 'top-left', 'top-right']")
    change_answer(root, "open", 0, "They are at the left.")
    captions = root / "annotations/changechat_105k_test.json"
    edit_json(captions, lambda rows: rows[0].update(captions=["Two old villas are built."] * 5))


def change_answer(root: Path, part: str, number: int, answer: str) -> None:
    """Change the answer of a row in one of the files of test."""
    file = root / f"annotations/changechat_105k_test_{part}.json"
    edit_json(file, lambda rows: rows[number]["conversations"][1].update(value=answer))


def changechat_predictions() -> dict[str, str]:
    predictions = {}
    for end, answers in CHANGECHAT_PREDICTIONS.items():
        for image, answer in zip(("test_000004.png", "test_000005.png"), answers, strict=True):
            predictions[f"{image}{end}"] = answer
    return predictions


CHANGECHAT = SmallRun(
    write_changechat,
    changechat_predictions(),
    protocols={
        # four of five words are right about the pair with a change
        "caption": ProtocolResult(2, {"ROUGE-L": (4 / 5 + 1) / 2, "BLEU-1": 8 / 9}, {"caption": {"pairs": 2}}),
        "change": ProtocolResult(1, {"ROUGE-L": 4 / 5}, {"caption": {"pairs": 1}}),
        "no_change": ProtocolResult(1, {"ROUGE-L": 1.0}, {"caption": {"pairs": 1}}),
        "binary": ProtocolResult(
            2,
            {"binary_accuracy": 1 / 2, "binary_precision": 1.0, "binary_recall": 1 / 2, "binary_f1": 2 / 3},
            {"binary": {"binary_f1": 2 / 3, "exact_match": 1 / 2}},
        ),
        "count": ProtocolResult(
            2,
            {"roads_mae": 1 / 2, "roads_rmse": (1 / 2) ** 0.5, "buildings_mae": 0.0, "unreadable_counts": 0.0},
            {"count": {"roads_mae": 1 / 2, "exact_match": 1 / 2}},
        ),
        "localisation": ProtocolResult(
            2,
            {"roads_f1": 1.0, "buildings_precision": 1.0, "buildings_recall": 2 / 3, "buildings_f1": 4 / 5}
            | {"buildings_jaccard": (2 / 3 + 0) / 2, "buildings_exact": 1 / 2},
            {"localisation": {"buildings_f1": 4 / 5, "exact_match": 1 / 2}},
        ),
        "open": ProtocolResult(2, {"ROUGE-L": (4 / 5 + 1) / 2}, {"open": {"pairs": 2, "exact_match": 1 / 2}}),
    },
)

# Pairs with a text beside their images. Two texts of test differ from the model's, one in a single word

SIDECARS = {
    "train/0": (BUILT, "the red ball moved"),
    "train/1": (QUIET, "a blue star appeared"),
    "val/2": (QUIET, "a blue star appeared"),
    "test/3": (BUILT, "the red ball moved"),
    "test/4": (QUIET, "a blue lamp appeared"),
    "test/5": (BUILT, "two boats came back"),
}


def write_sidecars(root: Path) -> None:
    for number, (name, (scene, caption)) in enumerate(SIDECARS.items()):
        draw_scene(scene, number, root / f"{name}.png", root / f"{name}_1.png")
        (root / f"{name}.txt").write_text(f"{caption}\n")


SIDECAR = SmallRun(
    write_sidecars,
    predictions={"test/3": "the red ball moved", "test/4": "a blue star appeared", "test/5": "the red ball moved"},
    protocols={"test": ProtocolResult(3, {"ROUGE-L": (1 + 3 / 4 + 0) / 3, "BLEU-1": (4 + 3 + 0) / 12})},
)
RUNS = {"rsrcc": RSRCC, "changechat": CHANGECHAT, "sidecar": SIDECAR}


# The run


def write_base(folder: Path) -> Path:
    """Write the embedded base with other embeddings of the tokens that its training lacked.

    These embeddings are nearly equal and long. A model whose embeddings are frozen could not learn to write such
    tokens.
    """
    shutil.copytree(BASE, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    embeddings = weights["language_model.model.embed_tokens.weight"]
    lengths = embeddings.float().norm(dim=1)
    is_unknown = lengths > 4
    length = lengths[~is_unknown].mean()
    noise = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0))
    embeddings[is_unknown] = (noise * length / embeddings.shape[1] ** 0.5).to(embeddings.dtype)[is_unknown]
    save_file(weights, file, {"format": "pt"})
    return folder


def run_stages(reader: str, folder: Path) -> None:
    """Run all stages from ingest to evaluate on the dataset in `folder`/raw."""
    run_ingest(folder / "raw", reader, reader)
    report = run_validate(folder, near_duplicate_max_diff=None)
    assert report.rows_out == report.rows_in
    convert(Convert(), {reader: make_entry(reader, folder / "raw")}, folder / "clean", folder / "mixture")
    settings = load_params(REPOSITORY / "profiles" / "embedded.yaml").models["m3diff"]
    changes = {"model": settings, "epochs": 50, "checkpoint_every_steps": 50}
    run(recipe(write_base(folder / "base"), **changes), folder / "mixture", folder)
    compute = Compute(scratch=folder / "runs", **COMPUTE)
    predict(Predict(), compute, folder / "mixture", folder / "out", folder / "predictions")
    cfg = Evaluate(metrics=("ROUGE-L", "BLEU"), allow_fewer_pairs=True)
    evaluate(cfg, compute, folder / "records", folder / "clean", folder / "predictions", folder / "report")


@pytest.mark.slow(30)
@pytest.mark.parametrize("reader", RUNS)
def test_a_small_run_from_published_rows_has_its_scores_in_the_report(reader, tmp_path):
    expected = RUNS[reader]
    expected.write(tmp_path / "raw")
    run_stages(reader, tmp_path)

    rows = json.loads((tmp_path / "predictions" / "predictions.json").read_text())
    assert len(rows) == len(expected.predictions)
    predictions = {row["image_id"].removeprefix(f"{reader}/"): row["caption"] for row in rows}
    assert predictions == expected.predictions

    protocols = json.loads((tmp_path / "report" / "metrics.json").read_text())["protocols"]
    assert protocols.keys() == {f"{reader}/{name}" for name in expected.protocols}
    page = (tmp_path / "report" / "report.html").read_text()
    for name, result in expected.protocols.items():
        assert_protocol(protocols[f"{reader}/{name}"], result)
        assert_page(page, f"{reader}/{name}", result)


def assert_protocol(scores: dict, result: ProtocolResult) -> None:
    """Assert that a protocol of metrics.json has the numbers of a result, and the same kinds."""
    assert scores["pairs"] == result.pairs
    assert {score: scores[score] for score in result.scores} == pytest.approx(result.scores)
    by_kind = scores.get("by_kind", {})
    assert by_kind.keys() == result.by_kind.keys()
    for kind, kind_scores in result.by_kind.items():
        assert {score: by_kind[kind][score] for score in kind_scores} == pytest.approx(kind_scores)


def assert_page(page: str, protocol: str, result: ProtocolResult) -> None:
    """Assert that the tables of scores and of answers show a result."""
    header, *rows = table(page, "scores")
    (row,) = [row for row in rows if row[0].rstrip("*") == protocol]
    cells = dict(zip(header, row, strict=True))
    shown_scores = result.scores.keys() & cells.keys()
    assert shown_scores
    for score in shown_scores:
        assert cells[score] == f"{100 * result.scores[score]:.1f}", score

    exact_matches = {kind: scores["exact_match"] for kind, scores in result.by_kind.items() if "exact_match" in scores}
    if exact_matches:
        header, _, *rows = table(page, f"{protocol.replace('/', '-')}-answers")
        column = header.index("exact match")
        assert {row[0]: row[column] for row in rows} == {
            kind: f"{100 * share:.1f}" for kind, share in exact_matches.items()
        }
