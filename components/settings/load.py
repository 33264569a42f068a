"""Read, merge and check parameter files, and write a profile as the parameters of the next run.

Parameters are read from `params.yaml`. Unknown keys are rejected, and all faults are reported together before anything
runs. `rules.py` checks combinations of values.

A profile is a file in `profiles/`. It sets only the values that differ from the defaults in the sections, or from the
file that it extends with the key `extends`. Sections are merged key by key. Collections of named entries
(`ingest.datasets`, `convert.sources`, `synthesize`, `augment`, `promote.guards`) are not merged: if a profile sets such
a collection, it replaces the inherited collection. If `synthesize` or `augment` is inherited, only the datasets that
the profile ingests are kept.

`m3diff profile` writes a profile to `params.yaml` with all defaults, because DVC needs every key.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from m3diff.provenance.dvc import REFERENCE, lookup
from m3diff.records.errors import Fault, cause_of
from m3diff.records.files import write_atomic
from m3diff.settings.parameter_file import Keys, comments_in, format_params
from m3diff.settings.rules import PARAMS_RULES
from m3diff.settings.section import ParamsError, Section, faults_of_validation_error, fields_of_name
from m3diff.settings.tree import Params

EXTENDS_KEY = "extends"
# Keys of the collections of named entries, which a profile replaces as a whole
REPLACED_COLLECTIONS = (
    ("ingest", "datasets"),
    ("convert", "sources"),
    ("synthesize",),
    ("augment",),
    ("promote", "guards"),
)

DIGEST_LINE = re.compile(r"^# Digest of the lines below: ([0-9a-f]{64})\n", re.MULTILINE)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader that rejects duplicate keys. It uses PyYAML's C parser if available."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # PyYAML rejects it below
            if key.value in keys:
                raise ParamsError("settings.key_written_twice", key=key.value, line=key.start_mark.line + 1)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the values in a parameter file, without inherited values.

    Raises:
        ParamsError: the file does not exist, is not a YAML mapping, or contains duplicate keys.
    """
    if not path.is_file():
        raise ParamsError("settings.no_file", path=path)
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        raw = _Loader(text).get_single_data()
    except ParamsError as error:
        raise ParamsError(error.fault.at(path=path)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        fault = _tab_fault(text, error) or Fault("settings.not_yaml", cause=cause_of(error))
        raise ParamsError(fault.at(path=path)) from error
    if raw is None:
        raise ParamsError("settings.empty_file", path=path)
    if not isinstance(raw, dict):
        raise ParamsError("settings.no_sections", path=path, kind=type(raw).__name__)
    return raw


def _tab_fault(text: str, error: Exception) -> Fault | None:
    """Return a fault if YAML's error is caused by a tab that indents a line, otherwise None.

    YAML only reports such a tab as an unknown token.
    """
    mark = getattr(error, "problem_mark", None)
    lines = text.splitlines()
    if mark is None or mark.line >= len(lines):
        return None
    line = lines[mark.line]
    indent = line[: len(line) - len(line.lstrip())]
    if "\t" not in indent:
        return None
    return Fault("settings.tab_indents", line=mark.line + 1)


def resolve_profile(path: Path, extending_files: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the values of a parameter file, merged with the file that it extends.

    Args:
        path: the parameter file.
        extending_files: the files that extend this file, outermost first.

    Raises:
        ParamsError: a file is missing or invalid, or files extend each other in a circle.
    """
    if path in extending_files:
        raise ParamsError("settings.profiles_in_a_circle", path=extending_files[-1], value=path.stem)
    values = read_yaml(path)
    base_name = values.get(EXTENDS_KEY)
    if base_name is None:
        return values
    base = path.parent / f"{base_name}.yaml"
    if not base.is_file():
        raise ParamsError("settings.no_file_to_extend", path=path, value=base_name, file=base)
    return merge_profile(resolve_profile(base, (*extending_files, path)), values)


def merge_profile(base: dict[str, Any], profile: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a complete file with the changes of a profile applied."""
    merged = _merge_values(base, {key: value for key, value in profile.items() if key != EXTENDS_KEY})
    ingested_datasets = lookup(merged, "ingest.datasets")
    for section in ("synthesize", "augment"):
        inherited_entries = merged.get(section)
        if section not in profile and isinstance(inherited_entries, dict) and isinstance(ingested_datasets, dict):
            merged[section] = {name: entry for name, entry in inherited_entries.items() if name in ingested_datasets}
    return merged


def complete_values(path: Path) -> dict[str, Any]:
    """Return the values of a parameter file, with inherited values, and the defaults of all other fields of sections.

    The values of an invalid file are returned without defaults.

    Raises:
        ParamsError: a file is missing or is not a YAML mapping, or files extend each other in a circle.
    """
    values = resolve_profile(path)
    try:
        params = Params.model_validate(values)
    except ValidationError:
        return values
    complete: dict[str, Any] = {}
    for name, field in Params.model_fields.items():
        key = field.alias or name
        section = getattr(params, name)
        if isinstance(section, Section):
            complete[key] = _defaults_of(section) | values.get(key, {})
        else:
            complete[key] = values.get(key, {})
    return complete


def _defaults_of(section: Section) -> dict[str, Any]:
    """Return the values of a section as YAML has them. A file of the package is relative to the working directory.

    If the package is in the working directory, the parameters are then valid in every copy of the project.
    """
    values = section.model_dump(mode="json", by_alias=True)
    for name, value in section:
        if isinstance(value, Path) and value.is_relative_to(Path.cwd()):
            values[name] = str(value.relative_to(Path.cwd()))
    return values


def _merge_values(base: Any, overlay: Any, keys: tuple[str, ...] = ()) -> Any:
    """Return the values at `keys` after applying a profile. Only mappings that are not collections are merged."""
    if keys in REPLACED_COLLECTIONS or not isinstance(base, dict) or not isinstance(overlay, dict):
        return overlay
    merged = dict(base)
    for key, value in overlay.items():
        merged[key] = _merge_values(base.get(key), value, (*keys, key))
    return merged


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check a parameter file, or a profile with the file that it extends, without heavy imports.

    Files and folders that a stage reads do not have to exist yet, because `check_paths` checks them when the stage
    starts.

    Raises:
        ParamsError: the file is missing, is not a YAML mapping, or breaks a rule. Its field `faults` lists all faults
            of individual values. If each value is valid, it lists all faults of combinations of values.
    """
    raw = resolve_profile(path)
    faults: list[Fault] = []
    try:
        params = Params.model_validate(raw)
        for rule in PARAMS_RULES:
            faults += rule(params)
        faults += _faults_of_keys_for_dvc(path)
    except ValidationError as error:
        faults = faults_of_validation_error(error, raw, Params)
    if not faults:
        return params
    distinct_faults = list(dict.fromkeys(faults))
    raise ParamsError("settings.faults", path=path, count=len(distinct_faults), faults=distinct_faults)


def _faults_of_keys_for_dvc(path: Path) -> Iterator[Fault]:
    """Yield a fault for each key that dvc.yaml refers to and that is missing or null in the params.yaml beside it.

    DVC reads this file without defaults and stops at such a key.
    """
    dvc_file = path.with_name("dvc.yaml")
    if path.name != "params.yaml" or not dvc_file.is_file():
        return
    values = read_yaml(path)
    sections = {field.alias or name for name, field in Params.model_fields.items()}
    for key in dict.fromkeys(REFERENCE.findall(dvc_file.read_text(encoding="utf-8"))):
        if key.partition(".")[0] in sections and lookup(values, key) is None:
            yield Fault("settings.no_key_for_dvc", key=key)


# Profiles


def profile_files(folder: Path) -> Iterator[Path]:
    """Yield the profiles in a folder. YAML files without parameters, such as lists of questions, are skipped."""
    for path in sorted(folder.glob("*.yaml")):
        keys = read_yaml(path).keys()
        if EXTENDS_KEY in keys or "ingest" in keys:
            yield path


def find_profile(name: str, folder: Path) -> Path:
    """Return the file of a profile.

    Raises:
        ParamsError: the folder does not contain the profile. The field `names` lists the existing profiles.
    """
    profiles = {path.stem: path for path in profile_files(folder)}
    if name not in profiles:
        raise ParamsError("settings.unknown_profile", folder=folder, **fields_of_name(name, profiles))
    return profiles[name]


def list_differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a line for each value that differs, such as `train.epochs: 5 -> 1`.

    For a mapping that was removed, yield a single line such as `synthesize.x: removed`.

    Args:
        old: values before the change.
        new: values after the change.
        prefix: key of these values followed by a dot, or an empty string for all parameters.
    """
    for key in old | new:
        old_value = old.get(key)
        new_value = new.get(key)
        if old_value and isinstance(old_value, dict) and key not in new:
            yield f"{prefix}{key}: removed"
        elif isinstance(old_value, dict) and isinstance(new_value, dict):
            yield from list_differences(old_value, new_value, f"{prefix}{key}.")
        elif old_value != new_value or (key in old) != (key in new):
            old_text = _format_value(old_value) if key in old else "-"
            new_text = _format_value(new_value) if key in new else "-"
            yield f"{prefix}{key}: {old_text} -> {new_text}"


def _format_value(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1180).split("\n")[0]


def use_profile(name: str, target: Path, folder: Path) -> list[str]:
    """Write the values of a profile to the parameter file of the next run.

    If a user has edited the target, so that it differs from every profile, the target is first copied, so that no work
    is lost. The copy is in the same folder, and its name includes a hash of the content.

    Args:
        name: name of the profile.
        target: parameter file to write.
        folder: folder with the profiles.

    Returns:
        Lines that describe what changed and where the copy is, or an empty list if the target already has these values.

    Raises:
        ParamsError: the folder does not contain the profile, or the profile is invalid.
    """
    source = find_profile(name, folder)
    values = complete_values(source)
    lines: list[str] = []
    old_values: dict[str, Any] | None = None
    if target.is_file():
        with suppress(ParamsError):  # an invalid file cannot be compared, but it is copied anyway
            old_values = complete_values(target)
        if not is_unedited(target):
            values_of_profiles = [complete_values(path) for path in profile_files(folder)]
            if old_values not in values_of_profiles:
                copy = back_up(target)
                lines.append(f"{target} differs from every profile; a copy of it is {copy}")
    write_atomic(target, resolved_text(source))
    if old_values:
        lines += list_differences(old_values, values)
    else:
        lines.append(f"{target} is written")
    return lines


def is_unedited(target: Path) -> bool:
    """Return whether the file is unchanged since `m3diff profile` wrote it. Later changes of profiles do not matter."""
    text = target.read_text(encoding="utf-8", errors="replace")
    digest_line = DIGEST_LINE.search(text)
    if digest_line is None:
        return False
    body = text[digest_line.end() :]
    return digest_line[1] == _digest_text(body)


def back_up(target: Path) -> Path:
    """Copy a file within its folder and return the copy. The name includes a hash, so equal files share one copy."""
    content = target.read_bytes()
    copy = target.with_name(f"{target.name}.bak-{hashlib.sha256(content).hexdigest()[:12]}")
    if not copy.is_file():
        write_atomic(copy, content)
    return copy


def resolved_text(source: Path) -> str:
    """Return the complete parameters of a profile as YAML. The comment above each value describes it.

    The text begins with a digest, by which later edits are detected, and the comment at the top of the profile.
    """
    head = itertools.takewhile(lambda line: line.startswith("#"), source.read_text(encoding="utf-8").splitlines())
    title = f"# The profile {source.stem}, as `m3diff profile {source.stem}` wrote it.\n"
    parameters = format_params(complete_values(source), _comments_of_profile(source))
    body = "\n".join(["#", *head, "", parameters])
    return f"{title}# Digest of the lines below: {_digest_text(body)}\n{body}"


def _comments_of_profile(source: Path) -> dict[Keys, str]:
    """Return the comments behind the values of a profile and of the files that it extends.

    The comment of an inherited value is left out if the profile sets another value.
    """
    values = read_yaml(source)
    comments = comments_in(source.read_text(encoding="utf-8"))
    base_name = values.get(EXTENDS_KEY)
    if base_name is None:
        return comments
    replaced_keys = set(_replaced_keys(values))
    for keys, comment in _comments_of_profile(source.parent / f"{base_name}.yaml").items():
        outer_keys = {keys[:length] for length in range(1, len(keys) + 1)}
        if outer_keys.isdisjoint(replaced_keys):
            comments.setdefault(keys, comment)
    return comments


def _replaced_keys(values: Mapping[str, Any], keys: Keys = ()) -> Iterator[Keys]:
    """Yield the keys of the inherited values that a profile replaces as a whole.

    Args:
        values: values of the profile.
        keys: keys that lead to these values.
    """
    for key, value in values.items():
        keys_of_value = (*keys, str(key))
        if isinstance(value, Mapping) and keys_of_value not in REPLACED_COLLECTIONS:
            yield from _replaced_keys(value, keys_of_value)
        else:
            yield keys_of_value


def _digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
