"""The report of `m3diff score`, and its output on the terminal."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from m3diff.records.errors import format_count
from m3diff.report.score_tables import answer_table, published_table
from m3diff.report.tables import Table, TableRow, format_lines, make_cell
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.metrics import Value
from m3diff.scoring.published import PublishedRow
from m3diff.scoring.results import ProtocolScores

TOKENIZERS_IN_WORDS = {
    "ptb": "PTB, in lower case",
    "whitespace": "split at white space, case-sensitive",
    "lowercase": "split at white space, in lower case and without full stops",
}


class ScoreReport(BaseModel):
    """The scores of `m3diff score`, on the scale of pycocoevalcap. Only `published` contains scores times 100."""

    model_config = ConfigDict(frozen=True)

    dataset: str
    protocol: str
    source: str | None
    """Source that describes the protocol."""
    tokenizer: str
    headline: str
    """Score by which `published` is sorted, which is `Protocol.ranking_score` on words or on characters."""
    pairs: int
    published_pairs: int | None
    """Number of pairs that papers score, or None if it is not known."""
    references: int
    scores: dict[str, Value]
    intervals: dict[str, Interval]
    by_group: dict[str, dict[str, Value]]
    absent: dict[str, str]
    """Absent scores, with the reason why each one is null."""
    faults: list[str]
    notes: list[str]
    published: list[dict[str, Any]]
    counts_characters: bool = False
    """Whether characters are used as words in scripts without spaces. Names of such scores end in -char."""
    kind_intervals: dict[str, dict[str, Interval]] = Field(default={}, exclude_if=lambda intervals: not intervals)
    """Intervals of the scores of answers, by kind of question and score. Left out of the file if there are none."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report for the terminal."""
        yield from self._head_lines()
        yield from (f"  FAULT {fault}" for fault in self.faults)
        yield from (f"  note: {note}" for note in self.notes)
        yield from (f"  {line}" for line in format_lines(self._score_table()))
        answers = answer_table(self.dataset, self._protocol_scores())
        if answers is not None:
            yield "  right answers in percent, by kind of question:"
            yield from (f"    {line}" for line in format_lines(answers))
        yield from (f"  {name}: {reason}" for name, reason in self.absent.items())
        published = self._published_table()
        if published is not None:
            yield f"  this run and published scores, the highest {self.headline} first:"
            yield from (f"    {line}" for line in format_lines(published))
            yield from (f"    {note}" for note in published.notes)

    def _head_lines(self) -> Iterator[str]:
        source = f" ({self.source})" if self.source else ""
        yield f"{self.dataset}, protocol {self.protocol!r}{source}"
        published_pairs = "" if self.published_pairs is None else f" (papers: {self.published_pairs:,})"
        noun = "pair" if self.scores.get("questions") is None else "record"
        pairs = format_count(self.pairs, noun)
        yield f"  {pairs}{published_pairs}, {self.references / self.pairs:.2f} references per {noun}"
        tokenizer = TOKENIZERS_IN_WORDS[self.tokenizer]
        if self.counts_characters:
            tokenizer = f"characters in scripts without spaces between words, otherwise {tokenizer}"
        yield f"  tokenizer: {tokenizer}"
        scorers = "METEOR 1.5, CIDEr-D, ROUGE-L as F-score with recall weighted 1.2 times, SPICE as mean F-score"
        yield f"  scores as in pycocoevalcap: {scorers}"

    def _score_table(self) -> Table:
        rows = []
        for name, value in self.scores.items():
            if isinstance(value, int):
                continue  # a number of questions, which the table of answers shows
            label = "" if value is None else f"{value:.4f}"
            cell = make_cell(value, self.intervals.get(name))
            rows.append(TableRow(name, (label,), (cell,)))
        return Table("scores", ("score", "value", "x 100, 95 % interval"), rows)

    def _published_table(self) -> Table | None:
        published_rows = [PublishedRow(**row) for row in self.published]
        return published_table(self.dataset, self._protocol_scores(), published_rows, self.headline)

    def _protocol_scores(self) -> ProtocolScores:
        return ProtocolScores(
            pairs=self.pairs,
            published_pairs=self.published_pairs,
            scores=self.scores,
            intervals=self.intervals,
            groups=self.by_group,
            absent=self.absent,
            kind_intervals=self.kind_intervals,
        )
