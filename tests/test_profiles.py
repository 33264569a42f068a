"""Profiles: inherited values, differences, and writing a profile as the parameters of the next run."""

import itertools
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3diff.datasets import DATASETS
from m3diff.records.errors import Fault
from m3diff.settings.load import (
    REPLACED_COLLECTIONS,
    complete_values,
    find_profile,
    list_differences,
    load_params,
    merge_profile,
    profile_files,
    resolved_text,
    use_profile,
)
from m3diff.settings.parameter_file import value_lines
from m3diff.settings.rules import PARAMS_RULES
from m3diff.settings.section import ParamsError, Section
from m3diff.settings.tree import Params
from m3diff.stages.convert.stage import load_questions
from tests.errors import raises
from tests.toy import REPOSITORY, run

PROFILES = REPOSITORY / "profiles"
SECTIONS = [field.alias or name for name, field in Params.model_fields.items()]
PROFILE_NAMES = ["blip2idc", "embedded-gpu", "embedded", "levir-cc", "made-data"]
PROFILE_NAMES += ["one-gpu", "onediff", "paper-letter", "paper", "small"]
SEVEN = ["omnidiff_real", "omnidiff_render", "spot_the_diff", "iedit", "birds_to_words", "clevr_change", "clevr_dc"]


@cache
def tracked_profiles() -> list[str]:
    """Return the names of the files that git tracks, without the profiles that a user of this checkout has written."""
    return [Path(name).name for name in run(REPOSITORY, "git", "ls-files", "profiles").splitlines()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles").mkdir()
    for name in tracked_profiles():
        shutil.copy(PROFILES / name, tmp_path / "profiles")
    return tmp_path / "profiles"


def write(path: Path, values: dict[str, Any] | str) -> Path:
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False))
    return path


def test_profiles_are_the_files_with_parameters():
    assert [path.stem for path in profile_files(Path("profiles"))] == PROFILE_NAMES


def test_params_yaml_is_the_embedded_profile(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    expected = resolved_text(Path("profiles/embedded.yaml"))
    assert Path("params.yaml").read_text() == expected, "run `m3diff profile embedded`"


@pytest.mark.parametrize("name", PROFILE_NAMES)
def test_a_profile_has_no_value_that_it_inherits(name):
    """A model's entry states its recipe as a whole, so `models` is left out, and so are collections of entries."""
    values = yaml.safe_load(Path(f"profiles/{name}.yaml").read_text())
    below = values.pop("extends", None)
    inherited_values = complete_values(Path(f"profiles/{below}.yaml")) if below else defaults_of_sections()
    values.pop("models", None)
    assert list(repeated_values(values, inherited_values)) == []


def defaults_of_sections() -> dict[str, Any]:
    """Return all defaults: the values of parameters whose entries have no meaning here."""
    model = load_params(Path("profiles/embedded.yaml")).models["m3diff"]
    datasets = {"a": {"reader": "pairs", "root": "a"}}
    params = Params(ingest={"datasets": datasets}, models={"m": model}, train={"model": "m", "base": "b"})
    return params.model_dump(mode="json", by_alias=True)


def repeated_values(values: dict[str, Any], below: dict[str, Any], keys: tuple[str, ...] = ()) -> Iterator[str]:
    for key, value in values.items():
        if (*keys, key) in REPLACED_COLLECTIONS:
            continue
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            yield from repeated_values(value, below[key], (*keys, key))
        elif key in below and below[key] == value:
            yield ".".join((*keys, key))


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
    ("values", "key", "value"),
    [
        ("ingest: 3", "ingest", 3),
        ("ingest: {datasets: 3}", "ingest.datasets", 3),
        ("synthesize: 3", "synthesize", 3),
        ("train: 3", "train", 3),
        ("models: [1]", "models", [1]),
    ],
)
def test_a_section_of_a_profile_that_is_no_mapping_is_refused(values, key, value, folder):
    with raises(ParamsError, "settings.faults") as caught:
        load_params(write(folder / "mine.yaml", f"extends: embedded\n{values}\n"))
    (fault,) = [fault for fault in caught.value.fields["faults"] if fault.fields["key"] == key]
    assert fault.fields["rule"] in ("dict_type", "model_type", "mapping_type")
    assert fault.fields["value"] == value


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
    assert yaml.safe_load(text) == complete_values(source)
    head = source.read_text().split("\n\n")[0]
    assert text.startswith(f"# The profile {name}, as `m3diff profile {name}` wrote it.\n")
    assert f"\n#\n{head}\n\n# " in text
    sections = [line for line in text.split("\n") if line and line[0] not in " #"]
    assert [line.split(":")[0] for line in sections] == SECTIONS
    assert max(map(len, text.split("\n"))) <= 120


