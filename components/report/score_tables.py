"""Build the tables of a run: all protocols, the scores for comparing runs, groups of pairs, and published results."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from m3diff.datasets.spec import Protocol
from m3diff.report.tables import (
    CHOSEN_MARK,
    PARTIAL_MARK,
    UNIFORM_MARK,
    Cell,
    Table,
    TableRow,
    file_name_of_protocol,
    make_cell,
    mark_best,
)
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.metrics import HEADLINE_SCORES
from m3diff.scoring.published import PUBLISHED_SCORES, PublishedRow
from m3diff.scoring.results import KINDS, EvaluateReport, ProtocolScores, Scores

EVERY_ID = ".*"  # regular expression of a protocol that does not select pairs by name
GROUP_TITLES = {"change": "with a change", "multi_change": "with several changes", "distractors": "without a change"}
# Columns of the table of change types: title -> name of the group's score
ACCURACIES = {"type right": "type_accuracy", "place right": "place_accuracy", "all right": "exact_accuracy"}
# Columns of the table of answers: title -> score
ANSWER_SCORES = {
    "exact match": "exact_match",
    "yes or no": "yes_no_accuracy",
    "number": "number_accuracy",
    "choice": "choice_accuracy",
}
TOKENIZERS_IN_WORDS = {
    "ptb": "by the PTB tokenizer",
    "whitespace": "only at white space",
    "lowercase": "at white space, in lower case and without full stops",
}
MARK_NOTES = {
    PARTIAL_MARK: f"{PARTIAL_MARK} Fewer pairs than in papers, so these scores cannot be compared with published ones.",
    UNIFORM_MARK: f"{UNIFORM_MARK} All pairs without a change have the same few references. CIDEr weighs rare words, "
    "so it is 0 for any caption. The share of captions that say “nothing changed” shows how good the model is.",
}


def make_row(name: str, scores: ProtocolScores, columns: Iterable[str]) -> TableRow:
    """Return the row for all pairs of a protocol: how many pairs this run scores and how many papers score, and scores.

    The scores have intervals.

    Args:
        columns: names of the scores.
    """
    pair_counts = f"{scores.pairs:,}"
    if scores.published_pairs is not None:
        pair_counts += f" of {scores.published_pairs:,}"
    return TableRow(
        name=name,
        labels=(pair_counts,),
        cells=tuple(make_cell(scores.scores.get(score), scores.intervals.get(score)) for score in columns),
        marks=choose_marks(scores),
    )


def explain_marks(rows: Sequence[TableRow]) -> list[str]:
    """Return the notes that explain the marks in the rows."""
    return [note for mark, note in MARK_NOTES.items() if any(mark in row.marks for row in rows)]


def choose_marks(scores: ProtocolScores) -> tuple[str, ...]:
    """Return the marks that warn readers about a protocol's scores. MARK_NOTES explains each mark.

    PARTIAL_MARK: this run scores fewer pairs than papers do.
    UNIFORM_MARK: CIDEr is 0 because no pair has a change, so all references are alike.
    """
    marks = []
    if scores.is_partial:
        marks.append(PARTIAL_MARK)
    distractors = scores.groups.get("distractors", {})
    if distractors.get("pairs") == scores.pairs and scores.scores.get("CIDEr") == 0:
        marks.append(UNIFORM_MARK)
    return tuple(marks)


def overview_table(
    protocols: Mapping[str, ProtocolScores],
    columns: Sequence[str],
    descriptions: Mapping[str, str],
    notes: Sequence[str] = (),
) -> Table:
    """Return the table of all protocols of all datasets, with one row per protocol.

    Args:
        columns: names of the scores to show.
        descriptions: description of the pairs that a protocol includes, by the protocol's name.
        notes: notes to show below the explanations of marks.
    """
    rows = []
    for name, scores in protocols.items():
        row = make_row(name, scores, columns)
        rows.append(row._replace(labels=(descriptions.get(name, ""), *row.labels)))
    return Table("scores", ("Protocol", "Pairs", "n", *columns), rows, [*explain_marks(rows), *notes])


def headline_table(report: EvaluateReport, main_protocols: Sequence[str]) -> Table:
    """Return the table of the scores for comparing runs, which `make run` prints.

    Its rows are HEADLINE_SCORES in `components/scoring/metrics/__init__.py`. Add a line there to show another score.

    Args:
        main_protocols: names of the protocols to show as columns: the first protocol of each dataset.
    """
    protocols = [report.protocols[name] for name in main_protocols]
    rows = []
    for score, headline_score in HEADLINE_SCORES.items():
        cells = tuple(make_cell(protocol.scores.get(score), protocol.intervals.get(score)) for protocol in protocols)
        if any(cell.value is not None for cell in cells):
            rows.append(TableRow(headline_score.report_title, (), cells))
    return Table("headline", ("Score", *main_protocols), rows)


def describe_pairs(protocol: Protocol) -> str:
    """Describe in words which pairs a protocol includes."""
    if protocol.pairs:
        return protocol.pairs
    if protocol.change_types:
        return f"pairs whose only change is {' or '.join(protocol.change_types)}"
    if protocol.ids == EVERY_ID:
        return f"only {' and '.join(protocol.kinds)}" if protocol.kinds else "all pairs"
    return "some pairs, chosen by their names"


def describe_rules(protocol: Protocol, counts_characters: bool) -> str:
    """Describe the rules of a protocol in sentences."""
    pairs_in_words = describe_pairs(protocol)
    references_in_words = "all references of its pair"
    if protocol.references == "joined":
        references_in_words = "the references of its pair, joined into one text"
    sentences = [
        f"{pairs_in_words[0].upper()}{pairs_in_words[1:]}.",
        f"Each caption is compared with {references_in_words}.",
    ]
    if protocol.max_words:
        sentences.append(f"All texts are truncated after {protocol.max_words} words.")
    if counts_characters:
        sentences.append("In scripts without spaces between words, each character counts as a word.")
    sentences.append(f"Texts are split into words {TOKENIZERS_IN_WORDS[protocol.tokenizer]}.")
    return " ".join(sentences)


def group_rows(scores: ProtocolScores, titles: Mapping[str, str], columns: Sequence[str]) -> Iterator[TableRow]:
    """Yield a row for each group that is not empty.

    Args:
        titles: titles of the rows, by group.
    """
    for name, title in titles.items():
        group = scores.groups.get(name)
        if group and group["pairs"]:
            is_uniform = name == "distractors" and group.get("CIDEr") == 0
            yield TableRow(
                name=title,
                labels=(f"{group['pairs']:,}",),
                cells=tuple(make_cell(group.get(score)) for score in columns),
                marks=(UNIFORM_MARK,) if is_uniform else (),
            )


def group_table(protocol: str, scores: ProtocolScores, columns: Sequence[str]) -> Table:
    """Return the table of a protocol's groups: all pairs, and pairs with a change, with several changes or without."""
    rows = [make_row("all", scores, columns), *group_rows(scores, GROUP_TITLES, columns)]
    return Table(f"{file_name_of_protocol(protocol)}-groups", ("Pairs", "n", *columns), rows, explain_marks(rows))


