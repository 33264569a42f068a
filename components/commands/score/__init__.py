"""Score anyone's captions under a benchmark's protocol: no images, no model, no training and no parameters file."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from m3diff.commands.score import files
from m3diff.datasets.spec import Protocol, SplitCount
from m3diff.records.errors import DataError
from m3diff.scoring.bootstrap import Interval, intervals
from m3diff.scoring.grammar import parse_predictions
from m3diff.scoring.marks import notes_of_marks
from m3diff.scoring.metrics import ALL, METRICS, Metric, Value, choose_metrics
from m3diff.scoring.metrics.java import ScorerFailed, require_java
from m3diff.scoring.metrics.spice import find_jars
from m3diff.scoring.pairs import EvalPair
from m3diff.scoring.protocols import PUBLISHED_SCORES, ProtocolPairs, apply, published_of, takes
from m3diff.scoring.run import compute_metrics
from m3diff.stages.evaluate.stage import score_table

LIMIT_S = 3600
"""Seconds that a Java scorer may take; SPICE has more, by its captions."""
VARIANTS = {
    "METEOR": "METEOR 1.5",
    "ROUGE-L": "F, recall weighed 1.2 times",
    "CIDEr": "CIDEr-D, document frequencies of these references",
    "SPICE": "mean F",
    **dict.fromkeys(METRICS["BLEU"].scores, "of the corpus"),
}
AS_IT_IS = "--allow-faults scores the file all the same and says so"


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
        predictions: as `read_predictions` reads them.
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
        try:
            find_jars(spice_dir)
        except ScorerFailed as missing:
            raise DataError(f"--spice-dir {missing}") from None
    known = files.benchmarks()
    if benchmark is not None and benchmark not in known:
        raise DataError(f"--benchmark {benchmark!r}: unknown; known: {', '.join(known)}")
    if benchmark is None and (references is None or protocol or data):
        raise DataError("name a --benchmark, or the --references alone; known benchmarks: " + ", ".join(known))
    chosen = known[benchmark] if benchmark else None
    of = chosen.protocol(protocol) if chosen else Protocol("as given", n=None)
    scored, counts = find_references(chosen, of, references, data)
    dataset = chosen.name if chosen else str(references and references.stem)
    pairs, faults, notes = find_pairs(predictions, dataset, of, scored, counts, allow_faults)
    # a COCO file's references are joined and cut already, or wrongly not
    left = replace(of, references="all", max_words=None) if scored.as_scored else of
    return compute(ProtocolPairs(dataset, of, apply(left, pairs)), scored, chosen, spice_dir, faults, notes)


def find_references(
    benchmark: files.Benchmark | None, protocol: Protocol, references: Path | None, data: Path | None
) -> tuple[files.References, SplitCount | None]:
    """The references that are scored, and the numbers of pairs and references that there should be."""
    counts = None if benchmark is None else files.published_counts(benchmark, protocol)
    if benchmark and data:
        own = files.from_data(benchmark, data)
        counts = files.counts_of(own, protocol)
        if references is None:
            return own, counts
    if references:
        return files.from_coco(references, benchmark.name if benchmark else references.stem), counts
    assert benchmark is not None
    draws = f", which `m3diff synthesize {benchmark.name}` draws" if benchmark.spec.generate else ""
    raise DataError(
        f"{benchmark.name}: where are its references? Give --data with the folder that holds "
        f"{', '.join(benchmark.spec.files)}{draws}, or with ingest's records.parquet; or --references with its COCO "
        f"captions. The dataset's page: {benchmark.spec.page}"
    )


def find_pairs(
    path: Path,
    dataset: str,
    protocol: Protocol,
    references: files.References,
    counts: SplitCount | None,
    allow_faults: bool,
) -> tuple[list[EvalPair], list[str], list[str]]:
    """The captioned pairs that the protocol takes, the faults of both files, and notes.

    Raises:
        DataError: as `score`.
    """
    found = files.read_predictions(path)
    taken = {name: pair for name, pair in references.pairs.items() if takes(protocol, pair)}
    if not taken:
        raise DataError(f"{dataset}: no pair of the references is one of protocol {protocol.name!r}")
    try:
        matched = files.match(found, references.pairs, dataset, counts)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    faults = files.faults_of_predictions(len(found), matched, taken, references.pairs, counts)
    if references.as_scored and (fault := files.fault_of_references(taken, counts, protocol)):
        faults.insert(0, f"references: {fault}")
    captions = {name: matched.captions[name] for name in taken if name in matched.captions}
    if protocol.n is not None and len(captions) != protocol.n:
        scored = f"{len(captions):,} pairs are scored, papers score {protocol.n:,}"
        faults.append(f"{scored}: such scores stand beside no published ones")
    if faults and not allow_faults:
        raise DataError("\n  ".join([f"{path}: no score of {dataset}/{protocol.name}:", *faults, AS_IT_IS]))
    if not captions:
        raise DataError(f"{path}: no caption of a pair of protocol {protocol.name!r}")
    notes = []
    if matched.renamed:
        notes.append("ids such as {!r} were taken for {!r}".format(*matched.renamed))
    if rest := len(matched.captions) - len(captions):
        notes.append(f"{rest:,} captions of pairs that {protocol.name!r} does not take were left out")
    said, texts = list(captions.values()), [taken[name].references for name in captions]
    notes += files.notes_of_captions(said, list(chain(*texts)), protocol)
    notes += notes_of_marks(said) + notes_of_marks(chain(*texts), "references")
    return [replace(taken[name], prediction=caption) for name, caption in captions.items()], faults, notes


def metrics_of(protocol: Protocol, references: files.References, spice_dir: Path | None) -> dict[str, Metric]:
    """The protocol's; SPICE where its folder is named; what a caption says of the change where there is a grammar."""
    names = set(protocol.metrics) - {"SPICE"}
    if spice_dir is not None:
        names.add("SPICE")
    if references.grammar:
        names.add("change_accuracy")
    return choose_metrics(name for name in METRICS if name in names)


