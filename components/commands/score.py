"""Score anyone's captions under a benchmark's protocol: no images, no model, no training and no parameters file.

Predictions are COCO results, {id: caption}, JSON Lines, CSV or TSV. They are scored against a benchmark's annotation
files, ingest's records or a COCO file, after a search for the faults that such files typically have.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from m3diff.datasets import DATASETS
from m3diff.datasets.files import describe, read_json, read_values
from m3diff.datasets.spec import DatasetSpec, Protocol, SplitCount
from m3diff.records.errors import DataError, readable
from m3diff.scoring.bootstrap import Interval, intervals
from m3diff.scoring.grammar import Grammar, parse_predictions
from m3diff.scoring.marks import OTHER_SCRIPT, notes_of_marks
from m3diff.scoring.metrics import BY_CHARACTERS, Metric, Value, choose_metrics
from m3diff.scoring.metrics.java import ScorerFailed, require_java
from m3diff.scoring.metrics.spice import find_jars
from m3diff.scoring.pairs import (
    ALL,
    EvalPair,
    ProtocolPairs,
    PublishedRow,
    apply,
    note_of_scripts,
    protocols_of,
    published_of,
    takes,
    without_surrogates,
)
from m3diff.scoring.run import ProtocolScores, compute_metrics, metrics_of_all
from m3diff.stages.evaluate.report import Row, Table, in_papers_units, published_table, text_lines
from m3diff.stages.evaluate.stage import score_table

LIMIT_S = 3600  # seconds that a Java scorer may take; SPICE has more, by its captions
# Fields of an id, the likeliest first; "key" is the key of {id: caption}
IDS = ("image_id", "id", "img_id", "uid", "pair_id", "image", "file_name", "filename", "name", "question_id", "key")
# Fields of a caption; beside a prediction, "caption" is a reference. "value" is the value of {id: caption}.
CAPTIONS = ("prediction", "caption", "value")
EXTENSION = re.compile(r"\.(?:png|jpe?g|gif|webp)", re.IGNORECASE)
SCENE = re.compile(r"(?:CLEVR_(?P<kind>semantic|nonsemantic)_)?0*(?P<number>\d+)(?P<distractor>_n)?")
SENTENCES = re.compile(r"\w\. +\w")


class Task(NamedTuple):
    """The scored task: a benchmark under a protocol, or a file of references as it stands."""

    dataset: str
    protocol: Protocol
    spec: DatasetSpec | None  # of the benchmark
    counts: SplitCount | None = None  # published, of the protocol's pairs
    published: Sequence[PublishedRow] = ()


class References(NamedTuple):
    """Pairs by name, without captions and images."""

    pairs: dict[str, EvalPair]
    grammar: Grammar | None = None  # reads captions back into changes
    as_scored: bool = False  # a COCO file: joined and cut already, or wrongly not


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
    counts_characters: bool = False  # in scripts without spaces between words, under names that end in -char


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
        benchmark: a name of `benchmarks`; without one the file of references is scored as it stands.
        protocol: one of the benchmark's; without one its headline's.
        references: COCO captions.
        data: in place of `references`: the dataset's own folder, or ingest's records of it.

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
    task = find_task(benchmark, protocol, references)
    found = find_references(task, references, data)
    captioned, faults, notes = find_pairs(predictions, task, found, allow_faults)
    return compute(captioned, task, found, spice_dir, faults, notes)


def compute(
    captioned: list[EvalPair],
    task: Task,
    references: References,
    spice_dir: Path | None,
    faults: list[str],
    notes: list[str],
) -> ScoreReport:
    rules = replace(task.protocol, references="all", max_words=None) if references.as_scored else task.protocol
    one = ProtocolPairs(task.dataset, task.protocol, apply(rules, captioned))
    metrics = metrics_of(task.protocol, references, spice_dir)
    parsed = parse_predictions({task.dataset: references.grammar}, one.pairs) if references.grammar else {}
    scores = compute_metrics(metrics, [one], parsed, spice_dir, LIMIT_S)[one.name]
    metrics = metrics_of_all(metrics, [one])
    predictions = [pair.prediction for pair in captioned]
    texts = [reference for pair in captioned for reference in pair.references]
    # letters of these scripts are what the references ask for
    usual = [OTHER_SCRIPT] if one.counts_characters else []
    notes = [*notes, *note_of_scripts(one)]
    notes += notes_of_marks(predictions, without=usual) + notes_of_marks(texts, "references", without=usual)
    if spice_dir is not None and "SPICE" in scores.absent:
        raise DataError(f"--spice-dir {spice_dir}: SPICE gave no score: {scores.absent['SPICE']}")
    headline = task.protocol.headline
    hidden = ("CIDEr_shuffled", "CIDEr_shuffled-char")
    published = sorted(task.published, key=lambda row: -(row.scores.get(headline) or 0.0))
    if one.counts_characters:
        published = []  # published scores count words
    groups = [group for group, ids in one.groups.items() if ids and group != ALL]
    return ScoreReport(
        dataset=task.dataset,
        protocol=task.protocol.name,
        source=task.protocol.source,
        tokenizer=task.protocol.tokenizer,
        counts_characters=one.counts_characters,
        headline=f"{headline}{BY_CHARACTERS}" if one.counts_characters else headline,
        pairs=len(one.pairs),
        published_pairs=task.protocol.n,
        references=sum(len(pair.references) for pair in one.pairs),
        scores={name: value for name, value in scores.groups[ALL].items() if name not in hidden},
        intervals=intervals(score_table(metrics, [one], {one.name: scores}), metrics, one.name),
        by_group={group: {"pairs": len(one.groups[group]), **scores.groups[group]} for group in groups},
        absent={name: reason for name, reason in scores.absent.items() if name not in hidden},
        faults=faults,
        notes=notes,
        published=[row._asdict() for row in published],
    )


def benchmarks() -> dict[str, tuple[DatasetSpec, SplitCount | None]]:
    """The spec and the published test split of each benchmark: each published part, and each dataset that is drawn."""
    found: dict[str, tuple[DatasetSpec, SplitCount | None]]
    found = {name: (spec, None) for name, spec in DATASETS.items() if spec.generate}
    found |= {part.part: (spec, part.test) for spec in DATASETS.values() for part in spec.published}
    return dict(sorted(found.items()))


def find_task(benchmark: str | None, protocol: str | None, references: Path | None) -> Task:
    """The benchmark under one of its protocols; without a benchmark the references as they stand.

    Raises:
        DataError: there is no such benchmark or protocol.
    """
    known = benchmarks()
    if benchmark is None and protocol is None and references is not None:
        return Task(references.stem, Protocol("as given", n=None), None)
    if benchmark not in known:
        raise DataError(f"--benchmark {benchmark!r}: unknown; known: {', '.join(known)}; or name --references alone")
    spec, test = known[benchmark]
    protocols = {one.name: one for one in protocols_of(benchmark, spec)}
    if protocol is not None and protocol not in protocols:
        raise DataError(f"{benchmark}: no protocol {protocol!r}; it has {', '.join(protocols)}")
    chosen = protocols[protocol or next(iter(protocols))]
    published = published_of(benchmark, chosen, chosen.name == next(iter(protocols)))
    counts = None if chosen.n is None else SplitCount(chosen.n)  # all that is known of some of the pairs
    if test is not None and chosen.n == test.pairs:
        counts = replace(test, references=test.pairs) if chosen.references == "joined" else test
    return Task(benchmark, chosen, spec, counts, published)


def metrics_of(protocol: Protocol, references: References, spice_dir: Path | None) -> dict[str, Metric]:
    """The protocol's; SPICE where its folder is named; what a caption says of the change where there is a grammar."""
    names = set(protocol.metrics) - {"SPICE"}
    if spice_dir is not None:
        names.add("SPICE")
    if references.grammar:
        names.add("change_accuracy")
    return choose_metrics(names)


