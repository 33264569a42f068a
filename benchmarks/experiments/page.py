"""Format the results of an experiment as a Markdown page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m3diff.records.files import write_atomic

BASE = "the base"  # row of the base in the tables of a retention dataset

SCORES = {  # maps the compared scores to their column headings; all scores are multiplied by 100
    "exact_match": "exact match, %",
    "CIDEr": "CIDEr",
    "change_type_accuracy": "type correct, %",
    "change_exact_accuracy": "all correct, %",
    "no_change_recall": "no change seen as such, %",
    "multi_change_exact_f1": "several changes, F1",
    "reversal": "swapped, inverse named, %",
    "CIDEr_shuffled": "CIDEr, shuffled",
}
METRICS = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")
BUDGET = {
    "pairs": "pairs that train",
    "epochs": "epochs",
    "steps": "optimizer steps",
    "captions": "captions trained on",
    "alignment_pairs": "pairs of the alignment before",
    "alignment_steps": "its steps",
}

Results = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


def write(results: Results, out: Path) -> str:
    """Write the Markdown page next to the results. Return its text and a line with the paths of both files.

    Args:
        out: path of the results (JSON).
    """
    text = "\n".join(markdown(results)) + "\n"
    write_atomic(out.with_suffix(".md"), text)
    return f"{text}written to {out} and {out.with_suffix('.md')}"


def markdown(results: Results) -> Iterator[str]:
    """Yield the lines of the page. Tables for which there are no results are left out."""
    seeds = f"seed{'s' * (len(results['seeds']) > 1)} {', '.join(map(str, results['seeds']))}"
    yield f"# {results['title']}"
    yield ""
    yield f"`{results['command']}`, {seeds}. {results['note']}".strip()
    yield ""
    if results.get("budgets"):
        yield from budgets(results["budgets"])
    if "measured" in results:
        yield from costs(results)
    for protocol in results["protocols"] if "scores" in results else ():
        yield from intervals(results["scores"], protocol)
    for protocol, rows in results["protocols"].items():
        yield from protocol_tables(results, protocol, rows)
    if "targets" in results:
        yield from targets(results["targets"])
    for line in results["left_out"].values():
        yield f"- {line}"


def protocol_tables(results: Results, protocol: str, rows: Rows) -> Iterator[str]:
    """Yield the tables of a protocol: means, and differences from the reference variants and at equal steps."""
    yield from means(protocol, rows, len(results["seeds"]))
    references = [row["row"] for row in rows if row["row"] == BASE]
    for name in [*references, *results["compare_with"]]:
        if name not in results["left_out"]:
            compared_rows = {row["row"]: (row, name) for row in rows if row["row"] not in (name, BASE)}
            yield from differences(f"difference to *{name}*", rows, compared_rows)
    same_steps_rows = {
        f"{row['row']}, to *{row['same_steps_as']}*": (row, row["same_steps_as"])
        for row in rows
        if row.get("same_steps_as")
    }
    if same_steps_rows:
        yield from differences("difference on as many steps", rows, same_steps_rows)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, followed by an empty line."""
    columns = list(head)
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for cells in rows:
        yield f"| {' | '.join(cells)} |"
    yield ""


def format_percent(value: float | None, sign: str = "") -> str:
    """Return a score times 100 with one decimal, or an empty string for None.

    Args:
        sign: "+" to add a plus sign to positive values.
    """
    return "" if value is None else f"{100 * value:{sign}.1f}"


