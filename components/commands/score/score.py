"""Score anyone's captions under a benchmark's protocol: no images, no model, no training and no parameters file."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from m3diff.commands.score.faults import (
    faults_of_predictions,
    faults_of_references,
    finder,
    match,
    notes_of_captions,
    notes_of_file,
    split_references,
    too_long,
)
from m3diff.commands.score.predictions import read_predictions
from m3diff.commands.score.references import (
    Benchmark,
    Counts,
    References,
    benchmarks,
    counts_of,
    from_coco,
    from_data,
    published_counts,
)
from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError
from m3diff.scoring.bootstrap import intervals
from m3diff.scoring.grammar import parse_predictions
from m3diff.scoring.marks import notes_of_marks
from m3diff.scoring.metrics import METRICS, choose_metrics
from m3diff.scoring.metrics.java import require_java
from m3diff.scoring.metrics.metric import ALL, Metric, Value
from m3diff.scoring.metrics.scorer import ScorerFailed, sanitise
from m3diff.scoring.metrics.spice import find_jars
from m3diff.scoring.pairs import EvalPair
from m3diff.scoring.protocols import ProtocolPairs, apply, takes
from m3diff.scoring.published.published import PublishedRow, published_rows, published_rows_by_type
from m3diff.scoring.run import compute_metrics
from m3diff.scoring.summary import Interval
from m3diff.stages.evaluate.stage import score_table

LIMIT_S = 3600
"""Seconds that a Java scorer may take; SPICE has more, by its captions."""


class ScoreReport(BaseModel):
    """Scores are as pycocoevalcap gives them; papers print them, and `published` holds them, times 100."""

    model_config = ConfigDict(frozen=True)

    dataset: str
    protocol: str
    source: str | None  # where the protocol is described
    tokenizer: str
    headline: str
    pairs: int
    published_pairs: int | None  # that papers score
    references: int
    scores: dict[str, Value]
    intervals: dict[str, Interval]
    by_group: dict[str, dict[str, Value]]
    absent: dict[str, str]  # score -> why it is null
    faults: list[str]
    notes: list[str]
    published: list[dict[str, Any]]


def score(
    predictions: Path,
    benchmark: str | None = None,
    protocol: str | None = None,
    references: Path | None = None,
    data: Path | None = None,
    spice_dir: Path | None = None,
    allow_faults: bool = False,
) -> ScoreReport:
    """Score a file of captions against a benchmark's references.

    Args:
        predictions: as `predictions.read_predictions` reads them.
        benchmark: a name of `benchmarks()`; without one the file of references is scored as it stands.
        protocol: one of the benchmark's; without one its headline's.
        references: COCO captions. With `data` too, they are scored and the data says what is wrong with them.
        data: the dataset's own folder, or ingest's records of it.

    Raises:
        JavaMissing: there is no Java; said before anything is read, as is a folder without SPICE's jars.
        DataError: a file cannot be used; a fault was found and `allow_faults` does not allow it; or `spice_dir` is
            given and SPICE gave no score.
        ScorerFailed: the tokenizer gave up.
    """
    require_java()
    if spice_dir is not None:
        require_spice(spice_dir)
    known = None if benchmark is None else find_benchmark(benchmark)
    chosen = known.protocol(protocol) if known else Protocol("as given", n=None)
    if known is None and (references is None or protocol or data):
        raise DataError("name a --benchmark, or the --references alone; known benchmarks: " + ", ".join(benchmarks()))
    scored, counts = find_references(known, chosen, references, data)
    dataset = known.name if known else str(references and references.stem)
    return score_captions(predictions, dataset, chosen, scored, counts, known, spice_dir, allow_faults)


def require_spice(folder: Path) -> None:
    try:
        find_jars(folder)
    except ScorerFailed as missing:
        raise DataError(f"--spice-dir {missing}") from None


def find_benchmark(name: str) -> Benchmark:
    known = benchmarks()
    if name not in known:
        raise DataError(f"--benchmark {name!r}: unknown; known: {', '.join(known)}")
    return known[name]


def find_references(
    benchmark: Benchmark | None, protocol: Protocol, references: Path | None, data: Path | None
) -> tuple[References, Counts]:
    """What is scored, and how many pairs and references there should be."""
    counts = Counts(None) if benchmark is None else published_counts(benchmark, protocol)
    if benchmark and data:
        own = from_data(benchmark, data)
        counts = counts_of(own, taken_by(protocol, benchmark.name, own), protocol)
        if references is None:
            return own, counts
    if references:
        return from_coco(references), counts
    assert benchmark is not None
    raise DataError(where_references_are(benchmark))


def where_references_are(benchmark: Benchmark) -> str:
    draws = f", which `m3diff synthesize {benchmark.name}` draws" if benchmark.spec.generate else ""
    return (
        f"{benchmark.name}: where are its references? Give --data with the folder that holds "
        f"{', '.join(benchmark.spec.files)}{draws}, or with ingest's records.parquet; or --references with its COCO "
        f"captions. The dataset's page: {benchmark.spec.page}"
    )


def taken_by(protocol: Protocol, dataset: str, references: References) -> list[str]:
    """Ids of the pairs that the protocol takes."""
    return [name for name in references.pairs if takes(protocol, as_pair(dataset, name, references, ""))]


def as_pair(dataset: str, name: str, references: References, caption: str) -> EvalPair:
    """A pair without its images, of which scores know nothing."""
    texts, change_types = references.pairs[name]
    nothing = Path(), Path(), b"", b""
    return EvalPair(f"{dataset}/{name}", dataset, *nothing, texts, change_types, caption, None)


def score_captions(
    path: Path,
    dataset: str,
    protocol: Protocol,
    references: References,
    counts: Counts,
    benchmark: Benchmark | None,
    spice_dir: Path | None,
    allow_faults: bool,
) -> ScoreReport:
    found = read_predictions(path, finder(references.pairs, dataset))
    taken = {name: references.pairs[name] for name in taken_by(protocol, dataset, references)}
    if not taken:
        raise DataError(f"{dataset}: no pair of the references is one of protocol {protocol.name!r}")
    try:
        matched = match(found.rows, references.pairs, dataset, counts)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    faults = faults_of_references(taken, counts, protocol) if references.as_scored else []
    faults += split_references(taken)
    faults += faults_of_predictions(len(found.rows), matched, taken, references.pairs, counts)
    captions = {name: matched.captions[name] for name in taken if name in matched.captions}
    faults += too_few(len(captions), protocol) + (too_long(captions) if protocol.max_words is None else [])
    if faults and not allow_faults:
        raise DataError("\n  ".join([f"{path}: no score of {dataset}/{protocol.name}:", *faults, AS_IT_IS]))
    if not captions:
        raise DataError(f"{path}: no caption of a pair of protocol {protocol.name!r}")
    notes = list(found.notes)
    if matched.renamed:
        notes.append("ids such as {!r} were taken for {!r}".format(*matched.renamed))
    if rest := len(matched.captions) - len(captions):
        notes.append(f"{rest:,} captions of pairs that {protocol.name!r} does not take were left out")
    said, texts = list(captions.values()), [taken[name].texts for name in captions]
    notes += notes_of_captions(said, list(chain(*texts)), protocol)
    notes += notes_of_marks(said, texts) + notes_of_marks(list(chain(*texts)), what="references")
    if benchmark is None:
        notes += notes_of_file(taken, benchmarks().values())
    pairs = [as_pair(dataset, name, references, caption) for name, caption in captions.items()]
    one = ProtocolPairs(dataset, protocol, apply(as_it_stands(protocol, references), pairs))
    return compute(one, references, benchmark, spice_dir, faults, notes)


AS_IT_IS = "--allow-faults scores the file all the same and says so"


def too_few(pairs: int, protocol: Protocol) -> list[str]:
    if protocol.n is None or pairs == protocol.n:
        return []
    return [f"{pairs:,} pairs are scored, papers score {protocol.n:,}: such scores stand beside no published ones"]


def as_it_stands(protocol: Protocol, references: References) -> Protocol:
    """What is left to do to the texts: a COCO file's references are joined and cut already, or wrongly not."""
    return replace(protocol, references="all", max_words=None) if references.as_scored else protocol


