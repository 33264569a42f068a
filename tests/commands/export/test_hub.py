"""A shared folder does without the project what the project does with the checkpoint."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.commands.export.folder import export_hub
from m3diff.commands.export.run import Run, Trace
from m3diff.images.open import load_image
from m3diff.models.checkpoint import load_model, verify_manifest
from m3diff.models.generation import QUESTION
from m3diff.records.errors import DataError
from m3diff.records.files import sha256
from m3diff.records.schemas import RECORD_SCHEMA
from tests.layouts import make_entry
from tests.tiny import BASE, MDP, colour_image, tiny_base, tiny_checkpoint, tiny_settings
from tests.toy import REPOSITORY

HERE = Path(__file__).parent
OTHER_QUESTION = "Which object is new?"
PAIRS = 4
EMBEDDED = str(REPOSITORY / "profiles/embedded.yaml")
MODULE = MDP | {"init_gain": 1.0}  # so that a tiny model says other tokens of images that are swapped
SHA256 = ("before_sha256", "after_sha256")
PROCESSING_FILES = ("called.py", "images.py", "processing.py", "processing_m3diff.py")
MAX_NEW_TOKENS = 8  # as use_hub.py asks for


@dataclass(frozen=True)
class Shared:
    """A run, its model as a folder to share, and the test pairs."""

    run: Run
    folder: Path
    pairs: list[tuple[str, str]]


def untraced() -> Trace:
    raise DataError("dvc.lock: no such file, so nothing was trained yet; run `dvc repro` first")


def make_run(root: Path, mdp: Mapping[str, Any] | None = MODULE) -> Run:
    """What the stages leave of an M3Diff."""
    base = tiny_base(root / "base", seed=2)
    return run_of(root, base, tiny_settings(None if mdp is None else dict(mdp)))


def run_of(root: Path, base: Path, settings: Any) -> Run:
    """What the stages leave: a checkpoint, a mixture's report, records of test pairs and their predictions."""
    tiny_checkpoint(base, root / "model" / "checkpoint", settings)
    rows = [record(root / "images", number) for number in range(PAIRS)]
    (root / "clean").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=RECORD_SCHEMA), root / "clean" / "records.parquet")
    counts = {"pairs": {"train": 7, "val": 1, "test": PAIRS}, "samples": {"train": 1_234, "val": 1, "test": PAIRS}}
    write_json(root / "mixture" / "report.json", {"datasets": {"toy": counts}})
    run = Run(
        entries={"toy": make_entry("pairs", root)},
        base=base,
        max_new_tokens=MAX_NEW_TOKENS,
        mixture=root / "mixture",
        clean=root / "clean",
        model=root / "model",
        predictions=root / "predictions",
        report=root / "report",
        trace=untraced,
    )
    said = texts(run, wanted(run, [(row["before"], row["after"]) for row in rows], QUESTION))
    predictions = [{"image_id": row["id"], "caption": text} for row, text in zip(rows, said, strict=True)]
    write_json(run.predictions / "predictions.json", predictions)
    return run


def record(images: Path, number: int) -> dict[str, Any]:
    """A test pair; the first has no change."""
    images.mkdir(exist_ok=True)
    paths = [images / f"{number}{side}.png" for side in "ab"]
    for place, path in enumerate(paths):
        colour_image(20 * number + place, (40, 30 + number)).save(path)
    made = {"id": f"toy/{number}", "dataset": "toy", "split": "test", "references": [f"reference {number}"]}
    made |= dict(zip(SHA256, (bytes.fromhex(sha256(path)) for path in paths), strict=True))
    return made | {"before": str(paths[0]), "after": str(paths[1]), "change_types": ["color" if number else "none"]}


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def wanted(run: Run, pairs: list[tuple[str, str]], question: str) -> list[list[int]]:
    """The project's own tokens of each pair, one pair at a time."""
    model, family = load_model(run.model / "checkpoint")
    processor = family.load_processor(run.model / "checkpoint")
    decoding = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "eos_token_id": processor.end_id}
    decoding |= {"pad_token_id": processor.pad_id}
    found = []
    for before, after in pairs:
        prepared = [processor.prepare_image(load_image(path)) for path in (before, after)]
        inputs = {**processor.prompt_inputs([question]), **processor.image_inputs(torch.from_numpy(np.stack(prepared)))}
        with torch.inference_mode():
            tokens, _ = family.generate(model, inputs, False, decoding)
        found.append([token for token in tokens[0].tolist() if token != processor.pad_id])
    return found


