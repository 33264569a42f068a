"""Format lines of `m3diff data check` about several rows: a few examples, and the number of remaining rows."""

from collections.abc import Sequence

MAX_EXAMPLES = 5


def list_examples(heading: str, examples: Sequence[str], count: int) -> list[str]:
    """Return the lines of a list: the heading, the examples, and the number of rows that are not shown.

    Args:
        count: number of all rows, including those that are not shown.
    """
    lines = [f"  {heading}"]
    lines += [f"    {example}" for example in examples]
    if count > len(examples):
        lines.append(f"    and {count - len(examples):,} more")
    return lines


def list_problems(kind: str, problems: Sequence[str]) -> list[str]:
    """Return lines with the number of problems of a kind and the first problems, or [] if there are no problems."""
    if not problems:
        return []
    return list_examples(f"{kind}: {len(problems):,}", problems[:MAX_EXAMPLES], len(problems))
