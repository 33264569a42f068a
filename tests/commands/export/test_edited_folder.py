"""A copied model is loaded whatever people do to its card; what is loaded is checked, and a fault is one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.commands.export.folder import export_hub
from m3diff.models.checkpoint import export_checkpoint
from tests.commands.export.test_hub import make_run, without_a_weight
from tests.tiny import BASE, colour_image
from tests.toy import REPOSITORY

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 193820\n"
WEIGHTS, MANIFEST, CONFIG = "model.safetensors", "manifest.json", "config.json"
EMBEDDED = str(REPOSITORY / "profiles/embedded.yaml")
OTHERS = (".DS_Store", f"._{WEIGHTS}", ".git/index", ".cache/huggingface/a.json", "notes.txt")
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hub` and `merged`, copied out of a project, `adapters` and their `base`, and two images."""
    root = tmp_path_factory.mktemp("root")
    run = make_run(root)
    export_hub(run, root / "hub")
    export_checkpoint(run.paths.model / "checkpoint", root / "merged", adapters=False)
    export_checkpoint(run.paths.model / "checkpoint", root / "adapters", adapters=True)
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


def changed(name: str, change: Callable[[bytes], bytes]) -> Edit:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def removed(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def pointer(name: str) -> Edit:
    return changed(name, lambda _: POINTER)


def config(**fields: object) -> Edit:
    """config.json with other fields, written in another order and layout."""
    return changed(CONFIG, lambda data: json.dumps(json.loads(data) | fields, indent=4, sort_keys=True).encode())


def tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(folder: Path) -> None:
        weights = {name: change(weight) for name, weight in load_file(folder / WEIGHTS).items()}
        save_file(weights, folder / WEIGHTS, {"format": "pt"})

    return edit


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
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..") / "blobs" / str(number))


LOADED: dict[str, tuple[Edit, ...]] = {
    "what is not loaded edited": (
        changed("README.md", lambda data: data + b"Trained for our survey.\n"),
        changed("m3diff_model.py", lambda data: data + b"\n"),
        pointer("example_after.png"),
        with_others_files,
    ),
    "what is not loaded removed": (removed("README.md"), removed("layers.py"), removed("example_before.png")),
    "line ends of Windows": (with_windows_ends,),
    "links of a cache": (linked,),
    "no manifest, files of other programs": (removed(MANIFEST), with_others_files),
    "config written anew": (config(),),
    "config of a later transformers": (config(transformers_version="99.0.0", use_cache=True),),
    "tokenizer config written anew": (changed("tokenizer_config.json", lambda data: data + b"\n"),),
}
NOTED = [*LOADED][-3:]
"""Edits of what is loaded, of which a warning tells."""

AGAIN, PULL = "fetch it again from where it came", "git lfs pull"
UNLISTED = removed(MANIFEST)
REFUSED: dict[str, tuple[tuple[Edit, ...], str, str]] = {
    **{f"{name} a pointer": ((pointer(name),), name, PULL) for name in (WEIGHTS, CONFIG, MANIFEST)},
    "processor removed": ((removed("processor_config.json"),), "processor_config.json", AGAIN),
    "other weights": ((tensors(lambda weight: weight + 1),), WEIGHTS, "on purpose, delete manifest.json"),
    "config cut off": ((changed(CONFIG, lambda _: b"{"),), CONFIG, AGAIN),
    "tokenizer of nothing": ((changed("tokenizer.json", lambda _: b"{}"),), "copied", "restore"),
    "config of another size": ((config(text_config={"hidden_size": 32}),), "copied", "restore"),
    "no manifest, weights cut off": ((UNLISTED, changed(WEIGHTS, lambda data: data[:1000])), WEIGHTS, "fetch it again"),
    "no manifest, a weight missing": ((UNLISTED, lambda f: without_a_weight(f, "mdp")), "1 weights are", "copied"),
    "no manifest, no weights": ((UNLISTED, removed(WEIGHTS)), "copied", "restore"),
    "no manifest, no processor": ((UNLISTED, removed("processor_config.json")), MANIFEST, "save_pret"),
}


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    return shutil.copytree(root / "hub", tmp_path / "copied to é here" / "copied")


@pytest.mark.parametrize("name", LOADED)
def test_what_is_not_loaded_may_be_edited_and_what_is_written_anew_is_told(
    name: str, root: Path, copied: Path, wanted: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    for edit in LOADED[name]:
        edit(copied)
    assert caption(root, copied) == 0
    assert capsys.readouterr().out == f"{wanted}\n"
    assert ("edited since it was written" in caplog.text) == (name in NOTED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_loaded_is_one_line_with_the_file_and_a_remedy_for_a_copy(
    name: str, root: Path, copied: Path, capsys: pytest.CaptureFixture
) -> None:
    edits, *told = REFUSED[name]
    for edit in edits:
        edit(copied)
    assert caption(root, copied) == DATA_REFUSED
    err = capsys.readouterr().err
    said = err.splitlines()[-1]
    assert "Traceback" not in err
    assert said.startswith("m3diff caption: ")
    assert all(text in said for text in (str(copied), *told)), said


ADAPTERS: dict[str, tuple[Edit, str, str]] = {
    "with files of other programs": (with_others_files, "", ""),
    "weights a pointer": (pointer("tuned.safetensors"), "tuned.safetensors", PULL),
    "adapters cut off": (changed("lora/adapter_model.safetensors", lambda _: b"cut"), "adapter_model.safet", AGAIN),
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


def test_adapters_without_their_base_or_in_pefts_own_layout_are_told_how_to_be_loaded(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    adapters, other = shutil.copytree(root / "adapters", tmp_path / "adapters"), tmp_path / "other"
    pointer(WEIGHTS)(shutil.copytree(root / "base", other))
    for model, base, told in (
        (adapters, tmp_path, (str(tmp_path), "--base FOLDER")),
        (adapters, BASE, (str(BASE), "--base FOLDER")),
        (adapters, other, (str(other), PULL)),
        (adapters / "lora", root / "base", ("loaded by peft",)),
    ):
        assert caption(root, model, "--base", base) == DATA_REFUSED
        said = capsys.readouterr().err
        assert all(text in said for text in told), said
