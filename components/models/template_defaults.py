"""Write arguments of a chat template into the template itself, as defaults.

    {%- set enable_thinking = enable_thinking if enable_thinking is defined else false %}

Whoever renders the template without arguments then gets the prompts of the training: this project, a script that uses
transformers alone, or vLLM. Arguments of a call replace the defaults.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def with_defaults(template: str, arguments: Mapping[str, Any]) -> str:
    """Return a chat template that renders as if it were called with these arguments.

    transformers removes the line end after a block, so the first line adds nothing to a prompt.

    Args:
        template: a template of Jinja.
        arguments: the arguments. Their names are identifiers, and their values those of YAML.
    """
    lines = ""
    for name, value in arguments.items():
        lines += f"{{%- set {name} = {name} if {name} is defined else {jinja_literal(value)} %}}\n"
    return template if template.startswith(lines) else lines + template


def jinja_literal(value: Any) -> str:
    """Return a value as an expression of Jinja, which is JSON with `none` instead of `null`."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{jinja_literal(key)}: {jinja_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(jinja_literal(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)
