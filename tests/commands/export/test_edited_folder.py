"""A copied model is loaded whatever people do to its card; what is loaded is checked, and a fault is one line."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.commands.export.folder import export_hub
from m3diff.models.checkpoint import export_checkpoint
from tests.commands.export.test_hub import make_run
from tests.tiny import BASE, colour_image
from tests.toy import REPOSITORY

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 193820\n"
WEIGHTS = "model.safetensors"
EMBEDDED = str(REPOSITORY / "profiles/embedded.yaml")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hub` and `merged`, copied out of a project, `adapters` and their `base`, and two images."""
    root = tmp_path_factory.mktemp("root")
    run = make_run(root)
    export_hub(run, root / "hub")
    export_checkpoint(run.model / "checkpoint", root / "merged", adapters=False)
    export_checkpoint(run.model / "checkpoint", root / "adapters", adapters=True)
    for name, seed in (("a.png", 1), ("b.png", 2)):
        colour_image(seed).save(root / name)
    return root


def caption(root: Path, model: Path, *more: object) -> int:
    images = [str(root / name) for name in ("a.png", "b.png")]
    return main(["--params", EMBEDDED, "caption", *images, "--model", str(model), *map(str, more)])


@pytest.fixture(scope="module")
def wanted(root: Path) -> str:
    from m3diff.registry.model_source import Source, load
    from m3diff.settings.load import load_params

    tokens = load_params(Path(EMBEDDED)).predict.max_new_tokens
    said = load(Source("m3diff/1", root / "merged", tokens, None)).caption([(colour_image(1), colour_image(2))])
    return " ".join(said[0].split())