def test_using_a_profile_lists_the_changes():
    (line,) = use_profile("paper", Path("params.yaml"), Path("profiles"))
    assert "params.yaml" in line
    changes = use_profile("one-gpu", Path("params.yaml"), Path("profiles"))
    assert changes[:2] == ["train.max_captions_per_sequence: 1 -> null", "train.global_batch: 256 -> 42"]
    assert len(changes) == 7
    assert use_profile("one-gpu", Path("params.yaml"), Path("profiles")) == []
    assert "compute.val_pairs: 512 -> 64" in use_profile("embedded", Path("params.yaml"), Path("profiles"))


@pytest.mark.parametrize("name", PROFILE_NAMES)
def test_a_written_profile_has_every_field_of_every_section_below_its_description(name):
    """DVC stops at a missing key that dvc.yaml refers to."""
    lines = resolved_text(Path(f"profiles/{name}.yaml")).split("\n")
    values = yaml.safe_load("\n".join(lines))
    for section_name, field in Params.model_fields.items():
        section = field.annotation
        if not (isinstance(section, type) and issubclass(section, Section)):
            continue
        key = field.alias or section_name
        assert list(values[key]) == list(section.model_fields)
        begin = next(number for number, line in enumerate(lines) if line.startswith(f"{key}:"))
        for inner_key, description in section.field_descriptions().items():
            line_number = next(n for n in range(begin, len(lines)) if lines[n].startswith(f"  {inner_key}:"))
            assert in_comment_above(lines, line_number, description), f"{key}.{inner_key}"


def in_comment_above(lines: list[str], line_number: int, text: str) -> bool:
    above = list(itertools.takewhile(lambda line: line.startswith("  #"), reversed(lines[:line_number])))
    comment = " ".join(line.strip("# ") for line in reversed(above))
    return " ".join(text.split()) in comment


def test_the_keys_of_entries_are_listed_above_them():
    text = resolved_text(Path("profiles/made-data.yaml"))
    for key in ("follow_links", "max_pairs", "pos_embed_scale", "cross_attention", "max_text_similarity", "queries"):
        assert re.search(rf"^ *# .*\b{key}\b", text, re.MULTILINE), key
    assert "# Pairs of unrelated images" in text
    assert "Pairs of unrelated images" not in resolved_text(Path("profiles/embedded.yaml")), "it has no such entry"


def test_comments_behind_values_of_a_profile_are_kept_unless_the_value_is_replaced(folder):
    write(
        folder / "below.yaml",
        "extends: paper\ntrain:\n  epochs: 3  # three\n  seed: 5  # five\nserve: {port: 9}  # nine\n",
    )
    write(folder / "mine.yaml", 'extends: below\ntrain:\n  seed: 6\n  model: "m3diff"   # not # no_module\n')
    text = resolved_text(Path("profiles/mine.yaml"))
    assert "\n  epochs: 3  # three\n" in text
    assert "\n  seed: 6\n" in text
    assert "\n  model: m3diff  # not # no_module\n" in text
    assert "\nserve:  # nine\n" in text
    assert "\n  gpu_kind: A100-40GB  # the paper says A100; 40 GB is our choice\n" in text


def test_a_comment_that_does_not_fit_behind_its_value_is_written_above_it():
    keys = ("train", "seed")
    assert value_lines(keys, 6, {keys: "because"}) == ["seed: 6  # because"]
    reason = " ".join(["because"] * 14)
    assert value_lines(keys, 6, {keys: reason}) == [f"# {reason}", "seed: 6"]