def type_table(protocol: str, scores: ProtocolScores, types: Sequence[str], columns: Sequence[str]) -> Table:
    """Return the table of pairs with exactly one change, with one row per change type.

    It shows the accuracies of ACCURACIES that were computed, which requires a grammar, and the scores in `columns`.
    """
    groups = scores.groups_in_folder("by_type").values()
    accuracies = {}
    for title, score in ACCURACIES.items():
        if any(group.get(score) is not None for group in groups):
            accuracies[title] = score
    titles = {f"by_type/{change_type}": change_type for change_type in types}
    rows = list(group_rows(scores, titles, [*accuracies.values(), *columns]))
    return Table(f"{file_name_of_protocol(protocol)}-types", ("Type", "n", *accuracies, *columns), rows)


def answer_table(protocol: str, scores: ProtocolScores) -> Table | None:
    """Return the table of the answers to questions: all questions, then one row per kind, with intervals.

    A score that no row has is left out. The table is None if no record has a question of its own.
    """
    if scores.scores.get("exact_match") is None:
        return None
    kinds = {kind: group for kind, group in sorted(scores.groups_in_folder(KINDS).items()) if group.get("questions")}
    columns = {
        title: score
        for title, score in ANSWER_SCORES.items()
        if any(row.get(score) is not None for row in (scores.scores, *kinds.values()))
    }
    rows = [make_answer_row("all questions", scores.scores, scores.intervals, columns.values())]
    for kind, group in kinds.items():
        rows.append(make_answer_row(kind, group, scores.kind_intervals.get(kind, {}), columns.values()))
    return Table(f"{file_name_of_protocol(protocol)}-answers", ("Question", "n", *columns), rows)


def make_answer_row(name: str, scores: Scores, intervals: Mapping[str, Interval], columns: Iterable[str]) -> TableRow:
    """Return the number and the scores of the questions of a protocol, or of one kind of question, as a row."""
    cells = tuple(make_cell(scores.get(score), intervals.get(score)) for score in columns)
    return TableRow(name, (f"{scores['questions']:,}",), cells)


def published_table(
    protocol: str, scores: ProtocolScores, published_rows: Sequence[PublishedRow], ranking_score: str
) -> Table | None:
    """Return a table with this run and the published results of a protocol, sorted by a score.

    The best value of each column is marked. If this run scores fewer pairs than papers do, its values are never marked.

    Args:
        ranking_score: score by which the rows are sorted, the highest first.

    Returns:
        The table, or None if there are no published results.
    """
    if not published_rows:
        return None
    published_pairs_label = "" if scores.published_pairs is None else f"{scores.published_pairs:,}"
    row_of_this_run = make_row("this run", scores, PUBLISHED_SCORES)
    rows = [row_of_this_run._replace(labels=("", f"{scores.pairs:,}"), is_this_run=True)]
    notes_on_this_run = explain_marks(rows)
    for row in published_rows:
        rows.append(
            TableRow(
                name=row.method,
                labels=(row.venue, published_pairs_label),
                cells=tuple(map(Cell, row.scores.values())),
                marks=(CHOSEN_MARK,) if row.chosen_on_test else (),
            )
        )
    ranking_column = PUBLISHED_SCORES.index(ranking_score)
    rows.sort(key=lambda row: -(row.cells[ranking_column].value or 0.0))
    notes = []
    evidence = sorted({f"{row.method}: {row.chosen_on_test}" for row in published_rows if row.chosen_on_test})
    if evidence:
        notes.append(f"{CHOSEN_MARK} Epoch chosen on the test split. {'; '.join(evidence)}.")
    sources = "; ".join(sorted({row.source for row in published_rows}))
    notes += [*notes_on_this_run, f"Published scores are taken from {sources}."]
    columns = ("Method", "venue", "n", *PUBLISHED_SCORES)
    return Table(f"{file_name_of_protocol(protocol)}-published", columns, mark_best(rows), notes)
