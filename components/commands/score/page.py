"""A ScoreReport as lines for people."""

from collections.abc import Iterator
from typing import Any

from m3diff.commands.score.score import ScoreReport
from m3diff.scoring.published.published import SCORES

VARIANTS = {
    "BLEU-1": "of the corpus",
    "BLEU-2": "of the corpus",
    "BLEU-3": "of the corpus",
    "BLEU-4": "of the corpus",
    "METEOR": "METEOR 1.5",
    "ROUGE-L": "F, recall weighed 1.2 times",
    "CIDEr": "CIDEr-D, document frequencies of these references",
    "SPICE": "mean F",
}
NEIGHBOURS = 3
"""Published rows that are shown above and below."""


def lines(report: ScoreReport) -> Iterator[str]:
    yield f"{report.dataset}, protocol {report.protocol!r}" + (f" ({report.source})" if report.source else "")
    yield f"  pairs {counted(report)}; references a pair {report.references / report.pairs:.2f}"
    yield f"  tokenizer: {'PTB, lower case' if report.tokenizer == 'ptb' else 'white space, case kept'}"
    yield from (f"  FAULT {fault}" for fault in report.faults)
    yield from (f"  note: {note}" for note in report.notes)
    yield f"  {'score':22}{'':8}{'x 100':>7}  {'95 % interval':15}variant"
    for name, value in report.scores.items():
        yield f"  {name:22}" + (score_line(report, name, value) if value is not None else "absent")
    yield from (f"  {name}: {reason}" for name, reason in report.absent.items())
    if report.published:
        yield from published_lines(report)


def counted(report: ScoreReport) -> str:
    beside = "" if report.published_pairs is None else f" (papers: {report.published_pairs:,})"
    return f"{report.pairs:,}{beside}"


def score_line(report: ScoreReport, name: str, value: float) -> str:
    interval = report.intervals.get(name)
    bounds = f"{100 * interval.low:.1f} to {100 * interval.high:.1f}" if interval else ""
    return f"{value:<8.4f}{100 * value:7.1f}  {bounds:15}{VARIANTS.get(name, '')}".rstrip()


def published_lines(report: ScoreReport) -> Iterator[str]:
    """The rows that are next to this one by the headline score, and this one among them."""
    by = report.headline
    ours = 100 * (report.scores.get(by) or 0.0)
    above = [row for row in report.published if (row["scores"][by] or 0.0) > ours]
    below = report.published[len(above) :]
    mine = {name: None if (value := report.scores.get(name)) is None else 100 * value for name in SCORES.values()}
    yield f"  published figures beside it, by {by} ({len(above)} above, {len(below)} below):"
    yield f"    {'':26}" + "".join(f"{name:>9}" for name in SCORES.values())
    shown = above[-NEIGHBOURS:] + below[:NEIGHBOURS]
    for row in above[-NEIGHBOURS:]:
        yield row_line(row["method"], row["venue"], row["scores"], mark(row))
    yield row_line("these captions", "", mine, "" if report.pairs == report.published_pairs else "  * other pairs")
    for row in below[:NEIGHBOURS]:
        yield row_line(row["method"], row["venue"], row["scores"], mark(row))
    yield from sorted({f"    source: {row['source']}" for row in shown})
    yield from (f"    + {row['method']}: {row['chosen_on_test']}" for row in shown if row["chosen_on_test"])


def mark(row: dict[str, Any]) -> str:
    return "  + chosen on test" if row["chosen_on_test"] else ""


def row_line(method: str, venue: str, scores: dict[str, float | None], end: str) -> str:
    figures = "".join(f"{'-' if value is None else f'{value:.1f}':>9}" for value in scores.values())
    return f"    {' '.join((method, venue)).strip()[:26]:26}{figures}{end}"