def test_a_text_of_several_lines_is_written_so_that_it_is_read_as_it_was():
    text = "a first line\n\nand a second one: # no comment\n"
    lines = value_lines(("compute", "gpu_hour_currency"), text, {})
    assert not any("\n" in line for line in lines), "each line is indented by its section"
    written = "\n".join(["compute:", *(f"  {line}" for line in lines)])
    assert yaml.safe_load(written) == {"compute": {"gpu_hour_currency": text}}


def test_the_path_of_the_written_questions_is_relative_to_the_working_directory(monkeypatch, tmp_path):
    profile = PROFILES / "embedded.yaml"
    assert complete_values(profile)["convert"]["questions"] == str(PROFILES.resolve() / "questions.yaml")
    monkeypatch.chdir(REPOSITORY)
    assert complete_values(profile)["convert"]["questions"] == "profiles/questions.yaml"
    write(tmp_path / "mine.yaml", {"extends": str(PROFILES / "embedded"), "convert": {"questions": "own.yaml"}})
    assert complete_values(tmp_path / "mine.yaml")["convert"]["questions"] == "own.yaml"


def test_a_dataset_a_model_and_a_base_are_enough_for_parameters():
    """The other sections have defaults, which do not depend on the working directory."""
    model = {"family": "onediff", "module": None, "lora": {"rank": 2, "alpha": 4}, "rates": {"llm": 0.001}}
    datasets = {"own": {"reader": "pairs", "root": "own"}}
    params = Params(ingest={"datasets": datasets}, models={"m": model}, train={"model": "m", "base": "base"})
    assert params.models["m"].rates == {"vision": None, "module": None, "projector": None, "llm": 0.001}
    assert Params(ingest=params.ingest, models=params.models, train=params.train) == params
    assert params.promote.protocol == "own/test"
    assert params.compute.workers == 0
    assert "difference" in load_questions(params.convert.questions)
    assert [fault for rule in PARAMS_RULES for fault in rule(params)] == []


def test_a_profile_that_is_replaced_by_another_is_not_kept():
    for name in ("paper", "one-gpu", "embedded"):
        use_profile(name, Path("params.yaml"), Path("profiles"))
    assert copies() == []


def copies() -> list[Path]:
    return list(Path().glob("params.yaml.bak-*"))


def test_parameters_that_are_no_profile_are_kept_in_copies():
    for epochs in (7, 8):
        text = resolved_text(Path("profiles/embedded.yaml")).replace("epochs: 2.7", f"epochs: {epochs}")
        Path("params.yaml").write_text(text)
        note, *changes = use_profile("paper", Path("params.yaml"), Path("profiles"))
        (copy,) = [copy for copy in copies() if copy.read_text() == text]
        assert str(copy) in note
        assert f"train.epochs: {epochs} -> 1" in changes
    assert len(copies()) == 2
    assert load_params() == load_params(Path("profiles/paper.yaml"))


@pytest.fixture
def two_profiles(folder: Path, tmp_path: Path) -> Path:
    """Return a folder with the profiles `embedded` and `paper` alone."""
    (tmp_path / "two").mkdir()
    for name in ("embedded.yaml", "paper.yaml"):
        shutil.copy(folder / name, tmp_path / "two")
    return tmp_path / "two"


def test_parameters_that_have_the_values_of_a_profile_are_not_kept(two_profiles):
    """A user may have written them without `m3diff profile`, or removed its comments."""
    write(Path("params.yaml"), complete_values(two_profiles / "embedded.yaml"))
    use_profile("paper", Path("params.yaml"), two_profiles)
    assert copies() == []


def test_invalid_parameters_are_kept_in_a_copy_and_replaced(two_profiles):
    write(Path("params.yaml"), "train: [\n")
    lines = use_profile("embedded", Path("params.yaml"), two_profiles)
    (copy,) = copies()
    assert copy.read_text() == "train: [\n"
    assert str(copy) in lines[0]
    assert len(lines) == 2, "values of an invalid file cannot be compared"


def test_the_values_of_an_invalid_file_get_no_defaults(folder):
    values = yaml.safe_load((folder / "embedded.yaml").read_text()) | {"train": {"epochs": -1}}
    assert complete_values(write(Path("params.yaml"), values)) == values


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