def budgets(variants: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the table of budgets. It has columns about alignment only if a variant has an alignment phase."""
    has_alignment = {key: any(budget[key] for budget in variants.values()) for key in BUDGET}
    fields = [key for key in BUDGET if not key.startswith("alignment") or has_alignment[key]]
    formats = {key: ".3f" if key == "epochs" else "," for key in fields}
    rows = []
    for name, budget in variants.items():
        cells = [format(budget[key], number_format) for key, number_format in formats.items()]
        rows.append([name, *cells])
    return table(["trained on", *(BUDGET[key] for key in fields)], rows)


def costs(results: Results) -> Iterator[str]:
    """Yield the table of costs, including the area under the ROC curve of "no change" for each protocol."""
    epochs = results["epochs"]
    protocols = list(results["protocols"])
    columns = ["parameters that train", "GFLOP a caption", "captions/s", "s a step", "epochs in equal seconds"]
    columns += [f"ROC area of no change, {protocol}" for protocol in protocols]
    rows = []
    for name, cost in results["measured"].items():
        cells = [
            name,
            f"{cost['parameters']:,}",
            f"{cost['caption_gflop']:.2f}",
            f"{cost['captions_per_s']:.0f}",
            f"{cost['step_s']:.3f}",
            f"{epochs['equal seconds'].get(name, epochs['equal pairs']):g}",
        ]
        cells += [format_percent(cost["no_change_auc"][protocol]) for protocol in protocols]
        rows.append(cells)
    return table(["variant", *columns], rows)


def intervals(scores: Mapping[str, Mapping[str, Any]], protocol: str) -> Iterator[str]:
    """Yield the table of a protocol's metrics with their confidence intervals."""
    metrics = [metric for metric in METRICS if any(metric in by_protocol[protocol] for by_protocol in scores.values())]
    rows = []
    for name, by_protocol in scores.items():
        cells = [format_with_interval(by_protocol[protocol].get(metric), "score") for metric in metrics]
        rows.append([name, *cells])
    return table([f"`{protocol}`, times 100 (95 % interval over pairs)", *metrics], rows)


def format_with_interval(cell: Mapping[str, Any] | None, key: str, sign: str = "") -> str:
    """Return a value as text, followed by its interval if there is one. Return an empty string if `cell` is None.

    Args:
        key: the key of the value in `cell`.
        sign: "+" to add a plus sign to positive values.
    """
    if cell is None:
        return ""
    low = format_percent(cell["low"], sign)
    high = format_percent(cell["high"], sign)
    value = format_percent(cell[key], sign)
    return f"{value} ({low} to {high})" if low else value


def available_scores(rows: Rows) -> dict[str, str]:
    """Return the compared scores that at least one variant has, with their headings.

    Some scores are missing if captions cannot be parsed.
    """
    return {score: title for score, title in SCORES.items() if any(score in row["scores"] for row in rows)}


def means(protocol: str, rows: Rows, seeds: int) -> Iterator[str]:
    """Yield the table of means over the seeds, with standard deviations if there are several seeds."""
    spread = ", mean ± standard deviation" if seeds > 1 else ""
    corner = f"`{protocol}`, {rows[0]['pairs']} pairs, {seeds} seed{'s' * (seeds > 1)}{spread}, times 100"
    lines = []
    for row in rows:
        line = [row["row"]]
        for score in available_scores(rows):
            cell = row["scores"].get(score) or {"mean": None, "sd": None}
            deviation = "" if cell["sd"] is None else f" ± {format_percent(cell['sd'])}"
            line.append(f"{format_percent(cell['mean'])}{deviation}")
        lines.append(line)
    return table([corner, *available_scores(rows).values()], lines)


def differences(corner: str, rows: Rows, compared_rows: Mapping[str, tuple[Mapping[str, Any], str]]) -> Iterator[str]:
    """Yield the table of differences between variants.

    Args:
        compared_rows: a mapping from the label of a row to a variant's row and the name of the reference variant.
    """
    lines = []
    for label, (row, reference) in compared_rows.items():
        cells = [row["scores"].get(score, {}).get("differences", {}).get(reference) for score in available_scores(rows)]
        lines.append([label, *(format_with_interval(cell, "gain", "+") for cell in cells)])
    return table([f"{corner} (95 % interval over pairs)", *available_scores(rows).values()], lines)


def targets(rows: Rows) -> Iterator[str]:
    """Yield the table of scores on new scenes, each with its target."""
    lines = []
    for row in rows:
        bound = "at_least" if "at_least" in row else "at_most"
        spread = "" if row["sd"] is None else f" ± {row['sd']:.3f}"
        target = f"{bound.replace('_', ' ')} {row[bound]:.2f}"
        reached = "yes" if row["reached"] else "no"
        lines.append([row["protocol"], f"`{row['score']}`", f"{row['mean']:.3f}{spread}", target, reached])
    return table(["new scenes", "score", "mean ± standard deviation", "target", "reached"], lines)
