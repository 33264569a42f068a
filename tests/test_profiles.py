"""Profiles: inherited values, differences, and writing a profile as the parameters of the next run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3diff.datasets import DATASETS
from m3diff.records.errors import Fault
from m3diff.settings.load import (
    find_profile,
    list_differences,
    load_params,
    merge_profile,
    profile_files,
    resolve_profile,
    resolved_text,
    use_profile,
)
from m3diff.settings.section import ParamsError
from tests.errors import raises
from tests.toy import REPOSITORY

PROFILES = REPOSITORY / "profiles"
PROFILE_NAMES = ["blip2idc", "embedded-gpu", "embedded", "levir-cc", "made-data"]
PROFILE_NAMES += ["one-gpu", "onediff", "paper-letter", "paper", "small"]
SEVEN = ["omnidiff_real", "omnidiff_render", "spot_the_diff", "iedit", "birds_to_words", "clevr_change", "clevr_dc"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(PROFILES, "profiles")
    return tmp_path / "profiles"


def write(path: Path, values: dict[str, Any] | str) -> Path:
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False))
    return path


def test_profiles_are_the_files_with_parameters():
    assert [path.stem for path in profile_files(Path("profiles"))] == PROFILE_NAMES


def test_params_yaml_is_the_embedded_profile():
    assert (REPOSITORY / "params.yaml").read_text() == (PROFILES / "embedded.yaml").read_text()


def test_the_paper_profile_reads_the_published_datasets_by_the_papers_tasks():
    params = load_params(Path("profiles/paper.yaml"))
    assert not any(params.models["m3diff"].delays.values()), "all parts begin together"
    assert {name: entry.root for name, entry in params.ingest.datasets.items()} == {
        name: Path("data/01_raw") / name for name in SEVEN
    }
    assert {entry.expected_pairs for entry in params.ingest.datasets.values()} == {"published"}
    tasks = {"omnidiff_real": "detail", "omnidiff_render": "detail", "iedit": "edit", "birds_to_words": "birds"}
    task_of = {name: DATASETS[entry.reader].task for name, entry in params.ingest.datasets.items()}
    assert task_of == dict.fromkeys(SEVEN, "difference") | tasks
    assert "minichange" not in resolved_text(Path("profiles/paper.yaml"))


def test_a_profile_is_merged_by_key_but_replaces_collections_by_name():
    below = {
        "train": {"epochs": 5, "seed": 1},
        "ingest": {"datasets": {"a": {"reader": "pairs", "root": "a"}}},
        "convert": {"seed": 1, "sources": {"a": {"weight": 2}}},
        "synthesize": {"a": {"seed": 1}},
        "models": {"m": {"rates": {"llm": 1, "vision": 2}, "module": {"layers": 2}}},
    }
    overlay = {
        "extends": "below",
        "train": {"epochs": 1},
        "ingest": {"datasets": {"b": {"reader": "pairs"}}},
        "convert": {"sources": {"b": {}}},
        "synthesize": {"b": {"seed": 2}},
        "models": {"m": {"rates": {"llm": 3}, "module": None}, "n": {"module": {}}},
    }
    assert merge_profile(below, overlay) == {
        "train": {"epochs": 1, "seed": 1},
        "ingest": {"datasets": {"b": {"reader": "pairs"}}},
        "convert": {"seed": 1, "sources": {"b": {}}},
        "synthesize": {"b": {"seed": 2}},
        "models": {"m": {"rates": {"llm": 3, "vision": 2}, "module": None}, "n": {"module": {}}},
    }


def test_inherited_generators_stay_only_for_ingested_datasets(folder):
    below = {"synthesize": {"a": {"seed": 1}, "b": {"seed": 2}}, "ingest": {"datasets": {"a": {}, "b": {}}}}
    assert merge_profile(below, {"ingest": {"datasets": {"b": {}}}})["synthesize"] == {"b": {"seed": 2}}
    generator = yaml.safe_load((folder / "embedded.yaml").read_text())["synthesize"]["minichange"]
    path = write(folder / "mine.yaml", {"extends": "paper", "synthesize": {"minichange": generator}})
    with raises(ParamsError, "settings.faults", path=path) as caught:
        load_params(path)
    assert Fault("settings.entry_not_ingested", key="synthesize.minichange") in caught.value.fields["faults"]


def test_an_unknown_profile_is_refused_with_the_nearest_and_all_names(folder):
    with raises(ParamsError, "settings.unknown_profile", value="papr", nearest="paper", names=sorted(PROFILE_NAMES)):
        find_profile("papr", Path("profiles"))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ("ingest: 3", "ingest"),
        ("ingest: {datasets: 3}", "ingest.datasets"),
        ("synthesize: 3", "synthesize"),
        ("train: 3", "train"),
        ("models: [1]", "models"),
    ],
)
def test_a_section_of_a_profile_that_is_no_mapping_is_refused(values, key, folder):
    with raises(ParamsError, "settings.faults") as caught:
        load_params(write(folder / "mine.yaml", f"extends: embedded\n{values}\n"))
    rules = {fault.fields["key"]: fault.fields["rule"] for fault in caught.value.fields["faults"]}
    assert rules[key] in ("dict_type", "model_type", "mapping_type")


# By topic: files of the folder of profiles, and the fault of mine.yaml with its code and fields
CHAINS: dict[str, tuple[dict[str, str], str, dict[str, Any]]] = {
    "no file to extend": (
        {"mine": "extends: nothing\n"},
        "no_file_to_extend",
        {"path": Path("profiles/mine.yaml"), "value": "nothing", "file": Path("profiles/nothing.yaml")},
    ),
    "a circle": (
        {"mine": "extends: other\n", "other": "extends: mine\n"},
        "profiles_in_a_circle",
        {"path": Path("profiles/other.yaml"), "value": "mine"},
    ),
    "a fault of the profile itself": (
        {"mine": "extends: paper\ntrain: {epochs: 1, epochs: 2}\n"},
        "key_written_twice",
        {"path": Path("profiles/mine.yaml"), "key": "epochs"},
    ),
    "a fault of the profile below": (
        {"mine": "extends: below\n", "below": "extends: paper\ntrain: {epochs: 1, epochs: 2}\n"},
        "key_written_twice",
        {"path": Path("profiles/below.yaml"), "key": "epochs"},
    ),
}


@pytest.mark.parametrize("topic", CHAINS)
def test_a_fault_in_a_chain_of_profiles_is_reported_with_its_file(topic, folder):
    files, code, fields = CHAINS[topic]
    for name, text in files.items():
        write(folder / f"{name}.yaml", text)
    with raises(ParamsError, f"settings.{code}", **fields):
        load_params(Path("profiles/mine.yaml"))


@pytest.mark.parametrize("name", ["paper", "one-gpu", "levir-cc"])
def test_a_profile_is_written_with_its_resolved_values_and_its_head_comment(name):
    source = Path("profiles") / f"{name}.yaml"
    text = resolved_text(source)
    assert yaml.safe_load(text) == resolve_profile(source)
    head = source.read_text().split("\n\n")[0]
    assert text.startswith(f"# The profile {name}, as `m3diff profile {name}` wrote it; ")
    assert f"\n#\n{head}\n\npaths:\n" in text
    sections = [line for line in text.split("\n") if line and line[0] not in " #"]
    assert [line.split(":")[0] for line in sections] == list(resolve_profile(Path("profiles/embedded.yaml")))
    assert all(f"\n\n{line}" in text for line in sections), "an empty line stands before each section"
    assert max(map(len, text.split("\n"))) <= 120


def test_using_a_profile_lists_the_changes():
    (line,) = use_profile("paper", Path("params.yaml"), Path("profiles"))
    assert "params.yaml" in line
    changes = use_profile("one-gpu", Path("params.yaml"), Path("profiles"))
    assert changes[:2] == ["train.max_captions_per_sequence: 1 -> null", "train.global_batch: 256 -> 42"]
    assert len(changes) == 7
    assert use_profile("one-gpu", Path("params.yaml"), Path("profiles")) == []
    assert "compute.val_pairs: 512 -> 64" in use_profile("embedded", Path("params.yaml"), Path("profiles"))


def test_a_profile_that_extends_none_is_written_as_it_is():
    use_profile("embedded", Path("params.yaml"), Path("profiles"))
    assert Path("params.yaml").read_text() == Path("profiles/embedded.yaml").read_text()


def test_a_profile_that_is_replaced_by_another_is_not_kept():
    for name in ("paper", "one-gpu", "embedded"):
        use_profile(name, Path("params.yaml"), Path("profiles"))
    assert copies() == []


def copies() -> list[Path]:
    return list(Path().glob("params.yaml.bak-*"))


def test_parameters_that_are_no_profile_are_kept_in_copies():
    for epochs in (7, 8):
        text = Path("profiles/embedded.yaml").read_text().replace("epochs: 2.7", f"epochs: {epochs}")
        Path("params.yaml").write_text(text)
        note, *changes = use_profile("paper", Path("params.yaml"), Path("profiles"))
        (copy,) = [copy for copy in copies() if copy.read_text() == text]
        assert str(copy) in note
        assert f"train.epochs: {epochs} -> 1" in changes
    assert len(copies()) == 2
    assert load_params() == load_params(Path("profiles/paper.yaml"))


def own_profile(folder: Path, epochs: float) -> None:
    write(folder / "mine.yaml", {"extends": "embedded", "train": {"epochs": epochs}})


def test_parameters_written_from_an_older_profile_are_not_kept(folder):
    for epochs in (3, 4, 5):
        own_profile(folder, epochs)
        use_profile("mine", Path("params.yaml"), Path("profiles"))
    assert copies() == []
    assert load_params().train.epochs == 5


def test_an_edit_of_written_parameters_is_kept_in_one_copy(folder):
    own_profile(folder, 3)
    use_profile("mine", Path("params.yaml"), Path("profiles"))
    edited = Path("params.yaml").read_text().replace("epochs: 3", "epochs: 7")
    for _ in range(3):
        Path("params.yaml").write_text(edited)
        note = use_profile("paper", Path("params.yaml"), Path("profiles"))[0]
        assert [copy for copy in copies() if str(copy) in note] == copies()
    (copy,) = copies()
    assert copy.read_text() == edited


def test_an_edited_comment_of_written_parameters_counts_as_an_edit(folder):
    own_profile(folder, 3)
    use_profile("mine", Path("params.yaml"), Path("profiles"))
    Path("params.yaml").write_text(Path("params.yaml").read_text() + "# my note\n")
    own_profile(folder, 4)
    use_profile("mine", Path("params.yaml"), Path("profiles"))
    assert [copy.read_text().split("\n")[-2] for copy in copies()] == ["# my note"]


def test_git_ignores_the_copies():
    assert "/params.yaml.bak-*" in (REPOSITORY / ".gitignore").read_text().split("\n")


def test_differences_list_additions_and_each_removed_mapping_once():
    old = {"a": {"b": 1, "c": None}, "d": {}, "same": [1], "gone": {"x": {"y": 1}}, "part": {"x": {"y": 1}, "z": 1}}
    new = {"a": {"b": 2, "e": "text"}, "d": {"f": True}, "same": [1], "part": {"z": 1}}
    changed = ["a.b: 1 -> 2", "a.c: null -> -", "a.e: - -> text", "d.f: - -> true"]
    assert [*list_differences(old, new)] == [*changed, "gone: removed", "part.x: removed"]
