"""Parameter files on disk: read without a surprise, laid over what they extend, and written as the next run's.

A profile is a file of `profiles/` that names what it `extends` and the few values that differ. Sections are laid over
each other key by key; a collection by name (`ingest.datasets`, `convert.sources`, `synthesize`, `augment`,
`promote.guards`) is replaced whole where a profile names it. An inherited `synthesize` or `augment` keeps only the
datasets that the profile ingests.
"""

import datetime
import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from m3diff.records.files import write_atomic
from m3diff.settings.section import ParamsError

EXTENDS = "extends"
REPLACED = (("ingest", "datasets"), ("convert", "sources"), ("synthesize",), ("augment",), ("promote", "guards"))
"""Collections by name: a profile that names one replaces it."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML that notes every key that is written twice; in C where PyYAML was built with it."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.twice: list[str] = []

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                self.twice.append(
                    f"{key.value}: written twice, in lines {seen[key.value]} and {line}; remove one of the two"
                )
            seen.setdefault(key.value, line)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> tuple[dict[str, Any], list[str]]:
    """A parameter file as it is written, and a line for each key that is written twice.

    Raises:
        ParamsError: there is no such file, or it is no YAML mapping.
    """
    if not path.is_file():
        raise ParamsError(
            f"{path}: no such file; run from the project's root, pass --params, or `m3diff profile embedded` writes one"
        )
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        raw = loader.get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParamsError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ParamsError(f"{path}: expected sections, found {'nothing' if raw is None else type(raw).__name__}")
    return raw, loader.twice


def chain(path: Path) -> dict[Path, tuple[dict[str, Any], list[str]]]:
    """A parameter file and what it extends, as they are written, the complete file first.

    Raises:
        ParamsError: a file that is extended is not there, or files extend each other in a circle.
    """
    found = {path: read_yaml(path)}
    at = path
    while (name := found[at][0].get(EXTENDS)) is not None:
        below = at.parent / f"{name}.yaml"
        if below in found:
            raise ParamsError(f"{at}: extends {name}, which extends this file; one of them must be complete")
        if not below.is_file():
            raise ParamsError(f"{at}: extends {name}, but {below} is not there; name a file beside this one")
        found[below] = read_yaml(below)
        at = below
    return dict(reversed(found.items()))


def resolve(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The values of a parameter file laid over what it extends, and a line for each key that is written twice.

    Raises:
        ParamsError: a file is missing or is no YAML mapping.
    """
    values: dict[str, Any] = {}
    faults: list[str] = []
    for file, (overlay, twice) in chain(path).items():
        faults += [line if file == path else f"{file}: {line}" for line in twice]
        values = lay_over(values, overlay) if overlay.get(EXTENDS) is not None else overlay
    values.pop(EXTENDS, None)
    return values, faults