def texts(run: Run, tokens: list[list[int]]) -> list[str]:
    _, family = load_model(run.model / "checkpoint")
    tokenizer = family.load_processor(run.model / "checkpoint").tokenizer
    return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in tokens]


def bare(tmp: Path, script: Path, *arguments: str | Path, cwd: Path | None = None) -> str:
    """What a script prints in an environment without the project and its packages (see bare.py)."""
    left_out = ("PYTHONPATH", "PYTEST_CURRENT_TEST")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HF_HOME": str(tmp / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(HERE / "bare.py"), str(script), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd or tmp, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask(tmp: Path, requests: list[dict[str, Any]]) -> dict[str, Any]:
    write_json(tmp / "requests.json", requests)
    bare(tmp, HERE / "use_hub.py", tmp / "requests.json", tmp / "answers.json")
    return json.loads((tmp / "answers.json").read_text())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    root = tmp_path_factory.mktemp("run")
    run = make_run(root)
    assert export_hub(run, root / "out" / "tiny-model") == []
    pairs = [(str(root / "images" / f"{n}a.png"), str(root / "images" / f"{n}b.png")) for n in range(PAIRS)]
    return Shared(run, root / "out" / "tiny-model", pairs)


def chat(images: Sequence[str], question: str) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


@pytest.fixture(scope="module")
def answers(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What the folder answers in a bare environment, by the name of the request."""
    tmp = tmp_path_factory.mktemp("bare")
    folder, pairs = str(shared.folder), shared.pairs
    without = shutil.copytree(shared.folder, tmp / "without-a-weight")
    weights = load_file(without / "model.safetensors")
    del weights[next(name for name in weights if "mdp" in name)]
    save_file(weights, without / "model.safetensors", {"format": "pt"})
    requests: dict[str, dict[str, Any]] = {
        "one": {"images": pairs[0]},
        "all": {"images": pairs},
        "all, asked": {"images": pairs, "text": OTHER_QUESTION},
        "each asked": {"images": pairs, "text": [QUESTION, OTHER_QUESTION, OTHER_QUESTION, QUESTION]},
        "swapped": {"images": [pair[::-1] for pair in pairs], "return_tensors": "pt"},
        "three images": {"images": [*pairs[0], pairs[1][0]]},
        "no images": {"images": []},
        "two questions": {"images": pairs, "text": [QUESTION, QUESTION]},
        "a prompt": {"images": pairs[0], "text": "<image><image>What changed?"},
        "numpy": {"images": pairs[0], "return_tensors": "np"},
        "stock": {"load": "LlavaOnevisionForConditionalGeneration"},
        "stock, no head": {"load": "LlavaOnevisionModel"},
        "untrusted": {"load": "AutoModelForImageTextToText"},
        "options that change nothing": {"images": pairs[0], "videos": None, "padding": True, "truncation": False},
        "padded to a length": {"images": pairs[0], "padding": "max_length"},
        "a video": {"images": pairs[0], "videos": ["a.mp4"]},
        "tensors": {"images": pairs[0], "tensors": True},
        "a chat": {"chat": chat(pairs[0], OTHER_QUESTION)},
        "chats": {"chat": [chat(pair, OTHER_QUESTION) for pair in pairs]},
        "a pipeline": {"pipeline": chat(pairs[0], OTHER_QUESTION)},
        "a system's message": {"chat": [{"role": "system", "content": "Be brief."}, *chat(pairs[0], QUESTION)]},
        "a chat about one image": {"chat": chat(pairs[0][:1], QUESTION)},
        "saved": {"save": str(tmp / "again")},
        "saved in parts": {"save": str(tmp / "parts"), "options": {"max_shard_size": "50KB"}},
        "saved, all": {"folder": str(tmp / "again"), "images": pairs},
        "without a weight": {"folder": str(without), "images": pairs},
    }
    told = ask(tmp, [{"folder": folder} | request for request in requests.values()])
    assert told["missing"] == ["m3diff", "peft", "ray", "mlflow", "pyarrow"]
    return dict(zip(requests, told["answers"], strict=True), at=tmp).__getitem__


@pytest.mark.slow(20)
def test_without_the_project_the_tokens_are_the_projects(shared: Shared, answers: Callable[[str], Any]) -> None:
    want = wanted(shared.run, shared.pairs, QUESTION)
    assert answers("all") == {"tokens": want}
    assert answers("one") == {"tokens": want[:1]}
    assert len({tuple(row) for row in want}) > 1, "tokens that are all alike would show no order"


def test_a_question_is_asked_as_the_project_asks_it(shared: Shared, answers: Callable[[str], Any]) -> None:
    default, other = (wanted(shared.run, shared.pairs, question) for question in (QUESTION, OTHER_QUESTION))
    assert default != other
    assert answers("all, asked") == {"tokens": other}
    assert answers("each asked") == {"tokens": [default[0], other[1], other[2], default[3]]}


def test_the_calls_of_the_cards_tag_are_answered_as_the_projects(shared: Shared, answers: Callable[[str], Any]) -> None:
    want = wanted(shared.run, shared.pairs, OTHER_QUESTION)
    assert yaml.safe_load((shared.folder / "README.md").read_text().split("---\n")[1])["pipeline_tag"]
    assert answers("a chat") == {"tokens": want[:1]}
    assert answers("chats") == {"tokens": want}
    assert answers("a pipeline")["generated_text"].strip() == texts(shared.run, want)[0]
    assert answers("options that change nothing") == answers("tensors") == answers("one")


def test_the_project_reads_what_transformers_saved_again(
    shared: Shared, answers: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    said = {}
    for folder in (shared.folder, answers("at") / "again", answers("at") / "parts"):
        assert main(["--params", EMBEDDED, "caption", *shared.pairs[0], "--model", str(folder)]) == 0
        said[folder.name] = capsys.readouterr().out
    assert len(set(said.values())) == 1
    assert len(list((answers("at") / "parts").glob("*.safetensors"))) > 1
    next((answers("at") / "parts").glob("*.safetensors")).unlink()
    assert main(["--params", EMBEDDED, "caption", *shared.pairs[0], "--model", str(folder)]) == DATA_REFUSED
    assert "parts" in capsys.readouterr().err


def test_the_first_image_is_the_one_before(shared: Shared, answers: Callable[[str], Any]) -> None:
    swapped = wanted(shared.run, [pair[::-1] for pair in shared.pairs], QUESTION)
    assert answers("swapped") == {"tokens": swapped}
    assert answers("swapped") != answers("all")


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ("three images", "ValueError: images: one pair [before, after] or a list of such pairs; found a list of 3"),
        ("no images", "ValueError: images: one pair [before, after] or a list of such pairs; found list"),
        ("two questions", "ValueError: text: one question, or one for each pair; found 2 for 4 pairs"),
        ("a prompt", "ValueError: text: the question alone, without special tokens"),
        ("numpy", "ValueError: return_tensors: 'np'; the model takes PyTorch tensors: 'pt'"),
        ("padded to a length", "ValueError: padding: 'max_length'; leave it out"),
        ("a video", "ValueError: videos: ['a.mp4']; leave it out"),
        ("a system's message", "ValueError: text: .*apply_chat_template.* one turn of the user with two images"),
        ("a chat about one image", "ValueError: images: one pair [before, after]"),
        ("stock", "'vision_feature_select_strategy' expected one of ('default', 'full'), got mdp"),
        ("stock, no head", "'vision_feature_select_strategy' expected one of ('default', 'full'), got mdp"),
        ("untrusted", "trust_remote_code=True"),
        ("without a weight", "ValueError: .*1 weights are missing or of another shape, so it is no LLaVA-OneVision"),
    ],
)
def test_what_cannot_be_right_is_refused(request_: str, told: str, answers: Callable[[str], Any]) -> None:
    error = answers(request_)["error"]
    assert re.search(told, error) if ".*" in told else told in error


def test_what_was_loaded_is_saved_with_its_code_and_loads_again(answers: Callable[[str], Any]) -> None:
    assert answers("saved") == {}
    assert answers("saved, all") == answers("all")


@pytest.mark.slow(20)
def test_a_model_without_a_module_is_shared_too(tmp_path: Path) -> None:
    run = make_run(tmp_path, mdp=None)
    export_hub(run, tmp_path / "control")
    pairs = [(str(tmp_path / "images" / f"{n}a.png"), str(tmp_path / "images" / f"{n}b.png")) for n in range(PAIRS)]
    requests = [{"folder": str(tmp_path / "control"), "images": pairs, "text": text} for text in (None, OTHER_QUESTION)]
    found = ask(tmp_path, requests)["answers"]
    assert sorted(path.name for path in (tmp_path / "control").glob("*.py")) == list(PROCESSING_FILES)
    assert found == [{"tokens": wanted(run, pairs, question)} for question in (QUESTION, OTHER_QUESTION)]


@pytest.mark.slow(15)
def test_the_code_of_the_card_runs_as_it_stands(shared: Shared, tmp_path: Path) -> None:
    card = (shared.folder / "README.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    (tmp_path / "block.py").write_text(block)
    said = bare(tmp_path, tmp_path / "block.py", cwd=shared.folder.parent).splitlines()
    predicted = {row["image_id"]: row["caption"] for row in read_json(shared.run.predictions / "predictions.json")}
    before, after = shared.pairs[1]
    swapped = texts(shared.run, wanted(shared.run, [(after, before)], QUESTION))
    assert said == [predicted["toy/1"], predicted["toy/1"], *swapped]
    assert f'The model, in the run\'s predictions: "{predicted["toy/1"]}"' in card


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_folder_has_the_checkpoints_weights_and_a_hash_of_every_file(shared: Shared) -> None:
    files = verify_manifest(shared.folder)["files"]
    assert set(files) == {path.name for path in shared.folder.iterdir()} - {"manifest.json"}
    checkpoint = read_json(shared.run.model / "checkpoint" / "manifest.json")["files"]
    assert files["model.safetensors"] == checkpoint["model.safetensors"]
    assert not [path for path in shared.folder.iterdir() if str(REPOSITORY) in path.read_bytes().decode("latin-1")]


def test_the_project_reads_the_folder_as_it_reads_a_checkpoint(shared: Shared) -> None:
    moved = replace(shared.run, model=shared.folder.parent / "model")
    shutil.copytree(shared.folder, moved.model / "checkpoint")
    assert wanted(moved, shared.pairs[:1], QUESTION) == wanted(shared.run, shared.pairs[:1], QUESTION)


def card_of(run: Run, out: Path, allow_unlicensed: bool = False) -> tuple[dict[str, Any], str]:
    """Front matter and text of a run's card."""
    export_hub(run, out, allow_unlicensed)
    _, front, text = (out / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


LINEAGE = {
    "dvc.data": "d" * 32 + ".dir", "dvc.val_data": "v" * 32 + ".dir", "dvc.checkpoint": "c" * 32 + ".dir",
    "dvc.code": "e" * 32 + ".dir", "predict.max_new_tokens": "8", "dvc.base": "b" * 32 + ".dir",
    "base.sha256": "0" * 64, "dvc.metrics": "m" * 32, "dvc.lock.sha256": "1" * 64, "test_set.sha256": "2" * 64,
    "git.commit": "3" * 40, "git.dirty": "true", "dvc.raw.toy": "f" * 32 + ".dir",
}  # fmt: skip


def test_without_a_report_and_a_lock_the_card_says_so(shared: Shared) -> None:
    _, front, text = (shared.folder / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == "image-text-to-text"
    assert "None: no report of an evaluation lay beside the model" in text
    assert text.count("dvc.lock: no such file, so nothing was trained yet") == 2
    assert "| `toy` | " in text
    assert "7 / 1 / 4 | 1,234 |" in text
    assert "base_model" not in front


def test_the_card_has_scores_with_intervals_recipe_and_lineage(shared: Shared, tmp_path: Path) -> None:
    protocol = {"pairs": 4, "published_pairs": 9, "CIDEr": 1.5, "SPICE": None, "absent": {"SPICE": "needs a jar"}}
    protocol |= {"intervals": {"CIDEr": {"low": 1.25, "high": 1.75}}, "change_exact_accuracy": 0.5}
    protocol |= {"by_type": {"color": {"pairs": 2, "exact_accuracy": 0.5}, "size": {"pairs": 0}}}
    write_json(tmp_path / "report" / "metrics.json", {"protocols": {"toy/total": protocol, "toy/rest": protocol}})
    trace = Trace(LINEAGE, {"train": {"model": "mine", "seed": 7}, "models.mine": {"lora": {"rank": 2}}, "predict": {}})
    run = replace(shared.run, report=tmp_path / "report", trace=lambda: trace)
    _, text = card_of(run, tmp_path / "out")
    assert "|  | `toy/total` |\n|---|---|\n| pairs | 4 of 9 that papers score |" in text
    assert "| CIDEr | 150.0 (125.0 to 175.0) |\n" in text
    assert "| color | 50 % of 2 |\n| size | – |\n" in text
    assert "SPICE is not there: needs a jar" in text
    recipe = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])
    assert recipe == {"train": {"model": "mine", "seed": 7}, "models.mine": {"lora": {"rank": 2}}}
    for tag in ("dvc.data", "dvc.checkpoint", "git.commit", "dvc.raw.toy", "test_set.sha256"):
        assert f"`{LINEAGE[tag]}`" in text
    assert "changes that were not committed" in text
    assert "is not recorded" not in text


def test_scores_that_no_lock_ties_to_the_weights_are_said_to_be_so(shared: Shared, tmp_path: Path) -> None:
    protocol = {"pairs": 4, "published_pairs": None, "CIDEr": 1.5, "intervals": {}, "absent": {}}
    write_json(tmp_path / "report" / "metrics.json", {"protocols": {"toy/total": protocol}})
    _, text = card_of(replace(shared.run, report=tmp_path / "report"), tmp_path / "out")
    assert "**That these scores are of these weights is not recorded:** dvc.lock" in text
    assert "| CIDEr | 150.0 |" in text


def test_a_model_of_data_without_a_licence_is_shared_when_asked_for_alone(shared: Shared, tmp_path: Path) -> None:
    run = replace(shared.run, entries={"toy": make_entry("spot_the_diff", tmp_path)})
    with pytest.raises(DataError, match=r"Spot-the-Diff \(licence: none stated\): redistribute: .* --allow-unlicensed"):
        export_hub(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    notices = export_hub(run, tmp_path / "out", allow_unlicensed=True)
    assert [notice.partition(":")[0] for notice in notices] == ["toy", "toy"]
    text = (tmp_path / "out" / "README.md").read_text()
    assert "license: other" in text
    assert "not stated: its repository or page states no licence" in text
    assert not list((tmp_path / "out").glob("example_*")), "no image that may not be passed on"


def test_a_dataset_that_is_only_tested_needs_no_licence_to_share_the_model(shared: Shared, tmp_path: Path) -> None:
    counts = {"pairs": {"train": 0, "val": 0, "test": 4}, "samples": {"train": 0, "val": 0, "test": 4}}
    trained = read_json(shared.run.mixture / "report.json")["datasets"]["toy"]
    write_json(tmp_path / "mixture" / "report.json", {"datasets": {"toy": trained, "spot": counts}})
    entries = shared.run.entries | {"spot": make_entry("spot_the_diff", tmp_path)}
    _, text = card_of(replace(shared.run, entries=entries, mixture=tmp_path / "mixture"), tmp_path / "out")
    assert "| `spot` | Spot-the-Diff" in text
    assert ", tested only |" in text


def test_a_known_base_is_named(shared: Shared, tmp_path: Path) -> None:
    run = replace(shared.run, base=Path("models/llava-onevision-qwen2-7b-ov-hf"))
    front, text = card_of(run, tmp_path / "out")
    assert front["base_model"] == "llava-hf/llava-onevision-qwen2-7b-ov-hf"


def test_what_is_missing_is_named_before_anything_is_written(shared: Shared, tmp_path: Path) -> None:
    faults = {
        "out: exists": (shared.run, shared.folder),
        "run `m3diff convert` first": (replace(shared.run, mixture=tmp_path), tmp_path / "out"),
        "in the mixture, but not in ingest.datasets": (replace(shared.run, entries={}), tmp_path / "out"),
        "no manifest.json": (replace(shared.run, model=tmp_path), tmp_path / "out"),
    }
    for told, (run, out) in faults.items():
        with pytest.raises(DataError, match=told.partition(": ")[2] or told):
            export_hub(run, out)
    assert list(tmp_path.iterdir()) == []


def test_an_example_that_changed_since_ingest_is_refused(shared: Shared, tmp_path: Path) -> None:
    table = pq.read_table(shared.run.clean / "records.parquet").to_pylist()
    for row in table:
        row["after_sha256"] = bytes(32)
    (tmp_path / "clean").mkdir()
    pq.write_table(pa.Table.from_pylist(table, schema=RECORD_SCHEMA), tmp_path / "clean" / "records.parquet")
    with pytest.raises(DataError, match="1b.png: missing or changed since ingest"):
        export_hub(replace(shared.run, clean=tmp_path / "clean"), tmp_path / "out")


@pytest.mark.slow(40)
def test_a_hundred_drawn_pairs_have_the_projects_tokens(tmp_path: Path) -> None:
    """With the embedded base, whose captions are sentences, and a module that has moved."""
    from m3diff.datasets.minichange.levels import LEVELS
    from m3diff.datasets.minichange.render import render

    run = make_run(tmp_path)
    shutil.rmtree(run.model)
    settings = tiny_settings({"vision_feature_layers": [4], "layers": 2, "heads": 4, "init_gain": 1.0})
    tiny_checkpoint(BASE, run.model / "checkpoint", settings)
    pairs = []
    for number in range(100):
        rng = np.random.default_rng(number)
        scenes = LEVELS[("grid", "free")[number % 2]].sample_pair(rng, ("color",))
        paths = [tmp_path / "images" / f"drawn{number}{side}.png" for side in "ab"]
        for path, scene in zip(paths, scenes, strict=False):
            render(scene, 128, rng).save(path)
        pairs.append((str(paths[0]), str(paths[1])))
    export_hub(run, tmp_path / "out")
    requests = [{"folder": str(tmp_path / "out"), "images": pairs[k : k + 20]} for k in range(0, 100, 20)]
    found = [row for each in ask(tmp_path, requests)["answers"] for row in each["tokens"]]
    want = wanted(run, pairs, QUESTION)
    assert len(found) == 100
    assert found == want
    assert len({tuple(row) for row in want}) > 10
