"""`params.yaml` and profiles: read, laid over what they extend, checked, and written as the next run's.

Unknown keys are refused, and faults are named together, before anything runs. Fields carry the unit in their name or
in a comment. `rules.py` checks one section against another.

A profile is a file of `profiles/` that names what it `extends` and the few values that differ. Sections are laid over
each other key by key; a collection by name (`ingest.datasets`, `convert.sources`, `synthesize`, `augment`,
`promote.guards`) is replaced whole where a profile names it. An inherited `synthesize` or `augment` keeps only the
datasets that the profile ingests.
"""

import datetime
import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from m3diff.provenance.dvc import lookup
from m3diff.records.files import write_atomic
from m3diff.settings.rules import RULES
from m3diff.settings.section import ParamsError, explain
from m3diff.settings.tree import Params

EXTENDS = "extends"
# Collections by name: a profile that names one replaces it
REPLACED = (("ingest", "datasets"), ("convert", "sources"), ("synthesize",), ("augment",), ("promote", "guards"))

FIELDS = "profiles/embedded.yaml says what each value is."


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML that refuses a key that is written twice; in C where PyYAML was built with it."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                words = f"{key.value}: is written twice; remove one of the two"
                raise yaml.constructor.ConstructorError(None, None, words, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """A parameter file as it is written.

    Raises:
        ParamsError: there is no such file, it is no YAML mapping, or a key is written twice.
    """
    if not path.is_file():
        raise ParamsError(
            f"{path}: no such file; run from the project's root, pass --params, or `m3diff profile embedded` writes one"
        )
    try:
        raw = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParamsError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ParamsError(f"{path}: expected sections, found {'nothing' if raw is None else type(raw).__name__}")
    return raw


def resolve(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a parameter file laid over what it extends. `above`: the files that extend it.

    Raises:
        ParamsError: a file cannot be read, or files extend each other in a circle.
    """
    if path in above:
        raise ParamsError(f"{above[-1]}: extends {path.stem}, which extends this file; one of them must be complete")
    values = read_yaml(path)
    if (name := values.get(EXTENDS)) is None:
        return values
    below = path.parent / f"{name}.yaml"
    if not below.is_file():
        raise ParamsError(f"{path}: extends {name}, but {below} is not there; name a file in the same folder")
    return lay_over(resolve(below, (*above, path)), values)


def lay_over(below: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """The values of a complete file under those of a profile."""
    merged = _merge(below, {key: value for key, value in overlay.items() if key != EXTENDS})
    ingested = lookup(merged, "ingest.datasets")
    for section in ("synthesize", "augment"):
        made = merged.get(section)
        if section not in overlay and isinstance(made, dict) and isinstance(ingested, dict):
            merged[section] = {name: entry for name, entry in made.items() if name in ingested}
    return merged


def _merge(below: Any, overlay: Any, at: tuple[str, ...] = ()) -> Any:
    if at in REPLACED or not isinstance(below, dict) or not isinstance(overlay, dict):
        return overlay
    return below | {key: _merge(below.get(key), value, (*at, key)) for key, value in overlay.items()}


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check a parameter file, or a profile with what it extends. Nothing is run and nothing heavy imported.

    Files and folders that a stage reads need not be there: `check_paths` looks for them when the stage starts.

    Raises:
        ParamsError: the file is missing, is no YAML mapping, or breaks a rule. Every fault of single values is listed;
            where there is none, every fault between values.
    """
    raw = resolve(path)
    try:
        params = Params.model_validate(raw)
        faults = [fault for rule in RULES for fault in rule(params)]
    except ValidationError as error:
        faults = explain(error, raw, Params)
    if not faults:
        return params
    lines = dict.fromkeys(faults)
    raise ParamsError(f"{path}: {len(lines)} fault(s)\n" + "\n".join(f"  {line}" for line in lines))


# Profiles


def profiles(folder: Path) -> Iterator[Path]:
    """The files of a folder that are profiles, not other YAML."""
    return (path for path in sorted(folder.glob("*.yaml")) if {EXTENDS, "paths"} & read_yaml(path).keys())


def find_profile(name: str, folder: Path) -> Path:
    """Raises ParamsError, listing the profiles there are."""
    known = {path.stem: path for path in profiles(folder)}
    if name not in known:
        raise ParamsError(f"profile {name!r}: {folder} has {', '.join(known) or 'none'}")
    return known[name]


def differences(old: dict[str, Any], new: dict[str, Any], at: str = "") -> Iterator[str]:
    """A line for each value that differs: `train.epochs: 5 -> 1`; of a mapping that is gone, one: `synthesize.x:
    removed`."""
    for key in old | new:
        before, after = old.get(key), new.get(key)
        if before and isinstance(before, dict) and key not in new:
            yield f"{at}{key}: removed"
        elif isinstance(before, dict) and isinstance(after, dict):
            yield from differences(before, after, f"{at}{key}.")
        elif before != after or (key in old) != (key in new):
            lines = [
                yaml.safe_dump(value, default_flow_style=True, width=1180).split("\n")[0] for value in (before, after)
            ]
            yield f"{at}{key}: {lines[0] if key in old else '-'} -> {lines[1] if key in new else '-'}"


def use_profile(name: str, target: Path, folder: Path) -> list[str]:
    """Make a profile the parameters of the next run.

    A `target` that is equal to no profile of `folder` is somebody's work: a copy is kept next to it first.

    Returns:
        lines that say what changed and where the copy is.
    Raises:
        ParamsError: there is no such profile, or it is wrong.
    """
    source = find_profile(name, folder)
    values = resolve(source)
    lines: list[str] = []
    before: dict[str, Any] | None = None
    if target.is_file():
        with suppress(ParamsError):  # a broken file has no values to compare, but it is kept all the same
            before = resolve(target)
        if before not in [resolve(path) for path in profiles(folder)]:
            copy = target.with_name(f"{target.name}.bak-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}")
            write_atomic(copy, target.read_bytes())
            lines.append(f"{target} differs from every profile; a copy of it is {copy}")
    write_atomic(target, written(source))
    if before == values:
        return [*lines, f"{target} has these values already"]
    return [*lines, *(differences(before, values) if before else [f"{target} is written"])]


def written(source: Path) -> str:
    """The text of a resolved profile, a section a paragraph, with the comment that its file begins with; a complete
    file is passed on as it is."""
    text = source.read_text(encoding="utf-8")
    if EXTENDS not in read_yaml(source):
        return text
    head = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    title = f"# The profile {source.stem}, as `m3diff profile {source.stem}` wrote it; {FIELDS}\n#\n"
    sections = [yaml.safe_dump({key: value}, sort_keys=False, width=118) for key, value in resolve(source).items()]
    return title + head + "\n" + "\n".join(sections)