def read_predictions(path: Path) -> list[tuple[str, str]]:
    """Every id of the file with its caption, in the file's order; an id perhaps several times.

    Raises:
        DataError: the file cannot be read, has no row, or one without an id or a caption.
    """
    found = []
    for place, row in read_values(path, ()):
        where = str(path.parent / place)
        if isinstance(row, DataError):
            raise DataError(f"{where}: {row}")
        found.append((text_of(where, row, IDS).strip(), text_of(where, row, CAPTIONS)))
    if not found:
        raise DataError(f"{path}: holds no caption; expected rows of an image_id and a caption, or {{id: caption}}")
    return found


def text_of(where: str, row: Any, names: Sequence[str]) -> str:
    """The first field of these names that a row has, as text; a whole number is text, and so is a list of one text.

    Raises:
        DataError: there is none, or it is no text.
    """
    known = [row[name] for name in names if name in row] if isinstance(row, dict) else []
    value = known[0] if known else None
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(
            f"{where}: expected text in the field {names[0]}, found {describe(value if known else row)}; name "
            'the field so, and write one text to a pair, words joined by spaces, "" where there is no caption'
        )
    return without_surrogates(str(value))


def find_references(task: Task, references: Path | None, data: Path | None) -> References:
    """The pairs of the COCO file, or else of the dataset's own folder or ingest's records.

    Raises:
        DataError: there is nothing of the kind, a test pair cannot be read, or there is none.
    """
    if references is not None:
        return from_coco(references, task)
    assert task.spec is not None
    files = ", ".join(task.spec.files)
    if data is None:
        draws = f", which `m3diff synthesize {task.dataset}` draws" if task.spec.generate else ""
        raise DataError(
            f"{task.dataset}: where are its references? Give --data with the folder that holds {files}{draws}, or with "
            f"ingest's records.parquet; or --references with its COCO captions. The dataset's page: {task.spec.page}"
        )
    records = data if data.suffix == ".parquet" else data / "records.parquet"
    if records.is_file():
        return from_records(records, task)
    if not data.is_dir():
        raise DataError(f"{data}: no such folder; name the one that holds {files}")
    pairs = {}
    for row in task.spec.read(data):
        if row.split == "test":
            where = f"{data}: {row.source}"
            if row.fault or not isinstance(row.references, list):
                fault = row.fault or f"references: expected a list, found {describe(row.references)}"
                raise DataError(f"{where}: {fault}; fetch the file again")
            texts = [text_of(where, {"caption": text}, ("caption",)) for text in row.references]
            pairs[row.name] = bare_pair(task, row.name, texts or [""], row.change_types)
    return References(pairs, Grammar.load(data / "grammar.json") if task.spec.grammar else None)


