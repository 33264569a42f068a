"""Format complete parameters as the text of `params.yaml`, with the description of each value as a comment.

DVC stops if a key that `dvc.yaml` refers to is missing in `params.yaml`, so the text contains every field of every
section. Named entries, such as datasets and models, have the keys that their profile gives them. A comment above them
lists all keys that an entry can have.

A comment behind a value in a profile is kept, because it usually says why the value was chosen.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel

from m3diff.settings.section import Section, field_types, narrow_types, sections_in
from m3diff.settings.tree import Params

WIDTH = 120
INDENT = "  "
Keys = tuple[str, ...]  # the keys that lead to a value, such as ("train", "epochs")
Comments = Mapping[Keys, str]  # the comment behind each value


def format_params(values: Mapping[str, Any], comments: Comments) -> str:
    """Return parameters as YAML with comments. Each section is a paragraph.

    Args:
        values: the values of all sections, in the form in which YAML has them.
        comments: comments to write behind values.
    """
    paragraphs = []
    descriptions = {
        field.alias or name: Params.field_descriptions()[name] for name, field in Params.model_fields.items()
    }
    annotations = field_types(Params)
    for key, value in values.items():
        lines = comment_lines(descriptions[key])
        annotation = annotations[key]
        if isinstance(annotation, type) and issubclass(annotation, Section):
            lines += section_lines(key, value, annotation, comments)
        else:
            lines += key_list(annotation, list(value.values()))
            lines += value_lines((key,), value, comments)
        paragraphs.append("\n".join(lines) + "\n")
    return "\n".join(paragraphs)


def section_lines(
    section_key: str, values: Mapping[str, Any], section: type[Section], comments: Comments
) -> Iterator[str]:
    """Yield the lines of a section: each value below its description."""
    yield from with_comment([f"{section_key}:"], comments.get((section_key,)), WIDTH)
    descriptions = section.field_descriptions()
    for key, annotation in field_types(section).items():
        value = values[key]
        is_collection = isinstance(value, Mapping) and not field_types(annotation)
        entries = list(value.values()) if is_collection else [value]
        lines = [*comment_lines(descriptions[key]), *key_list(annotation, entries)]
        lines += value_lines((section_key, key), value, comments)
        yield from (INDENT + line for line in lines)


def value_lines(keys: Keys, value: Any, comments: Comments) -> list[str]:
    """Return the lines of a key with its value, without the indentation of the section.

    A mapping is written on one line if it fits, if it contains no other mapping, and if no value in it has a comment.
    """
    key = inline(keys[-1])
    width = WIDTH - len(INDENT) * (len(keys) - 1)
    is_commented_within = any(path[: len(keys)] == keys and path != keys for path in comments)
    has_inner_mapping = isinstance(value, Mapping) and any(isinstance(item, Mapping) for item in value.values())
    line = f"{key}: {inline(value)}"
    is_one_line = len(line) <= width and "\n" not in line
    if is_one_line and not is_commented_within and not has_inner_mapping:
        return with_comment([line], comments.get(keys), width)
    if isinstance(value, Mapping) and value:
        lines = with_comment([f"{key}:"], comments.get(keys), width)
        for inner_key, inner_value in value.items():
            inner_lines = value_lines((*keys, str(inner_key)), inner_value, comments)
            lines += [INDENT + line for line in inner_lines]
        return lines
    text = yaml.safe_dump({keys[-1]: value}, width=width)
    return with_comment(text.splitlines(), comments.get(keys), width)


def with_comment(lines: list[str], comment: str | None, width: int) -> list[str]:
    """Return the lines of a value with a comment: behind the line, or above the lines if it does not fit."""
    if comment is None:
        return lines
    line = f"{lines[0]}  # {comment}"
    if len(lines) == 1 and len(line) <= width:
        return [line]
    return [*comment_lines(comment), *lines]


def inline(value: Any) -> str:
    """Return a value as YAML on one line, if it does not contain line breaks."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).removesuffix("...\n").strip()


def comment_lines(text: str, indent: str = "") -> list[str]:
    """Return a text as lines of comments. Each line is indented behind its `#`, and all but the first line further."""
    return textwrap.wrap(
        " ".join(text.split()),
        WIDTH - 2 * len(INDENT),
        initial_indent=f"# {indent}",
        subsequent_indent=f"# {indent}{INDENT if indent else ''}",
        break_long_words=False,
        break_on_hyphens=False,
    )