def compute(
    one: ProtocolPairs,
    references: files.References,
    benchmark: files.Benchmark | None,
    spice_dir: Path | None,
    faults: list[str],
    notes: list[str],
) -> ScoreReport:
    metrics = metrics_of(one.protocol, references, spice_dir)
    parsed = parse_predictions({one.dataset: references.grammar}, one.pairs) if references.grammar else {}
    scores = compute_metrics(metrics, [one], parsed, spice_dir, LIMIT_S)[one.name]
    if spice_dir is not None and "SPICE" in scores.absent:
        raise DataError(f"--spice-dir {spice_dir}: SPICE gave no score: {scores.absent['SPICE']}")
    wanted = {name for metric in metrics.values() for name in metric.scores + metric.overall} - {"CIDEr_shuffled"}
    groups = {group: ids for group, ids in one.groups.items() if ids and group != ALL}
    published = []
    if benchmark is not None:
        is_headline = one.protocol.name == benchmark.protocols[0].name
        published = published_of(benchmark.name, one.protocol, is_headline)
    by = one.protocol.headline
    return ScoreReport(
        dataset=one.dataset,
        protocol=one.protocol.name,
        source=one.protocol.source,
        tokenizer=one.protocol.tokenizer,
        headline=by,
        pairs=len(one.pairs),
        published_pairs=one.protocol.n,
        references=sum(len(pair.references) for pair in one.pairs),
        scores={name: value for name, value in scores.groups[ALL].items() if name in wanted},
        intervals=intervals(score_table(metrics, [one], {one.name: scores}), metrics, one.name),
        by_group={group: {"pairs": len(ids), **scores.groups[group]} for group, ids in groups.items()},
        absent={name: reason for name, reason in scores.absent.items() if name in wanted},
        faults=faults,
        notes=notes,
        published=[row._asdict() for row in sorted(published, key=lambda row: -(row.scores.get(by) or 0.0))],
    )


def lines(report: ScoreReport) -> Iterator[str]:
    """The report for people."""
    papers = "" if report.published_pairs is None else f" (papers: {report.published_pairs:,})"
    yield f"{report.dataset}, protocol {report.protocol!r}" + (f" ({report.source})" if report.source else "")
    yield f"  pairs {report.pairs:,}{papers}; references a pair {report.references / report.pairs:.2f}"
    yield f"  tokenizer: {'PTB, lower case' if report.tokenizer == 'ptb' else 'white space, case kept'}"
    yield from (f"  FAULT {fault}" for fault in report.faults)
    yield from (f"  note: {note}" for note in report.notes)
    yield f"  {'score':22}{'':8}{'x 100':>7}  {'95 % interval':15}variant"
    for name, value in report.scores.items():
        interval = report.intervals.get(name)
        bounds = f"{100 * interval.low:.1f} to {100 * interval.high:.1f}" if interval else ""
        shown = "absent" if value is None else f"{value:<8.4f}{100 * value:7.1f}  {bounds:15}{VARIANTS.get(name, '')}"
        yield f"  {name:22}{shown.rstrip()}"
    yield from (f"  {name}: {reason}" for name, reason in report.absent.items())
    if report.published:
        yield from published_lines(report)


def published_lines(report: ScoreReport) -> Iterator[str]:
    """The published rows and this one among them, the best by the headline score first."""
    by = report.headline
    mine = {name: None if (value := report.scores.get(name)) is None else 100 * value for name in PUBLISHED_SCORES}
    ours: dict[str, Any] = {"method": "these captions", "venue": "", "scores": mine, "chosen_on_test": None}
    yield f"  published figures beside it, by {by}:"
    yield f"    {'':26}" + "".join(f"{name:>9}" for name in PUBLISHED_SCORES)
    for row in sorted([ours, *report.published], key=lambda row: -(row["scores"][by] or 0.0)):
        end = "  + chosen on test" if row["chosen_on_test"] else ""
        if row is ours and report.pairs != report.published_pairs:
            end = "  * other pairs"
        figures = "".join(f"{'-' if value is None else f'{value:.1f}':>9}" for value in row["scores"].values())
        name = f"{row['method']} {row['venue']}".strip()[:26]
        yield f"    {name:26}{figures}{end}"
    yield from sorted({f"    source: {row['source']}" for row in report.published})
    yield from (f"    + {row['method']}: {row['chosen_on_test']}" for row in report.published if row["chosen_on_test"])