def from_records(path: Path, task: Task) -> References:
    with readable(path, "run `m3diff ingest` again"):
        columns = ["id", "dataset", "references", "change_types"]
        rows = pq.read_table(path, columns=columns, filters=[("split", "=", "test")]).to_pylist()
    pairs = {}
    for row in rows:
        if row["id"] is not None:
            name = row["id"].removeprefix(f"{row['dataset']}/")
            pairs[name] = bare_pair(task, name, row["references"] or [""], row["change_types"] or [])
    rules = path.with_name("grammar.json")
    return References(pairs, Grammar.load(rules) if rules.is_file() else None)


def bare_pair(task: Task, name: str, references: list[str], change_types: list[str]) -> EvalPair:
    return EvalPair(f"{task.dataset}/{name}", task.dataset, Path(), Path(), b"", b"", references, change_types)


def from_coco(path: Path, task: Task) -> References:
    """{"images": [{"id"}], "annotations": [{"image_id", "caption"}]}; an image may stand there several times.

    Raises:
        DataError: the file is not of that shape, holds no image, or one without a caption.
    """
    value = read_json(path, dict)
    texts: dict[str, list[str]] = {}
    for kind, field in (("images", "id"), ("annotations", "image_id")):
        if not isinstance(value.get(kind), list):
            raise DataError(f"{path}: expected COCO captions, an object with the lists images and annotations")
        for number, row in enumerate(value[kind]):
            where = f"{path}, {kind[:-1]} {number}"
            found = texts.setdefault(text_of(where, row, (field,)).strip(), [])
            if kind == "annotations":
                found.append(text_of(where, row, ("caption",)))
    bare = [name for name, found in texts.items() if not found]
    if bare or not texts:
        raise DataError(
            f"{path}: {len(bare)} of {len(texts)} images without a caption, such as {bare[:1]}: were empty ones "
            "dropped? An empty caption is a reference and stays"
        )
    return References({name: bare_pair(task, name, found, []) for name, found in texts.items()}, as_scored=True)