def appended(name: str, text: str = "\n") -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def pointer(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(POINTER) and None


def config(**fields: object) -> Callable[[Path], None]:
    """config.json with other fields, written in another order and layout."""

    def edit(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(found, indent=4, sort_keys=True))

    return edit


def with_windows_ends(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja", ".md", ".py"):
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def with_others_files(folder: Path) -> None:
    names = (".DS_Store", f"._{WEIGHTS}", ".git/index", ".cache/huggingface/a.json", "notes.txt")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\0\5\26\7")


def linked(folder: Path) -> None:
    """As the cache of a model hub: every file is a link to a blob."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..") / "blobs" / str(number))


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])


def another(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    save_file({name: weight + 1 for name, weight in weights.items()}, folder / WEIGHTS, {"format": "pt"})


def halved(folder: Path) -> None:
    """Saved again in another precision, and the manifest deleted as its remedy says."""
    weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def all_of(*edits: Callable[[Path], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        for each in edits:
            each(folder)

    return edit


def removed_tensor(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights.pop(next(name for name in weights if "mdp" in name))
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


LOADED = {
    "card edited": appended("README.md", "Trained for our survey.\n"),
    "card removed": removed("README.md"),
    "example removed": removed("example_before.png"),
    "example a pointer": pointer("example_after.png"),
    "code edited": appended("m3diff_model.py"),
    "code removed": removed("layers.py"),
    "line ends of Windows": with_windows_ends,
    "files of other programs": with_others_files,
    "links of a cache": linked,
    "no manifest": removed("manifest.json"),
    "no manifest, files of other programs": all_of(removed("manifest.json"), with_others_files),
    "manifest with line ends": lambda folder: (folder / "manifest.json").write_bytes(
        (folder / "manifest.json").read_bytes().replace(b"\n", b"\r\n")
    ),
}
NOTED = {
    "config written anew": config(),
    "config of a later transformers": config(transformers_version="99.0.0", use_cache=True),
    "tokenizer config written anew": appended("tokenizer_config.json"),
}
AGAIN, PULL, MANIFEST = "fetch the folder again from where it came", "git lfs pull", "manifest.json"
REFUSED = {
    "weights a pointer": (pointer(WEIGHTS), WEIGHTS, PULL),
    "tokenizer a pointer": (pointer("tokenizer.json"), "tokenizer.json", PULL),
    "config a pointer": (pointer("config.json"), "config.json", PULL),
    "manifest a pointer": (pointer("manifest.json"), "manifest.json", PULL),
    "weights cut off": (cut, WEIGHTS, AGAIN),
    "other weights": (another, WEIGHTS, "delete manifest.json"),
    "weights removed": (removed(WEIGHTS), WEIGHTS, AGAIN),
    "config removed": (removed("config.json"), "config.json", AGAIN),
    "processor removed": (removed("processor_config.json"), "processor_config.json", AGAIN),
    "tokenizer removed": (removed("tokenizer.json"), "tokenizer.json", AGAIN),
    "template removed": (removed("chat_template.jinja"), "chat_template.jinja", AGAIN),
    "config cut off": (lambda folder: (folder / "config.json").write_text("{"), "config.json", AGAIN),
    "tokenizer of nothing": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json", "restore"),
    "config of another size": (config(text_config={"hidden_size": 32}), "config.json", "restore"),
    "config of no kind": (config(model_type="mine"), "config.json", "restore"),
    "manifest cut off": (lambda folder: (folder / MANIFEST).write_text('{"files": {'), MANIFEST, AGAIN),
    "manifest of nothing": (lambda folder: (folder / MANIFEST).write_text("[]"), MANIFEST, AGAIN),
    "another family": (
        lambda folder: (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"m3diff"', '"m4diff"')),
        MANIFEST,
        "update m3diff",
    ),
    "no manifest, weights cut off": (all_of(removed(MANIFEST), cut), WEIGHTS, "fetch it again"),
    "no manifest, weights a pointer": (all_of(removed(MANIFEST), pointer(WEIGHTS)), WEIGHTS, PULL),
    "no manifest, a weight missing": (all_of(removed(MANIFEST), removed_tensor), "1 weights are missing", "copied"),
    "no manifest, no weights": (all_of(removed(MANIFEST), removed(WEIGHTS)), "copied", "restore"),
    "no manifest, no processor": (all_of(removed(MANIFEST), removed("processor_config.json")), MANIFEST, "save_pret"),
    "nothing": (lambda folder: [path.unlink() for path in folder.iterdir()], MANIFEST, "m3diff export"),
}


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    return shutil.copytree(root / "hub", tmp_path / "copied to é here" / "copied")


@pytest.mark.parametrize("name", [*LOADED, *NOTED])
def test_what_is_not_loaded_may_be_edited_and_what_is_written_anew_is_told(
    name: str, root: Path, copied: Path, wanted: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    (LOADED | NOTED)[name](copied)
    assert caption(root, copied) == 0
    assert capsys.readouterr().out == f"{wanted}\n"
    assert ("edited since it was written" in caplog.text) == (name in NOTED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_loaded_is_one_line_with_the_file_and_a_remedy_for_a_copy(
    name: str, root: Path, copied: Path, capsys: pytest.CaptureFixture
) -> None:
    edit, *told = REFUSED[name]
    edit(copied)
    assert caption(root, copied) == DATA_REFUSED
    err = capsys.readouterr().err
    said = err.splitlines()[-1]
    assert "Traceback" not in err
    assert said.startswith("m3diff caption: ")
    assert str(copied) in said
    for text in told:
        assert text in said
    assert not re.search(r"dvc checkout|train again", said)


def test_weights_that_were_saved_again_are_loaded_when_the_manifest_is_deleted_as_the_line_says(
    root: Path, copied: Path, capsys: pytest.CaptureFixture
) -> None:
    halved(copied)
    assert caption(root, copied) == DATA_REFUSED
    assert "if you saved the model here again on purpose, delete manifest.json" in capsys.readouterr().err
    (copied / MANIFEST).unlink()
    assert caption(root, copied) == 0


@pytest.mark.parametrize("tracked", [True, False])
def test_the_projects_own_checkpoint_is_had_again_from_dvc_where_it_is_tracked(
    tracked: bool, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = shutil.copytree(root / "merged", tmp_path / "data" / "model" / "checkpoint")
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "dvc.lock").write_text(f"    outs:\n    - path: data/{'model' if tracked else 'others'}/checkpoint\n")
    for damage in (cut, removed(MANIFEST)):
        damage(folder)
        assert caption(root, folder) == DATA_REFUSED
        said = capsys.readouterr().err
        assert ("`dvc checkout data/model/checkpoint`" in said) == tracked
        assert ("fetch" in said) != tracked


ADAPTERS = {
    "as exported": (lambda folder: None, "", ""),
    "card and files of other programs": (with_others_files, "", ""),
    "weights a pointer": (pointer("tuned.safetensors"), "tuned.safetensors", PULL),
    "adapters cut off": (
        lambda folder: (folder / "lora/adapter_model.safetensors").write_bytes(b"cut"),
        "lora/adapter_model.safetensors",
        AGAIN,
    ),
    "tuned removed": (removed("tuned.safetensors"), "tuned.safetensors", AGAIN),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_loaded_with_their_base_or_refused_in_a_line(
    name: str, root: Path, tmp_path: Path, wanted: str, capsys: pytest.CaptureFixture
) -> None:
    edit, file, remedy = ADAPTERS[name]
    folder, base = shutil.copytree(root / "adapters", tmp_path / "a"), shutil.copytree(root / "base", tmp_path / "base")
    edit(folder)
    (base / ".DS_Store").write_bytes(b"of macOS")
    assert caption(root, folder, "--base", base) == (DATA_REFUSED if file else 0)
    said = capsys.readouterr()
    assert file in said.err
    assert remedy in said.err
    assert said.out == ("" if file else f"{wanted}\n")


def test_adapters_whose_base_is_not_there_or_another_name_the_option_that_names_it(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = tmp_path / "other"
    for base, made in ((tmp_path, None), (BASE, None), (other, root / "base")):
        if made:
            pointer(WEIGHTS)(shutil.copytree(made, other))
        assert caption(root, root / "adapters", "--base", base) == DATA_REFUSED
        said = capsys.readouterr().err
        assert str(base) in said
        assert (PULL if made else "--base FOLDER") in said


@pytest.mark.parametrize(
    ("inner", "told"), [("lora", "name the whole: {folder}"), ("alone", "peft.PeftModel.from_pretrained")]
)
def test_adapters_in_pefts_own_layout_are_told_how_to_be_loaded(
    inner: str, told: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = shutil.copytree(root / "adapters", tmp_path / "adapters")
    if inner == "alone":
        shutil.copytree(folder / "lora", folder / "alone")
        (folder / "alone").rename(tmp_path / "alone")
    place = tmp_path / "alone" if inner == "alone" else folder / inner
    assert caption(root, place, "--base", root / "base") == DATA_REFUSED
    assert told.format(folder=folder) in capsys.readouterr().err
