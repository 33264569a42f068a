"""Profiles: what differs from the profile they extend, resolved, and written as the next run's."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3diff.datasets import DATASETS
from m3diff.settings.load import (
    differences,
    find_profile,
    lay_over,
    load_params,
    profiles,
    resolve,
    use_profile,
    written,
)
from m3diff.settings.section import ParamsError
from tests.toy import REPOSITORY

PROFILES = REPOSITORY / "profiles"
ALL = ["blip2idc", "embedded-gpu", "embedded", "levir-cc", "made-data"]
ALL += ["one-gpu", "onediff", "paper-letter", "paper", "small"]
SEVEN = ["omnidiff_real", "omnidiff_render", "spot_the_diff", "iedit", "birds_to_words", "clevr_change", "clevr_dc"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(PROFILES, "profiles")
    return tmp_path / "profiles"


def write(path: Path, values: dict[str, Any] | str) -> Path:
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False))
    return path


def test_the_profiles_are_the_files_with_parameters_and_the_committed_ones_are_the_embedded():
    assert [path.stem for path in profiles(Path("profiles"))] == ALL
    assert (REPOSITORY / "params.yaml").read_text() == (PROFILES / "embedded.yaml").read_text()


def test_the_paper_profile_reads_published_datasets_from_folders_of_their_names_by_the_papers_tasks():
    params = load_params(Path("profiles/paper.yaml"))
    assert not any(params.models["m3diff"].delays.values()), "all parts begin together"
    assert {name: entry.root for name, entry in params.ingest.datasets.items()} == {
        name: Path("data/01_raw") / name for name in SEVEN
    }
    assert {entry.expected_pairs for entry in params.ingest.datasets.values()} == {"published"}
    tasks = {"omnidiff_real": "detail", "omnidiff_render": "detail", "iedit": "edit", "birds_to_words": "birds"}
    found = {name: DATASETS[entry.reader].task for name, entry in params.ingest.datasets.items()}
    assert found == dict.fromkeys(SEVEN, "difference") | tasks
    assert "minichange" not in written(Path("profiles/paper.yaml"))


def test_a_profile_is_laid_over_key_by_key_but_collections_by_name_are_replaced():
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
    assert lay_over(below, overlay) == {
        "train": {"epochs": 1, "seed": 1},
        "ingest": {"datasets": {"b": {"reader": "pairs"}}},
        "convert": {"seed": 1, "sources": {"b": {}}},
        "synthesize": {"b": {"seed": 2}},
        "models": {"m": {"rates": {"llm": 3, "vision": 2}, "module": None}, "n": {"module": {}}},
    }


def test_inherited_generators_stay_only_for_datasets_that_are_ingested_and_own_ones_are_refused(folder):
    below = {"synthesize": {"a": {"seed": 1}, "b": {"seed": 2}}, "ingest": {"datasets": {"a": {}, "b": {}}}}
    assert lay_over(below, {"ingest": {"datasets": {"b": {}}}})["synthesize"] == {"b": {"seed": 2}}
    made = yaml.safe_load((folder / "embedded.yaml").read_text())["synthesize"]["minichange"]
    path = write(folder / "mine.yaml", {"extends": "paper", "synthesize": {"minichange": made}})
    with pytest.raises(ParamsError, match="synthesize.minichange: no dataset of `ingest.datasets` has this name"):
        load_params(path)


def test_wrong_sections_in_a_profile_are_reported_and_break_nothing(folder):
    with pytest.raises(ParamsError, match=f"profile 'papr': profiles has {', '.join(ALL)}"):
        find_profile("papr", Path("profiles"))
    for values in ("ingest: 3", "ingest: {datasets: 3}", "synthesize: 3", "train: 3", "models: [1]"):
        with pytest.raises(ParamsError, match="Input should be a valid dictionary"):
            load_params(write(folder / "mine.yaml", f"extends: embedded\n{values}\n"))


CHAINS: list[tuple[dict[str, str], str]] = [
    ({"mine": "extends: nothing\n"}, "mine.yaml: extends nothing, but profiles/nothing.yaml is not there"),
    ({"mine": "extends: other\n", "other": "extends: mine\n"}, "other.yaml: extends mine, which extends this file"),
    ({"mine": "extends: paper\ntrain: {epochs: 1, epochs: 2}\n"}, "not valid YAML: epochs: is written twice"),
    (
        {"mine": "extends: below\n", "below": "extends: paper\ntrain: {epochs: 1, epochs: 2}\n"},
        "profiles/below.yaml: not valid YAML: epochs: is written twice",
    ),
]


@pytest.mark.parametrize(("files", "words"), CHAINS)
def test_a_fault_of_a_chain_of_profiles_is_said_with_its_file(files, words, folder):
    for name, text in files.items():
        write(folder / f"{name}.yaml", text)
    with pytest.raises(ParamsError, match=words):
        load_params(Path("profiles/mine.yaml"))


@pytest.mark.parametrize("name", ["paper", "one-gpu", "levir-cc"])
def test_a_profile_is_written_with_the_values_it_resolves_to_and_its_own_head(name):
    source = Path("profiles") / f"{name}.yaml"
    text = written(source)
    assert yaml.safe_load(text) == resolve(source)
    head = source.read_text().split("\n\n")[0]
    assert text.startswith(f"# The profile {name}, as `m3diff profile {name}` wrote it; ")
    assert f"\n#\n{head}\n\npaths:\n" in text
    sections = [line for line in text.split("\n") if line and line[0] not in " #"]
    assert [line.split(":")[0] for line in sections] == list(resolve(Path("profiles/embedded.yaml")))
    assert all(f"\n\n{line}" in text for line in sections), "an empty line stands before each section"
    assert max(map(len, text.split("\n"))) <= 120


def test_to_use_a_profile_says_what_changes_and_needs_no_copy_of_another_profile():
    assert use_profile("paper", Path("params.yaml"), Path("profiles")) == ["params.yaml is written"]
    said = use_profile("one-gpu", Path("params.yaml"), Path("profiles"))
    assert said[:2] == ["train.max_captions_per_sequence: 1 -> null", "train.global_batch: 256 -> 42"]
    assert len(said) == 7
    assert use_profile("one-gpu", Path("params.yaml"), Path("profiles")) == ["params.yaml has these values already"]
    assert "compute.val_pairs: 512 -> 64" in use_profile("embedded", Path("params.yaml"), Path("profiles"))
    assert Path("params.yaml").read_text() == Path("profiles/embedded.yaml").read_text(), "complete: as it is"
    assert list(Path().glob("params.yaml.bak-*")) == []


def test_parameters_that_are_no_profile_are_somebodys_work_and_are_kept_each_in_a_copy_of_its_own():
    for epochs in (7, 8):
        text = Path("profiles/embedded.yaml").read_text().replace("epochs: 2.7", f"epochs: {epochs}")
        Path("params.yaml").write_text(text)
        said = use_profile("paper", Path("params.yaml"), Path("profiles"))
        copy = max(Path().glob("params.yaml.bak-*"))
        assert said[0] == f"params.yaml differs from every profile; a copy of it is {copy}"
        assert f"train.epochs: {epochs} -> 1" in said
        assert copy.read_text() == text
    assert len(list(Path().glob("params.yaml.bak-*"))) == 2
    assert load_params() == load_params(Path("profiles/paper.yaml"))


def test_differences_name_what_is_added_and_what_is_gone_a_mapping_as_one():
    old = {"a": {"b": 1, "c": None}, "d": {}, "same": [1], "gone": {"x": {"y": 1}}, "part": {"x": {"y": 1}, "z": 1}}
    new = {"a": {"b": 2, "e": "text"}, "d": {"f": True}, "same": [1], "part": {"z": 1}}
    changed = ["a.b: 1 -> 2", "a.c: null -> -", "a.e: - -> text", "d.f: - -> true"]
    assert [*differences(old, new)] == [*changed, "gone: removed", "part.x: removed"]