def find_pairs(
    path: Path, task: Task, references: References, allow_faults: bool
) -> tuple[list[EvalPair], list[str], list[str]]:
    """The captioned pairs that the protocol takes, the faults of both files, and notes.

    Raises:
        DataError: as `score`.
    """
    found = read_predictions(path)
    protocol, counts = task.protocol, task.counts
    taken = {name: pair for name, pair in references.pairs.items() if takes(protocol, pair)}
    if not taken:
        raise DataError(f"{task.dataset}: no pair of the references is one of protocol {protocol.name!r}")
    told = match(path, found, references.pairs, task)
    captions = {name: told[name] for name in taken if name in told}
    faults = [f"references: {fault}" for fault in faults_of_references(taken, task) if references.as_scored]
    faults += faults_of_captions(told, references.pairs, taken, counts)
    if protocol.n is not None and len(captions) != protocol.n:
        scored = f"{len(captions):,} pairs are scored, papers score {protocol.n:,}"
        faults.append(f"{scored}: such scores stand beside no published ones")
    if faults and not allow_faults:
        allow = "--allow-faults scores the file all the same and says so"
        raise DataError("\n  ".join([f"{path}: no score of {task.dataset}/{protocol.name}:", *faults, allow]))
    if not captions:
        raise DataError(f"{path}: no caption of a pair of protocol {protocol.name!r}")
    said = list(captions.values())
    notes = [
        f"ids such as {given!r} were taken for {name!r}"
        for (given, _), name in zip(found, told, strict=True)
        if unicodedata.normalize("NFC", given) != unicodedata.normalize("NFC", name)
    ][:1]
    if rest := len(told.keys() & references.pairs.keys()) - len(captions):
        notes.append(f"{rest:,} captions of pairs that {protocol.name!r} does not take were left out")
    if empty := sum(not caption.strip() for caption in said):
        notes.append(f"{empty:,} captions are empty")
    if len({tuple(taken[name].references) for name in captions}) == 1 < len(captions):
        notes.append("all pairs have the same references, so CIDEr is 0: no word tells a pair from the others")
    return [replace(taken[name], prediction=caption) for name, caption in captions.items()], faults, notes


def match(path: Path, rows: Sequence[tuple[str, str]], known: Iterable[str], task: Task) -> dict[str, str]:
    """Every caption by the references' id that its own id means; by its own where it means none.

    Ids mean the same in any Unicode form, with and without folder, extension, padding and the words of CLEVR-Change's
    file names, as long as one id alone can be meant.

    Raises:
        DataError: two captions of one id.
    """
    ids = {unicodedata.normalize("NFC", name): name for name in known}
    times = Counter(map(plain, ids))
    by_plain = {plain(form): name for form, name in ids.items() if times[plain(form)] == 1}
    told: dict[str, list[str]] = {}
    for given, caption in rows:
        form = unicodedata.normalize("NFC", given).removeprefix(f"{task.dataset}/")
        told.setdefault(ids.get(form) or by_plain.get(plain(form)) or given, []).append(caption)
    if len(told) < len(rows):
        name, most = max(told.items(), key=lambda item: len(item[1]))
        found = f"{path}: {len(rows):,} captions for {len(told):,} ids: {name!r} has {len(most)}"
        raise DataError(f"{found}{level(len(rows), task.counts)}; keep one caption to an id")
    return {name: caption for name, (caption,) in told.items()}


def plain(name: str) -> str:
    """An id without folder, extension, padding and the words of CLEVR-Change's file names: "235" of "a/000235.png"."""
    bare = EXTENSION.sub("", re.split(r"[/\\]", name)[-1])
    found = SCENE.fullmatch(bare)
    if not found:
        return bare
    return found["number"] + (found["distractor"] or ("_n" if found["kind"] == "nonsemantic" else ""))