# Keys of entries


def key_list(annotation: Any, entries: Sequence[Any]) -> list[str]:
    """Return comments with the keys that entries can have, their meaning and defaults.

    Only sections and dataclasses have such keys. If an annotation allows several types of them, as in the section
    `augment`, only the types of the entries are described.

    Args:
        annotation: type of the entries, or of a mapping of them.
        entries: the entries in the parameters.
    """
    types = sections_in(annotation)
    if len(types) > 1 or any(hasattr(section, "settings_class") for section in types):
        types_of_entries = []
        for entry in entries:
            types_of_entries += narrow_types(types, entry)
        types = list(dict.fromkeys(types_of_entries))
    lines = []
    for section in types:
        title = first_sentence(inspect.getdoc(section) or "")
        lines += comment_lines(f"{title.removesuffix('.')}:")
        descriptions = descriptions_of(section)
        defaults = defaults_of(section)
        for key, inner_annotation in field_types(section).items():
            text = f"{key}: {first_sentence(descriptions[key])}"
            inner_keys = [", ".join(field_types(inner)) for inner in sections_in(inner_annotation)]
            if inner_keys:
                text += f" Keys: {'; or '.join(inner_keys)}."
            if key in defaults:
                text += f" Default: {inline(defaults[key])}"
            lines += comment_lines(text, INDENT)
    return lines


def descriptions_of(section: type[Any]) -> dict[str, str]:
    """Return the descriptions of the fields of a section or a dataclass, by name.

    A dataclass describes its fields in its docstring, or in that of a base class, as `name: description`.
    """
    if issubclass(section, Section):
        return section.field_descriptions()
    descriptions: dict[str, str] = {}
    for base in reversed(section.__mro__):
        paragraphs = re.findall(r"^(\w+): (.*(?:\n .*)*)", inspect.cleandoc(base.__doc__ or ""), re.MULTILINE)
        descriptions |= {name: " ".join(text.split()) for name, text in paragraphs}
    return {name: descriptions[name] for name in field_types(section) if name in descriptions}


def defaults_of(section: type[Any]) -> dict[str, Any]:
    """Return the default values of the fields of a section or a dataclass, by name, in the form in which YAML has them.

    Defaults that are created by a function are left out.
    """
    if issubclass(section, BaseModel):
        fields = section.model_fields.items()
        return {
            name: plain(field.default)
            for name, field in fields
            if not field.is_required() and not field.default_factory
        }
    fields_with_default = [field for field in dataclasses.fields(section) if field.default is not dataclasses.MISSING]
    return {field.name: plain(field.default) for field in fields_with_default}


def plain(value: Any) -> Any:
    """Return a default value in the form in which YAML has it."""
    return list(value) if isinstance(value, tuple) else value


def first_sentence(text: str) -> str:
    """Return the first sentence of a text."""
    first_paragraph = text.partition("\n\n")[0]
    return re.split(r"(?<=\.)\s", " ".join(first_paragraph.split()), maxsplit=1)[0]


# Comments in profiles


def comments_in(text: str) -> dict[Keys, str]:
    """Return the comment behind each value of a profile, on the line on which the value ends.

    For a mapping of several lines, it is the comment behind its key.
    """
    comments: dict[Keys, str] = {}
    lines = text.splitlines()
    for keys, key_node, value_node in _values_in(yaml.compose(text, Loader=yaml.SafeLoader), ()):
        is_block = isinstance(value_node, yaml.CollectionNode) and not value_node.flow_style
        mark = key_node.end_mark if is_block else value_node.end_mark
        rest_of_line = lines[mark.line][mark.column :] if mark.line < len(lines) else ""
        match = re.fullmatch(r":?\s+#\s*(.+)", rest_of_line)
        if match:
            comments[keys] = match[1]
    return comments


def _values_in(node: yaml.Node | None, keys: Keys) -> Iterator[tuple[Keys, yaml.Node, yaml.Node]]:
    """Yield the keys, the node of the last key and the node of the value, for each value of a mapping and within it."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        keys_of_value = (*keys, str(key_node.value))
        yield keys_of_value, key_node, value_node
        yield from _values_in(value_node, keys_of_value)
