"""Change the wording of every message in components/records/messages.toml: `python -m tests.reword`.

After it, only the snapshot tests/messages.txt and tests of HTTP bodies may fail: a program or a test that fails besides
reads a sentence where it should read the code and the fields. `git checkout components/records/messages.toml` undoes
it.
"""

import codecs
import json
import re
import tomllib

from m3diff.records.errors import MESSAGES

# Parts of a message that are not reworded: code in backquotes, commands on their own line, escaped braces, and fields
# with their formats
SYNTAX = r"`[^`]*`|^  m3diff [^\n]*|\{\{|\}\}|\{[^{}]*\}"
# A word of lowercase letters. Names such as params.yaml, train.base, utf-8 or --params are no words
WORD = r"(?<![^\s(\"'])[a-z]+(?:'[a-z]+)?(?=[.,;:?!)\"']*(?:\s|$))"


def reword(text: str) -> str:
    """Return the text with every letter of its words rotated by 13. Fields, code and line breaks stay."""

    def change(match: re.Match[str]) -> str:
        return match[0] if match[0][0] in "`{} " else codecs.encode(match[0], "rot13")

    return re.sub(f"{SYNTAX}|{WORD}", change, text, flags=re.MULTILINE)


def reword_catalogue(text: str) -> str:
    """Return a catalogue with the same codes and fields in other words; comments are left out."""
    lines = []
    for area, messages in tomllib.loads(text).items():
        for name, message in messages.items():
            lines.append(f"[{area}.{name}]")
            for part, template in message.items():
                lines.append(f"{part} = {json.dumps(reword(template), ensure_ascii=False)}")
            lines.append("")
    return "\n".join(lines)


def main() -> None:
    MESSAGES.write_text(reword_catalogue(MESSAGES.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