def faults_of_captions(
    told: Mapping[str, str], known: Mapping[str, EvalPair], taken: Mapping[str, EvalPair], counts: SplitCount | None
) -> list[str]:
    """Unknown and missing ids, with the likely reason."""
    faults = []
    if unknown := [name for name in told if name not in known]:
        of = f"{len(unknown):,} of {len(told):,} ids are unknown: {some(unknown)}; valid ones are {some(list(known))}"
        faults.append(f"{of}: write the ids as the references do{level(len(told), counts)}")
    missing = [name for name in taken if name not in told]
    wordless = [name for name, pair in taken.items() if not any(text.strip() for text in pair.references)]
    if missing and missing == wordless:
        faults.append(
            f"no caption for {some(missing)}, the {len(missing)} pairs of which every reference is empty: they were "
            f"dropped. They count in every published score; caption all {len(taken):,} pairs"
        )
    elif missing:
        of = f"no caption for {len(missing):,} of {len(taken):,} pairs: {some(missing)}"
        faults.append(of + level(len(told), counts))
    return faults


def some(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")


def level(ids: int, counts: SplitCount | None) -> str:
    """The level, if any, that the number of ids gives away."""
    if counts is None or ids == counts.pairs:
        return ""
    levels = {
        counts.records: f". The annotation file has {ids:,} records: this is the record level. A pair is scored once, "
        "against the references of all its records",
        counts.image_pairs: f". There are {ids:,} distinct pairs of images: keyed by its images, a pair overwrote "
        "others that have the same; key by the id",
    }
    return levels.get(ids, "")


def faults_of_references(pairs: Mapping[str, EvalPair], task: Task) -> Iterator[str]:
    """The differences of a file of references from those of the benchmark."""
    protocol, counts = task.protocol, task.counts
    texts = [text for pair in pairs.values() for text in pair.references]
    longest = max(len(text.split()) for text in texts)
    if counts is not None and len(pairs) != counts.pairs:
        fault = f"{len(pairs):,} pairs, the benchmark has {counts.pairs:,}"
        if counts.wordless and len(pairs) == counts.pairs - counts.wordless:
            fault += f": the {counts.wordless} pairs of which every reference is empty were dropped; they count"
        yield fault + level(len(pairs), counts)
    elif protocol.references == "joined" and len(texts) > len(pairs):
        yield f"{len(texts):,} for {len(pairs):,} pairs; under {protocol.name!r} all sentences of a pair are one text"
    elif protocol.max_words is not None and longest > protocol.max_words:
        yield f"untruncated, of up to {longest} words; {protocol.name!r} cuts them after {protocol.max_words}"
    elif counts is not None and len(texts) < (counts.references or 0):
        joined = len(texts) == len(pairs) and any(SENTENCES.search(text) for text in texts)
        reason = (
            f"joined text, one reference a pair; under {protocol.name!r} every sentence is a reference of its own"
            if joined
            else "of pairs that stand in several records the last one overwrote the others; all of them count"
        )
        yield f"{len(texts):,} of {counts.references:,}: {reason}"


def lines(report: ScoreReport) -> Iterator[str]:
    papers = "" if report.published_pairs is None else f" (papers: {report.published_pairs:,})"
    yield f"{report.dataset}, protocol {report.protocol!r}" + (f" ({report.source})" if report.source else "")
    yield f"  pairs {report.pairs:,}{papers}; references a pair {report.references / report.pairs:.2f}"
    characters = "characters of scripts without spaces between words; else " if report.counts_characters else ""
    yield f"  tokenizer: {characters}{'PTB, lower case' if report.tokenizer == 'ptb' else 'white space, case kept'}"
    yield "  scores of pycocoevalcap: METEOR 1.5, CIDEr-D, ROUGE-L's F with recall weighed 1.2 times, mean F of SPICE"
    yield from (f"  FAULT {fault}" for fault in report.faults)
    yield from (f"  note: {note}" for note in report.notes)
    rows = [
        Row(name, ("" if value is None else f"{value:.4f}",), (in_papers_units(value, report.intervals.get(name)),))
        for name, value in report.scores.items()
    ]
    yield from (f"  {line}" for line in text_lines(Table("scores", ("score", "value", "x 100, 95 % interval"), rows)))
    yield from (f"  {name}: {reason}" for name, reason in report.absent.items())
    known = [PublishedRow(**row) for row in report.published]
    scores = ProtocolScores(**report.model_dump(include=set(ProtocolScores.model_fields)), groups={})
    if table := published_table(report.dataset, scores, known, report.headline):
        yield f"  published figures beside it, by {report.headline}:"
        yield from (f"    {line}" for line in (*text_lines(table), *table.notes))
