"""A shared folder does without the project what the project does with the checkpoint, for every family."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load, load_file, save, save_file

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.commands import export
from m3diff.commands.export import SHARED, export_hub, export_llava
from m3diff.images.open import load_image
from m3diff.models.checkpoint import MANIFEST, export_checkpoint, load_model, read_manifest, verify_manifest
from m3diff.models.generation import QUESTION
from m3diff.records.errors import DataError
from m3diff.records.files import sha256
from m3diff.records.schemas import RECORD_SCHEMA
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from m3diff.stages.convert import stage
from tests.layouts import make_entry
from tests.models.llava15 import write_llava15
from tests.stages.convert.test_convert import record as clean
from tests.stages.convert.test_convert import run as convert
from tests.tiny import BASE, MDP, SEPARATE, colour_image, onediff_settings, tiny_base, tiny_checkpoint, tiny_settings
from tests.tiny_blip2 import blip2_settings, tiny_blip2
from tests.toy import REPOSITORY

OTHER_QUESTION = "Which object is new?"
PAIRS = 4
EMBEDDED = REPOSITORY / "profiles/embedded.yaml"
MODULE = MDP | {"init_gain": 1.0}  # so that a tiny model says other tokens of images that are swapped
MAX_NEW_TOKENS = 8  # as use_hub.py asks for
CASES: dict[str, tuple[Any, Any]] = {
    "m3diff": (lambda folder: tiny_base(folder, seed=2), tiny_settings(MODULE)),
    "onediff on LLaVA-1.5": (write_llava15, onediff_settings(SEPARATE)),
    "onediff without a module on LLaVA-1.5": (write_llava15, onediff_settings(None)),
    "blip2idc with OPT": (tiny_blip2, blip2_settings()),
}


class Shared(NamedTuple):
    """A run, its model as a folder to share, and the test pairs."""

    name: str
    run: Params
    folder: Path
    pairs: list[tuple[str, str]]

    @property
    def family(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def reads_question(self) -> bool:
        return self.family != "blip2idc"

    @property
    def has_module(self) -> bool:
        return self.reads_question and "without" not in self.name


def changed(params: Params, section: str, **values: Any) -> Params:
    return params.model_copy(update={section: getattr(params, section).model_copy(update=values)})


def run_of(root: Path, base: Path, settings: Any) -> Params:
    """What the stages leave: a checkpoint, a mixture's report, records of test pairs and their predictions."""
    tiny_checkpoint(base, root / "model" / "checkpoint", settings)
    rows = [record(root / "images", number) for number in range(PAIRS)]
    write_records(root / "clean", rows)
    counts = {"pairs": {"train": 7, "val": 1, "test": PAIRS}, "samples": {"train": 1_234, "val": 1, "test": PAIRS}}
    write_json(root / "mixture" / "report.json", {"datasets": {"toy": counts}})
    places = {name: root / name for name in ("mixture", "clean", "model", "predictions", "report")}
    run = changed(load_params(EMBEDDED), "ingest", datasets={"toy": make_entry("pairs", root)})
    run = changed(changed(run, "train", base=base), "predict", max_new_tokens=MAX_NEW_TOKENS)
    run = changed(run, "paths", **places)
    said = texts(run, wanted(run, [(row["before"], row["after"]) for row in rows], QUESTION))
    predictions = [{"image_id": row["id"], "caption": text} for row, text in zip(rows, said, strict=True)]
    write_json(root / "predictions" / "predictions.json", predictions)
    return run


def record(images: Path, number: int) -> dict[str, Any]:
    """A test pair; the first has no change."""
    images.mkdir(exist_ok=True)
    made: dict[str, Any] = {"id": f"toy/{number}", "dataset": "toy", "split": "test"}
    for place, side in enumerate(("before", "after")):
        path = images / f"{number}{'ab'[place]}.png"
        colour_image(20 * number + place, (40, 30 + number)).save(path)
        made |= {side: str(path), f"{side}_sha256": bytes.fromhex(sha256(path))}
    return made | {"references": [f"reference {number}"], "change_types": ["color" if number else "none"]}


def write_records(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, schema=RECORD_SCHEMA), folder / "records.parquet")


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


@cache
def trained(checkpoint: Path) -> tuple[Any, Any]:
    model, family = load_model(checkpoint)
    return model, family.load_processor(checkpoint)