def lay_over(below: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """What a profile says on top of what it extends."""
    merged = _merge(below, overlay)
    ingest = merged.get("ingest")
    datasets = ingest.get("datasets") if isinstance(ingest, dict) else None
    ingested = datasets if isinstance(datasets, dict) else {}
    for section in ("synthesize", "augment"):
        if section not in overlay and isinstance(merged.get(section), dict):
            made = merged[section]
            for name in [name for name in made if name not in ingested]:
                del made[name]
            merged[section] = made or {}
    return merged


def _merge(below: Any, overlay: Any, at: tuple[str, ...] = ()) -> Any:
    """`overlay` on `below`, key by key. Works on a copy's type, so that ruamel's mappings keep their comments."""
    if at in REPLACED or not isinstance(below, dict) or not isinstance(overlay, dict):
        return overlay
    for key, value in overlay.items():
        if key != EXTENDS or at:
            below[key] = _merge(below[key], value, (*at, key)) if key in below else value
            comments = getattr(overlay, "ca", None)
            if comments is not None and key in comments.items:
                getattr(below, "ca").items[key] = comments.items[key]  # noqa: B009
    return below


def leaves(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping, with its place: `train.epochs`. An empty mapping counts as a value."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, (*at, str(key)))
    else:
        yield ".".join(at), value


def unusable_numbers(raw: Mapping[str, Any]) -> Iterator[str]:
    """A line for each value that is infinite or no number, in lists too."""
    for where, value in leaves(raw):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, float) and not math.isfinite(item):
                yield f"{where}: expected a finite number (found {item})"


def profiles(folder: Path) -> Iterator[Path]:
    """The files of a folder that are profiles, not other YAML."""
    for path in sorted(folder.glob("*.yaml")):
        if {EXTENDS, "paths"} & read_yaml(path)[0].keys():
            yield path


def find_profile(name: str, folder: Path) -> Path:
    """Raises ParamsError, listing the profiles there are."""
    known = {path.stem: path for path in profiles(folder)}
    if name not in known:
        raise ParamsError(f"profile {name!r}: {folder} has {', '.join(known) or 'none'}")
    return known[name]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each value that differs: `train.epochs: 5 -> 1`."""
    before, after = dict(leaves(old)), dict(leaves(new))
    places = [*before, *(place for place in after if place not in before)]
    absent = object()
    lines = {
        _gone(place, new): f"{place}: {_shown(before, place)} -> {_shown(after, place)}"
        for place in places
        if before.get(place, absent) != after.get(place, absent)
    }
    return [line if place in before or place in after else f"{place}: removed" for place, line in lines.items()]


def _gone(place: str, new: Mapping[str, Any]) -> str:
    """Of a value whose mapping is not there any more, the mapping's place: `synthesize.minichange` of all that it held.
    Else the value's own."""
    at: Any = new
    keys = place.split(".")
    for depth, key in enumerate(keys, start=1):
        if not isinstance(at, Mapping) or not at or key not in at:
            return ".".join(keys[:depth]) if isinstance(at, Mapping) else place
        at = at[key]
    return place


def _shown(values: Mapping[str, Any], place: str) -> str:
    return yaml.safe_dump(values[place], default_flow_style=True, width=1000).split("\n")[0] if place in values else "-"


def use_profile(name: str, target: Path, folder: Path) -> list[str]:
    """Make a profile the parameters of the next run; comments of every file in its chain are kept.

    A `target` that is equal to no profile of `folder` is somebody's work: a copy is kept beside it first.

    Returns:
        lines that say what changed and where the copy is.
    Raises:
        ParamsError: there is no such profile, or it is wrong.
    """
    source = find_profile(name, folder)
    values, _ = resolve(source)
    said: list[str] = []
    before: dict[str, Any] | None = None
    if target.is_file():
        before, known = _values_or_none(target), [resolve(path)[0] for path in profiles(folder)]
        if before not in known:
            said.append(f"{target} differs from every profile; a copy of it is {keep_copy(target)}")
    said += differences(before, values) if before else [f"{target} is written"]
    said += [] if before != values else [f"{target} has these values already"]
    write_atomic(target, written(source))
    return said


def _values_or_none(path: Path) -> dict[str, Any] | None:
    """A broken parameter file has no values to compare, but it is kept all the same."""
    try:
        return resolve(path)[0]
    except ParamsError:
        return None


def keep_copy(path: Path) -> Path:
    """A copy beside the file, with the time in its name; no copy replaces another."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    copy = path.with_name(f"{path.name}.bak-{stamp}")
    write_atomic(copy, path.read_bytes())
    return copy


def written(source: Path) -> str:
    """The text of a resolved profile; the complete file that others extend is passed on as it is."""
    files = list(chain(source))
    text = files[0].read_text(encoding="utf-8")
    if len(files) == 1:
        return text
    merged = load_commented(text)
    for file in files[1:]:
        merged = lay_over(merged, load_commented(file.read_text(encoding="utf-8")))
    title = f"# The profile {source.stem}, as `m3diff profile {source.stem}` wrote it.\n#\n"
    return (
        title
        + _head(source.read_text(encoding="utf-8"))
        + "\n"
        + dump_commented(merged).removeprefix(_head(text)).lstrip()
    )


def _head(text: str) -> str:
    """The comment that a file begins with."""
    return "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))


def load_commented(text: str) -> Any:
    """YAML as mappings that keep comments and layout."""
    return _round_trip().load(text)


def dump_commented(values: Any) -> str:
    text = io.StringIO()
    _round_trip().dump(values, text)
    return _spaced(text.getvalue())


def _spaced(text: str) -> str:
    """An empty line before each section and after the head, no other: comments that moved took such lines along."""
    head = _head(text)
    lines = [line for line in text.removeprefix(head).split("\n") if line.strip()]
    starts = [re.match(r"\w+:", line) and not above.startswith("#") for above, line in itertools.pairwise(["", *lines])]
    return head + "".join(("\n" if start else "") + line + "\n" for start, line in zip(starts, lines, strict=True))


def _round_trip() -> Any:
    from ruamel.yaml import YAML

    both_ways = YAML()
    both_ways.width = 120
    both_ways.preserve_quotes = True
    both_ways.indent(mapping=2, sequence=4, offset=2)
    both_ways.representer.add_representer(
        type(None), lambda representer, _: representer.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    return both_ways
