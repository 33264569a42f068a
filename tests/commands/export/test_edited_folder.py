"""A copied model is loaded whatever people do to its card; what is loaded is checked, and a fault is one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load, save

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.commands.export.folder import export_hub
from m3diff.models.checkpoint import export_checkpoint
from tests.commands.export.test_hub import make_run, without_a_weight
from tests.tiny import BASE, colour_image
from tests.toy import REPOSITORY

WEIGHTS, MANIFEST, CONFIG = "model.safetensors", "manifest.json", "config.json"
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


@pytest.fixture
def caption(root: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def caption(model: Path, *more: object) -> tuple[int, str, str]:
        params, images = str(REPOSITORY / "profiles/embedded.yaml"), [str(root / name) for name in ("a.png", "b.png")]
        code = main(["--params", params, "caption", *images, "--model", str(model), *map(str, more)])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return caption


def changed(name: str, change: Callable[[bytes], bytes]) -> Edit:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def cut(data: bytes) -> bytes:
    return data[:1000]


def other(data: bytes) -> bytes:
    return save({name: weight + 1 for name, weight in load(data).items()}, {"format": "pt"})


def removed(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def pointer(name: str) -> Edit:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 193820\n"
    return changed(name, lambda _: text)


def config(**fields: object) -> Edit:
    """config.json with other fields, written in another order and layout."""
    return changed(CONFIG, lambda data: json.dumps(json.loads(data) | fields, indent=4, sort_keys=True).encode())


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


LOADED: dict[str, list[Edit]] = {
    "what is not loaded edited": [
        *(changed(name, lambda data: data + b"\n") for name in ("README.md", "m3diff_model.py")),
        pointer("example_after.png"),
        with_others_files,
    ],
    "what is not loaded removed": [removed("README.md"), removed("layers.py"), removed("example_before.png")],
    "line ends of Windows": [with_windows_ends],
    "links of a cache": [linked],
    "no manifest, files of other programs": [removed(MANIFEST), with_others_files],
    "config of a later transformers": [config(transformers_version="99.0.0", use_cache=True)],
    "tokenizer config written anew": [changed("tokenizer_config.json", lambda data: data + b"\n")],
}
NOTED = [*LOADED][-2:]
"""Edits of what is loaded, of which a warning tells."""

AGAIN, PULL = "fetch it again from where it came", "git lfs pull"
REFUSED: dict[str, tuple[list[Edit], str, str]] = {
    **{f"{name} a pointer": ([pointer(name)], name, PULL) for name in (WEIGHTS, CONFIG, MANIFEST)},
    "processor removed": ([removed("processor_config.json")], "processor_config.json", AGAIN),
    "other weights": ([changed(WEIGHTS, other)], WEIGHTS, "on purpose, delete manifest.json"),
    "config cut off": ([changed(CONFIG, lambda _: b"{")], CONFIG, AGAIN),
    "tokenizer of nothing": ([changed("tokenizer.json", lambda _: b"{}")], "copied", "restore"),
    "config of another size": ([config(text_config={"hidden_size": 32})], "copied", "restore"),
    "no manifest, weights cut off": ([removed(MANIFEST), changed(WEIGHTS, cut)], WEIGHTS, "fetch it again"),
    "no manifest, a weight missing": ([removed(MANIFEST), lambda f: without_a_weight(f, "mdp")], "1 weights", "copied"),
    "no manifest, no weights": ([removed(MANIFEST), removed(WEIGHTS)], "copied", "restore"),
    "no manifest, no processor": ([removed(MANIFEST), removed("processor_config.json")], MANIFEST, "save_pret"),
}


@pytest.mark.parametrize("name", [*LOADED, *REFUSED])
def test_a_copy_may_be_edited_where_it_is_not_loaded_and_what_cannot_be_loaded_is_a_line_with_file_and_remedy(
    name: str,
    root: Path,
    tmp_path: Path,
    caption: Callable[..., tuple[int, str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    copied = shutil.copytree(root / "hub", tmp_path / "copied to é here" / "copied")
    edits, *told = REFUSED.get(name, (LOADED.get(name), "", ""))
    for edit in edits:
        edit(copied)
    code, out, err = caption(copied)
    if name in LOADED:
        assert (code, out) == (0, caption(root / "merged")[1])
        assert ("edited since it was written" in caplog.text) == (name in NOTED)
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
    changed("lora/adapter_model.safetensors", lambda _: b"cut")(damaged[1])
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