def wanted(run: Params, pairs: list[tuple[str, str]], question: str) -> list[list[int]]:
    """The project's own tokens of each pair, one pair at a time."""
    model, processor = trained(run.paths.model / "checkpoint")
    decoding = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "eos_token_id": processor.end_id}
    decoding |= {"pad_token_id": processor.pad_id}
    found = []
    for before, after in pairs:
        prepared = [processor.prepare_image(load_image(path)) for path in (before, after)]
        inputs = {**processor.prompt_inputs([question]), **processor.image_inputs(torch.from_numpy(np.stack(prepared)))}
        with torch.inference_mode():
            tokens = model.generate(**inputs, **decoding)[0, inputs["input_ids"].shape[1] :]
        found.append([token for token in tokens.tolist() if token != processor.pad_id])
    return found


def texts(run: Params, tokens: list[list[int]]) -> list[str]:
    tokenizer = trained(run.paths.model / "checkpoint")[1].tokenizer
    return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in tokens]


def without_a_weight(folder: Path, part: str) -> Path:
    weights = load_file(folder / "model.safetensors")
    del weights[next(name for name in weights if part in name)]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def ask(tmp: Path, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What folders answer in an environment without the project and its packages (see use_hub.py)."""
    write_json(tmp / "requests.json", requests)
    left_out = ("PYTHONPATH", "PYTEST_CURRENT_TEST")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HF_HOME": str(tmp / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("use_hub.py")
    command = [sys.executable, "-P", script, tmp / "requests.json", tmp / "answers.json"]
    done = subprocess.run(list(map(str, command)), cwd=tmp, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = read_json(tmp / "answers.json")
    assert {"m3diff", "peft", "ray", "mlflow", "pyarrow"} <= {*told["missing"]}
    return told["answers"]


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shared]:
    """The shared model of each case, where there is no dvc.lock."""
    found = {}
    for name, (write_base, settings) in CASES.items():
        root = tmp_path_factory.mktemp("run")
        run = run_of(root, write_base(root / "base"), settings)
        with pytest.MonkeyPatch.context() as elsewhere:
            elsewhere.chdir(root)
            assert export_hub(run, root / "out" / "tiny-model") == []
        pairs = [(str(root / "images" / f"{n}a.png"), str(root / "images" / f"{n}b.png")) for n in range(PAIRS)]
        found[name] = Shared(name, run, root / "out" / "tiny-model", pairs)
    return found


@pytest.fixture
def shared(every: dict[str, Shared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    monkeypatch.chdir(tmp_path)
    return every["m3diff"]


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, every: dict[str, Shared]) -> Shared:
    return every[request.param]


def chat(images: Any, question: str) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def requests_of(case: Shared, tmp: Path) -> dict[str, dict[str, Any]]:
    """What each folder is asked."""
    again = str(tmp / "again")
    block = tmp / "card.py"
    block.write_text(re.findall(r"```python\n(.*?)```", (case.folder / "README.md").read_text(), re.DOTALL)[0])
    found: dict[str, dict[str, Any]] = {
        "all": {"images": case.pairs},
        "all, asked": {"images": case.pairs, "text": OTHER_QUESTION},
        "swapped": {"images": [pair[::-1] for pair in case.pairs], "return_tensors": "pt"},
        "saved": {"save": again},
        "saved, all": {"folder": again, "images": case.pairs},
        "saved, prompt": {"folder": again, "prompt": case.pairs[0]},
        "chats": {"chat": [chat(pair, OTHER_QUESTION) for pair in case.pairs]},
        "card": {"run": str(block)},
    }
    if case.has_module:
        part = {"m3diff": "mdp", "onediff": "vdm"}[case.family]
        broken = without_a_weight(Path(shutil.copytree(case.folder, tmp / "broken")), part)
        found["without a weight"] = {"folder": str(broken), "images": case.pairs}
    if case.name != "m3diff":
        return found
    one, pairs = case.pairs[0], case.pairs
    return found | {
        "one": {"images": one},
        "each asked": {"images": pairs, "text": [QUESTION, OTHER_QUESTION, OTHER_QUESTION, QUESTION]},
        "options that change nothing": {"images": one, "videos": None, "padding": True, "truncation": False},
        "tensors": {"images": one, "tensors": True},
        "a chat": {"chat": chat(one, OTHER_QUESTION)},
        "a pipeline": {"pipeline": chat(one, OTHER_QUESTION)},
        **{name: asked(pairs) for name, (asked, _) in REFUSED.items()},
    }


PAIR, CHOICE = "ValueError: images: one pair [before, after]", "'vision_feature_select_strategy' expected one of"
REFUSED: dict[str, tuple[Any, str]] = {
    "three": (lambda pairs: {"images": [*pairs[0], pairs[1][0]]}, f"{PAIR} or a list of such pairs; found a list of 3"),
    "two questions": (lambda pairs: {"images": pairs, "text": [QUESTION] * 2}, "found 2 for 4 pairs"),
    "a prompt": (lambda pairs: {"images": pairs[0], "text": "<image>What?"}, "text: the question alone"),
    "numpy": (lambda pairs: {"images": pairs[0], "return_tensors": "np"}, "return_tensors: 'np'; the model takes PyT"),
    "a video": (lambda pairs: {"images": pairs[0], "videos": ["a.mp4"]}, "videos: ['a.mp4']; leave it out"),
    "a system's message": (
        lambda pairs: {"chat": [{"role": "system", "content": "Be brief."}, *chat(pairs[0], QUESTION)]},
        "`apply_chat_template` makes of one turn of the user with two images",
    ),
    "a chat about one image": (lambda pairs: {"chat": chat(pairs[0][:1], QUESTION)}, PAIR),
    "stock": (lambda pairs: {"load": "LlavaOnevisionForConditionalGeneration"}, f"{CHOICE} ('default', 'full'), got m"),
    "untrusted": (lambda pairs: {"load": "AutoModelForImageTextToText"}, "trust_remote_code=True"),
}
"""What an M3Diff's folder refuses, made of the pairs, and a part of the error."""


@pytest.fixture(scope="module")
def answers(every: dict[str, Shared], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each folder answers in a bare environment, by the name of the request."""
    tmp = tmp_path_factory.mktemp("bare")
    asked = []
    for name, case in every.items():
        (tmp / name).mkdir()
        requests = requests_of(case, tmp / name)
        asked += [(name, request, {"folder": str(case.folder)} | content) for request, content in requests.items()]
    found: dict[str, dict[str, Any]] = {name: {"at": tmp / name} for name in every}
    for (name, request, _), answer in zip(asked, ask(tmp, [content for *_, content in asked]), strict=True):
        found[name][request] = answer
    return found


def test_without_the_project_the_tokens_are_the_projects_and_the_code_of_the_card_runs_as_it_stands(case, answers):
    told, want = answers[case.name], wanted(case.run, case.pairs, QUESTION)
    assert told["all"] == told["saved, all"] == {"tokens": want}
    assert told["saved"] == {}
    assert len({tuple(row) for row in want}) > 1, "tokens that are all alike would show no order"
    assert told["swapped"] == {"tokens": wanted(case.run, [pair[::-1] for pair in case.pairs], QUESTION)}
    assert told["swapped"] != told["all"], "the order must show"
    known = trained(case.run.paths.model / "checkpoint")[1]
    of_pairs = ["batch_num_images", "image_sizes"] if case.has_module else []
    assert told["saved, prompt"]["input_ids"] == known.prompt_inputs([QUESTION])["input_ids"].tolist()
    assert told["saved, prompt"]["inputs"] == sorted(["attention_mask", "input_ids", "pixel_values", *of_pairs])
    if case.reads_question:
        other = {"tokens": wanted(case.run, case.pairs, OTHER_QUESTION)}
        assert told["all, asked"] == told["chats"] == other
    else:
        assert "ValueError: text: BLIP2IDC reads no question" in told["all, asked"]["error"]
    if case.has_module:
        assert "1 weights are missing or of another shape, so it is no LLaVA" in told["without a weight"]["error"]
    predictions = read_json(case.run.paths.predictions / "predictions.json")
    predicted = {row["image_id"]: row["caption"] for row in predictions}
    swapped = texts(case.run, wanted(case.run, [case.pairs[1][::-1]], QUESTION))
    assert told["card"] == {"said": [predicted["toy/1"], predicted["toy/1"], *swapped]}
    assert f'The model, in the run\'s predictions: "{predicted["toy/1"]}"' in (case.folder / "README.md").read_text()


def test_each_way_of_asking_is_answered_as_the_project_asks_and_what_cannot_be_right_is_refused(shared, answers):
    told = answers["m3diff"]
    default, other = (wanted(shared.run, shared.pairs, question) for question in (QUESTION, OTHER_QUESTION))
    assert default != other
    assert told["each asked"] == {"tokens": [default[0], other[1], other[2], default[3]]}
    assert told["one"] == told["options that change nothing"] == told["tensors"] == {"tokens": default[:1]}
    assert told["a chat"] == {"tokens": other[:1]}
    assert told["a pipeline"]["generated_text"].strip() == texts(shared.run, other)[0]
    for name, (_, error) in REFUSED.items():
        assert error in told[name]["error"], name


def test_the_folder_is_the_checkpoints_weights_the_familys_code_and_a_card_of_it(case: Shared) -> None:
    files = verify_manifest(case.folder)["files"]
    assert set(files) == {path.name for path in case.folder.iterdir()} - {"manifest.json"}
    checkpoint = read_json(case.run.paths.model / "checkpoint" / "manifest.json")["files"]
    weights = [name for name in files if name.endswith(".safetensors")]
    assert weights
    assert all(files[name] == checkpoint[name] for name in weights)
    assert not [path for path in case.folder.iterdir() if str(REPOSITORY) in path.read_bytes().decode("latin-1")]
    config, code = read_json(case.folder / "config.json"), {path.stem for path in case.folder.glob("*.py")}
    own = {"images", "colour", "jpeg", "contents", "errors", "called", "processing", f"processing_{case.family}"}
    if case.has_module:
        own |= {"settings", "layers", "llava", f"{case.family}_model"}
        assert config["auto_map"]["AutoConfig"] == f"{case.family}_model.{SHARED[case.family].title}Config"
    else:
        own |= {"layers", "blip2idc_model"} if case.family == "blip2idc" else set()
        assert "auto_map" not in config
    assert code == own
    front, text = card_of(case.folder)
    paper = {"m3diff": "2503.11093", "onediff": "2407.05645", "blip2idc": "2412.15939"}[case.family]
    assert re.findall(r"note = {arXiv:(.*)}", text) == [paper]
    assert ("a control without that module" in text) == ("without" in case.name)
    assert ("pipeline_tag" in front) == case.reads_question
    assert ("own classes refuse this folder" in text) == case.has_module


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Front matter and text of a folder's card."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


TAGS = "dvc.data dvc.val_data dvc.checkpoint dvc.code dvc.base dvc.metrics dvc.raw.toy git.commit dvc.lock.sha256"
LINEAGE = {tag: f"{number}" * 32 for number, tag in enumerate([*TAGS.split(), "test_set.sha256"])}
RAN = {"train": {"model": "mine", "seed": 7}, "models.mine": {"lora": {"rank": 2}}, "predict": {}}


def test_the_card_has_scores_recipe_lineage_and_base_or_says_that_there_are_none(shared, tmp_path, monkeypatch):
    front, text = card_of(shared.folder)
    assert "None: no report of an evaluation lay beside the model" in text
    assert "7 / 1 / 4 | 1,234 |" in text
    assert "base_model" not in front
    protocol = {"pairs": 4, "published_pairs": 9, "CIDEr": 1.5, "SPICE": None, "absent": {"SPICE": "needs a jar"}}
    protocol |= {"intervals": {"CIDEr": {"low": 1.25, "high": 1.75}}, "change_exact_accuracy": 0.5}
    scores = {"toy/total": protocol, "toy/rest": protocol | {"CIDEr": 9.9}, "other/all": {"pairs": 1000}}
    scores["other/all"] |= {"intervals": {}, "METEOR": 0.25}
    write_json(tmp_path / "report" / "metrics.json", {"protocols": scores})
    known = Path("models/llava-onevision-qwen2-7b-ov-hf")
    run = changed(changed(shared.run, "paths", report=tmp_path / "report"), "train", base=known)
    export_hub(run, tmp_path / "untraced")
    _, text = card_of(tmp_path / "untraced")
    assert "**That these scores are of these weights is not recorded:** dvc.lock" in text
    monkeypatch.setattr(export, "Lock", lambda: SimpleNamespace(params=lambda datasets: RAN))
    monkeypatch.setattr("m3diff.registry.lineage.read_lineage", lambda *given: LINEAGE | {"git.dirty": "true"})
    export_hub(run, tmp_path / "out")
    front, text = card_of(tmp_path / "out")
    assert front["base_model"] == f"llava-hf/{known.name}"
    assert "| pairs | 4 of 9 that papers score | 1,000 |\n" in text
    assert "| CIDEr | 150.0 (125.0 to 175.0) | – |\n| METEOR | – | 25.0 |\n" in text
    recipe = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])
    assert recipe == {name: RAN[name] for name in ("train", "models.mine")}
    assert [text.count(f"| `{digest}` |") for digest in LINEAGE.values()] == [1] * len(LINEAGE)
    assert "is not recorded" not in text


def test_a_model_of_data_without_a_licence_is_shared_when_asked_for_or_where_these_are_only_tested(shared, tmp_path):
    spot = make_entry("spot_the_diff", tmp_path)
    run = changed(shared.run, "ingest", datasets={"toy": spot})
    with pytest.raises(DataError, match=r"Spot-the-Diff \(licence: none stated\): redistribute: .* --allow-unlicensed"):
        export_hub(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    notices = export_hub(run, tmp_path / "out", allow_unlicensed=True)
    assert [notice.partition(":")[0] for notice in notices] == ["toy", "toy"]
    assert card_of(tmp_path / "out")[0]["license"] == "other"
    assert not list((tmp_path / "out").glob("example_*")), "no image that may not be passed on"
    counts = {"pairs": {"train": 0, "val": 0, "test": 4}, "samples": {"train": 0, "val": 0, "test": 4}}
    toy = read_json(run.paths.mixture / "report.json")["datasets"]["toy"]
    write_json(tmp_path / "mixture" / "report.json", {"datasets": {"toy": toy, "spot": counts}})
    run = changed(shared.run, "ingest", datasets={**shared.run.ingest.datasets, "spot": spot})
    export_hub(changed(run, "paths", mixture=tmp_path / "mixture"), tmp_path / "tested")
    _, text = card_of(tmp_path / "tested")
    assert re.search(r"\| `spot` \| Spot-the-Diff.*, tested only \|", text)
    assert "Spot" not in re.findall("It was trained on (.*) alone", text)[0]


def test_what_is_missing_or_changed_is_named_before_anything_is_written(shared: Shared, tmp_path: Path) -> None:
    out, run = tmp_path / "out", shared.run
    rows = pq.read_table(run.paths.clean / "records.parquet").to_pylist()
    write_records(tmp_path / "clean", [row | {"after_sha256": bytes(32)} for row in rows])
    mine = Path(shutil.copytree(run.paths.model / "checkpoint", tmp_path / "model" / "checkpoint"))
    (mine / MANIFEST).write_text(json.dumps(read_manifest(mine) | {"family": "mine"}))
    for told, wrong, place in (
        ("exists", run, shared.folder),
        ("run `m3diff convert` first", changed(run, "paths", mixture=tmp_path), out),
        ("in the mixture, but not in ingest.datasets", changed(run, "ingest", datasets={}), out),
        ("no manifest.json", changed(run, "paths", model=tmp_path / "nothing"), out),
        ("1b.png: missing or changed since ingest", changed(run, "paths", clean=tmp_path / "clean"), out),
        ("of the family 'mine'; a folder to share is wr", changed(run, "paths", model=tmp_path / "model"), out),
    ):
        with pytest.raises(DataError, match=re.escape(told)):
            export_hub(wrong, place)
    assert not out.exists()


WEIGHTS, CONFIG = "model.safetensors", "config.json"
OTHERS = (".DS_Store", f"._{WEIGHTS}", ".git/index", ".cache/huggingface/a.json", "notes.txt")
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def root(every: dict[str, Shared]) -> Path:
    """The run's folder with `merged`, copied out of it, `adapters` and their `base`, and two images."""
    run, root = every["m3diff"].run, every["m3diff"].folder.parents[1]
    for name in ("merged", "adapters"):
        export_checkpoint(run.paths.model / "checkpoint", root / name, adapters=name == "adapters")
    for name, seed in (("a.png", 1), ("b.png", 2)):
        colour_image(seed).save(root / name)
    return root


@pytest.fixture
def caption(root: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def caption(model: Path, *more: object) -> tuple[int, str, str]:
        params, images = str(REPOSITORY / "profiles/embedded.yaml"), [str(root / name) for name in ("a.png", "b.png")]
        code = main(["--params", params, "caption", *images, "--model", str(model), *map(str, more)])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return caption


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Edit:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def other(data: bytes) -> bytes:
    return save({name: weight + 1 for name, weight in load(data).items()}, {"format": "pt"})


def removed(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def pointer(name: str) -> Edit:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 193820\n"
    return rewritten(name, lambda _: text)


def config(**fields: object) -> Edit:
    """config.json with other fields, written in another order and layout."""
    return rewritten(CONFIG, lambda data: json.dumps(json.loads(data) | fields, indent=4, sort_keys=True).encode())


def with_others_files(folder: Path) -> None:
    for name in OTHERS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\0\5\26\7")


def with_windows_ends(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja", ".md", ".py"):
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def linked(folder: Path) -> None:
    """As the cache of a model hub: every file is a link to a blob."""
    folder.rename(folder.with_name("blobs"))
    folder.mkdir()
    for path in folder.with_name("blobs").iterdir():
        (folder / path.name).symlink_to(Path("..") / "blobs" / path.name)


LOADED: dict[str, list[Edit]] = {
    "what is not loaded edited": [
        *(rewritten(name, lambda data: data + b"\n") for name in ("README.md", "m3diff_model.py")),
        pointer("example_after.png"),
        with_others_files,
    ],
    "what is not loaded removed": [removed("README.md"), removed("layers.py"), removed("example_before.png")],
    "line ends of Windows": [with_windows_ends],
    "links of a cache": [linked],
    "config of a later transformers": [config(transformers_version="99.0.0", use_cache=True)],
    "tokenizer config written anew": [rewritten("tokenizer_config.json", lambda data: data + b"\n")],
}
AGAIN, PULL = "fetch it again from where it came", "git lfs pull"
UNLOADABLE: dict[str, tuple[list[Edit], str, str]] = {
    **{f"{name} a pointer": ([pointer(name)], name, PULL) for name in (WEIGHTS, CONFIG, MANIFEST)},
    "processor removed": ([removed("processor_config.json")], "processor_config.json", AGAIN),
    "other weights": ([rewritten(WEIGHTS, other)], WEIGHTS, AGAIN),
    "config cut off": ([rewritten(CONFIG, lambda _: b"{")], CONFIG, AGAIN),
    "tokenizer of nothing": ([rewritten("tokenizer.json", lambda _: b"{}")], "copied", "restore"),
    "config of another size": ([config(text_config={"hidden_size": 32})], "copied", "restore"),
    "no manifest": ([removed(MANIFEST)], MANIFEST, "m3diff export --hub"),
}


@pytest.mark.parametrize("name", [*LOADED, *UNLOADABLE])
def test_a_copy_may_be_edited_where_it_is_not_loaded_and_else_is_named_in_a_line(name, root, tmp_path, caption):
    copied = shutil.copytree(root / "out/tiny-model", tmp_path / "copied to é here" / "copied")
    edits, *told = UNLOADABLE.get(name, (LOADED.get(name), "", ""))
    for edit in edits:
        edit(copied)
    code, out, err = caption(copied)
    if name in LOADED:
        assert (code, out) == (0, caption(root / "merged")[1])
        return
    assert code == DATA_REFUSED
    said = err.splitlines()[-1]
    assert said.startswith("m3diff caption: ")
    assert all(text in said for text in (str(copied), *told)), said


def test_adapters_are_loaded_with_their_base_or_refused_in_a_line_that_says_how_they_can_be(root, tmp_path, caption):
    folder, base = shutil.copytree(root / "adapters", tmp_path / "a"), shutil.copytree(root / "base", tmp_path / "base")
    with_others_files(folder)
    (base / ".DS_Store").write_bytes(b"of macOS")
    assert caption(folder, "--base", base)[:2] == (0, caption(root / "merged")[1])
    third = shutil.copytree(root / "base", tmp_path / "third")
    pointer(WEIGHTS)(third)
    damaged = [shutil.copytree(root / "adapters", tmp_path / name) for name in ("pointer", "cut")]
    pointer("tuned.safetensors")(damaged[0])
    rewritten("lora/adapter_model.safetensors", lambda _: b"cut")(damaged[1])
    for model, base_given, told in (
        (folder, tmp_path, (str(tmp_path), "--base FOLDER")),
        (folder, BASE, (str(BASE), "--base FOLDER")),
        (folder, third, (str(third), PULL)),
        (folder / "lora", base, ("loaded by peft",)),
        (damaged[0], base, ("tuned.safetensors", PULL)),
        (damaged[1], base, ("adapter_model.safetensors", AGAIN)),
    ):
        code, _, said = caption(model, "--base", base_given)
        assert code == DATA_REFUSED
        assert all(text in said for text in told), said


# The form of LLaVA-NeXT

OWN = {"d": make_entry("pairs", Path())}


def build(folder: Path) -> Path:
    convert(folder, [clean("a", references=('say "hi"', "ünïcode → ok")), clean("b", "test", ("", "gone"))])
    return folder / "mixture"


def test_records_have_the_form_of_llava_next_and_empty_references_are_left_out(tmp_path):
    mixture, out = build(tmp_path), tmp_path / "llava"
    assert export_llava(OWN, mixture, out) == {"train": 2, "test": 1}
    found = {split: read_json(out / f"{split}.json") for split in ("train", "test")}
    first, _ = found["train"]
    assert first["image"] == first["images"] == ["a.png", "a_2.png"]
    assert [turn["from"] for turn in first["conversations"]] == ["human", "gpt"]
    assert first["conversations"][0]["value"].startswith("<image><image>\n")
    assert [each["conversations"][1]["value"] for each in found["train"]] == ['say "hi"', "ünïcode → ok"]
    assert first["metadata"] == {"dataset": "d", "split": "train"}
    assert [each["id"] for each in found["test"]] == ["d/b#1"]


def test_image_paths_are_absolute_where_asked_and_dataset_info_tells_llama_factory_the_columns(tmp_path, monkeypatch):
    mixture, out = build(tmp_path), tmp_path / "llava"
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    export_llava(OWN, mixture, out, absolute=True)
    (first, *_) = json.loads((out / "train.json").read_text("utf-8"))
    root = str(tmp_path / "project")
    assert first["image"] == first["images"] == [f"{root}/a.png", f"{root}/a_2.png"]
    info = json.loads((out / "dataset_info.json").read_text())
    columns = {"messages": "conversations", "images": "images"}
    assert list(info) == ["m3diff_train", "m3diff_test"]
    assert info["m3diff_train"] == {"file_name": "train.json", "formatting": "sharegpt", "columns": columns}


def test_every_record_of_every_shard_is_exported_in_order_and_a_split_may_be_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "SHARD_SAMPLES", 2)
    samples, _ = convert(
        tmp_path, [*(clean(str(n), references=("a", "b")) for n in range(4)), clean("e", "test", ("",))]
    )
    assert export_llava(OWN, tmp_path / "mixture", tmp_path / "llava") == {"train": 8, "test": 0}
    assert len(list((tmp_path / "mixture/train").iterdir())) == 4
    ids = [each["id"] for each in json.loads((tmp_path / "llava/train.json").read_text())]
    assert ids == [name for name in samples["id"] if not name.startswith("d/e")]
    assert json.loads((tmp_path / "llava/test.json").read_text()) == []


def test_what_is_missing_or_without_a_licence_is_refused_unless_asked_for_and_conditions_are_told(tmp_path, capsys):
    out = tmp_path / "llava"
    with pytest.raises(DataError, match="run `m3diff convert` first"):
        export_llava(OWN, tmp_path / "nowhere", out)
    convert(tmp_path, [clean("a"), clean("a", dataset="spot"), clean("a", dataset="birds")])
    entries = OWN | {"spot": make_entry("spot_the_diff", Path()), "birds": make_entry("birds_to_words", Path())}
    with pytest.raises(DataError, match=r"birds: in the mixture, but not in ingest\.datasets; run `m3diff convert`"):
        export_llava(OWN, tmp_path / "mixture", out)
    with pytest.raises(DataError, match=r"Spot-the-Diff \(licence: none stated\): redistribute: .* refused"):
        export_llava(entries, tmp_path / "mixture", out)
    assert not out.exists()
    assert export_llava(entries, tmp_path / "mixture", out, allow_unlicensed=True) == {"train": 3}
    birds, spot = capsys.readouterr().out.splitlines()
    assert birds.startswith("birds: Birds-to-Words (licence: CC BY-SA 4.0): redistribute: texts: credit")
    assert spot.startswith("spot: Spot-the-Diff (licence: none stated): redistribute: ")
