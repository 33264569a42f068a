"""An experiment's results as Markdown."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m3diff.records.files import write_atomic

SCORES = {  # the scores that are compared, with their headings; all are shown times 100
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


def write(found: Results, out: Path) -> str:
    """Write the Markdown next to the results; the Markdown, and where both are."""
    text = "\n".join(markdown(found)) + "\n"
    write_atomic(out.with_suffix(".md"), text)
    return f"{text}written to {out} and {out.with_suffix('.md')}"


def markdown(found: Results) -> Iterator[str]:
    """The page, line by line: of each kind of table that the results have, one for all or for each protocol."""
    seeds = f"seed{'s' * (len(found['seeds']) > 1)} {', '.join(map(str, found['seeds']))}"
    yield from (f"# {found['title']}", "", f"`{found['command']}`, {seeds}. {found['note']}".strip(), "")
    if found.get("budgets"):
        yield from budgets(found["budgets"])
    if "measured" in found:
        yield from costs(found)
    for protocol in found["protocols"] if "scores" in found else ():
        yield from intervals(found["scores"], protocol)
    for protocol, rows in found["protocols"].items():
        yield from means(protocol, rows, len(found["seeds"]))
        for name in found["compare_with"]:
            if name not in found["left_out"]:
                others = {row["row"]: (row, name) for row in rows if row["row"] != name}
                yield from differences(f"difference to *{name}*", rows, others)
        pairs = {f"{row['row']}, to *{row['same_steps_as']}*": row for row in rows if row.get("same_steps_as")}
        if pairs:
            others = {label: (row, row["same_steps_as"]) for label, row in pairs.items()}
            yield from differences("difference on as many steps", rows, others)
    if "targets" in found:
        yield from targets(found["targets"])
    yield from (f"- {line}" for line in found["left_out"].values())


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A table in Markdown, with an empty line after it."""
    columns = list(head)
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    yield from (f"| {' | '.join(cells)} |" for cells in rows)
    yield ""


def hundredfold(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.1f}"


def budgets(found: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Budget of each variant; that of the alignment if any has one."""
    fields = [key for key in BUDGET if not key.startswith("alignment") or any(of[key] for of in found.values())]
    formats = {key: ".3f" if key == "epochs" else "," for key in fields}
    rows = [[name, *(format(of[key], how) for key, how in formats.items())] for name, of in found.items()]
    return table(["trained on", *(BUDGET[key] for key in fields)], rows)


def costs(found: Results) -> Iterator[str]:
    """Cost of each variant, and how surely it tells that nothing changed."""
    epochs, rows = found["epochs"], []
    columns = ["parameters that train", "GFLOP a caption", "captions/s", "s a step", "epochs in equal seconds"]
    for name, of in found["measured"].items():
        cells = [f"{of['parameters']:,}", f"{of['caption_gflop']:.2f}", f"{of['captions_per_s']:.0f}"]
        cells += [f"{of['step_s']:.3f}", f"{epochs['equal seconds'].get(name, epochs['equal pairs']):g}"]
        rows.append([name, *cells, *(hundredfold(of["no_change_auc"][protocol]) for protocol in found["protocols"])])
    return table(
        ["variant", *columns, *(f"ROC area of no change, {protocol}" for protocol in found["protocols"])], rows
    )


def intervals(scores: Mapping[str, Mapping[str, Any]], protocol: str) -> Iterator[str]:
    """The metrics of one protocol with their intervals."""
    shown = [metric for metric in METRICS if any(metric in of[protocol] for of in scores.values())]
    rows = [[name, *(bounded(of[protocol].get(metric), "score") for metric in shown)] for name, of in scores.items()]
    return table([f"`{protocol}`, times 100 (95 % interval over pairs)", *shown], rows)


def bounded(cell: Mapping[str, Any] | None, key: str, sign: str = "") -> str:
    """A value with its interval, where it has one."""
    if cell is None:
        return ""
    low, high = hundredfold(cell["low"], sign), hundredfold(cell["high"], sign)
    return hundredfold(cell[key], sign) + (f" ({low} to {high})" if low else "")


def shown(rows: Rows) -> dict[str, str]:
    """The compared scores that any variant has, with their headings; one whose captions cannot be parsed has few."""
    return {score: title for score, title in SCORES.items() if any(score in row["scores"] for row in rows)}


def means(protocol: str, rows: Rows, seeds: int) -> Iterator[str]:
    """The mean of each score over the seeds, and its deviation where there are several."""
    spread = ", mean ± standard deviation" if seeds > 1 else ""
    corner = f"`{protocol}`, {rows[0]['pairs']} pairs, {seeds} seed{'s' * (seeds > 1)}{spread}, times 100"
    lines = []
    for row in rows:
        cells = [row["scores"].get(score) or {"mean": None, "sd": None} for score in shown(rows)]
        spreads = ["" if cell["sd"] is None else f" ± {hundredfold(cell['sd'])}" for cell in cells]
        lines.append([row["row"], *(hundredfold(cell["mean"]) + sd for cell, sd in zip(cells, spreads, strict=True))])
    return table([corner, *shown(rows).values()], lines)


def differences(corner: str, rows: Rows, of: Mapping[str, tuple[Mapping[str, Any], str]]) -> Iterator[str]:
    """The differences of variants to another, by label: (the variant's row, the other's name)."""
    lines = []
    for label, (row, other) in of.items():
        cells = [row["scores"].get(score, {}).get("differences", {}).get(other) for score in shown(rows)]
        lines.append([label, *(bounded(cell, "gain", "+") for cell in cells)])
    return table([f"{corner} (95 % interval over pairs)", *shown(rows).values()], lines)


def targets(rows: Rows) -> Iterator[str]:
    """The mean of each score on new scenes next to its target."""
    lines = []
    for row in rows:
        bound = "at_least" if "at_least" in row else "at_most"
        spread = "" if row["sd"] is None else f" ± {row['sd']:.3f}"
        target = f"{bound.replace('_', ' ')} {row[bound]:.2f}"
        reached = "yes" if row["reached"] else "no"
        lines.append([row["protocol"], f"`{row['score']}`", f"{row['mean']:.3f}{spread}", target, reached])
    return table(["new scenes", "score", "mean ± standard deviation", "target", "reached"], lines)