def compute(
    one: ProtocolPairs,
    references: References,
    benchmark: Benchmark | None,
    spice_dir: Path | None,
    faults: list[str],
    notes: list[str],
) -> ScoreReport:
    metrics = metrics_of(one.protocol, references, spice_dir)
    parsed = parse_predictions({one.dataset: references.grammar}, one.pairs) if references.grammar else {}
    scores = compute_metrics(metrics, [one], parsed, spice_dir, LIMIT_S)[one.name]
    if len(one.pairs) > 1 and len({frozenset(map(sanitise, pair.references)) for pair in one.pairs}) == 1:
        notes = [*notes, SAME_REFERENCES]
    if spice_dir is not None and "SPICE" in scores.absent:
        raise DataError(f"--spice-dir {spice_dir}: SPICE gave no score: {scores.absent['SPICE']}")
    wanted = {name for metric in metrics.values() for name in metric.scores + metric.overall} - {"CIDEr_shuffled"}
    return ScoreReport(
        dataset=one.dataset,
        protocol=one.protocol.name,
        source=one.protocol.source,
        tokenizer=one.protocol.tokenizer,
        headline=one.protocol.headline,
        pairs=len(one.pairs),
        published_pairs=one.protocol.n,
        references=sum(len(pair.references) for pair in one.pairs),
        scores={name: value for name, value in scores.groups[ALL].items() if name in wanted},
        intervals=intervals(score_table(metrics, [one], {one.name: scores}), metrics, one.name),
        by_group={
            group: {"pairs": len(ids), **scores.groups[group]}
            for group, ids in one.groups.items()
            if ids and group != ALL
        },
        absent={name: reason for name, reason in scores.absent.items() if name in wanted},
        faults=faults,
        notes=notes,
        published=[row.__dict__ for row in published_beside(benchmark, one.protocol)],
    )


SAME_REFERENCES = (
    "all pairs have the same references, so CIDEr is 0: it weighs a word by how few pairs' references hold it; score "
    "them together with pairs that have others"
)


def metrics_of(protocol: Protocol, references: References, spice_dir: Path | None) -> Mapping[str, Metric]:
    """The protocol's; SPICE where its folder is named; what a caption says of the change where there is a grammar."""
    names = set(protocol.metrics) - {"SPICE"}
    if spice_dir is not None:
        names.add("SPICE")
    if references.grammar:
        names.add("change_accuracy")
    return choose_metrics(name for name in METRICS if name in names)


def published_beside(benchmark: Benchmark | None, protocol: Protocol) -> list[PublishedRow]:
    """The published rows of the same protocol, best headline first: the headline protocol's, or those of a change
    type."""
    if benchmark is None:
        return []
    rows = (
        published_rows(benchmark.name)
        if protocol == benchmark.protocols[0]
        else published_rows_by_type(benchmark.name, protocol.name)
    )
    return sorted(rows, key=lambda row: -(row.scores.get(protocol.headline) or 0.0))
