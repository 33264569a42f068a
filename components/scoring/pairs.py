"""The test pairs with their predictions, checked; the protocols that score them; published figures.

A dataset is scored by its own evaluation protocols, and within one by what changed. published/results.csv has every
method's row of a benchmark's headline protocol, or of a "<benchmark>/<protocol>", times 100, its paper, and how it is
known that its epoch was chosen on the test split. A result that several papers print is there once.
"""

import csv
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Protocol
from m3diff.records.errors import DataError, readable
from m3diff.records.schemas import NO_CHANGE
from m3diff.scoring.characters import LEAST_SHARE, count_without_spaces

ALL = "all"  # the group of all pairs of a protocol
Groups = dict[str, list[str]]  # name of a group -> ids of its pairs: `ALL`, "change", "by_type/color", ...
# Groups by the mean number of words of a pair's references, by the fewest words of each
LENGTHS = {1: "1-9", 10: "10-19", 20: "20-39", 40: "40 or more"}
COLUMNS = {"bleu_4": "BLEU-4", "meteor": "METEOR", "rouge_l": "ROUGE-L", "cider": "CIDEr", "spice": "SPICE"}
PUBLISHED_SCORES = tuple(COLUMNS.values())


@dataclass(frozen=True)
class EvalPair:
    """A test pair, its references and the model's prediction.

    `shuffled_prediction` is the model's caption of its before-image with another pair's after-image,
    `reversed_prediction` that of its two images swapped; None outside these controls.
    """

    id: str
    dataset: str
    before: Path
    after: Path
    before_sha256: bytes
    after_sha256: bytes
    references: list[str]
    change_types: list[str]
    prediction: str = ""
    shuffled_prediction: str | None = None
    reversed_prediction: str | None = None

    @property
    def is_distractor(self) -> bool:
        return self.change_types == [NO_CHANGE]

    @property
    def changes(self) -> list[str]:
        """Its change types; none of a distractor, nor where they are unknown."""
        return [] if self.is_distractor else self.change_types


def read_test_records(clean: Path) -> dict[str, EvalPair]:
    """The records of the split "test" by id, in their order, without predictions.

    Raises:
        DataError: there is none.
    """
    import pyarrow.parquet as pq  # which not every reader of protocols needs

    path = clean / "records.parquet"
    with readable(path):
        rows = pq.read_table(path, filters=[("split", "=", "test")]).to_pylist()
    if not rows:
        raise DataError(f"{path}: no record of the split 'test', so there is nothing to score")
    return {
        row["id"]: EvalPair(
            **{name: row[name] for name in ("id", "dataset", "before_sha256", "after_sha256")},
            before=Path(row["before"]),
            after=Path(row["after"]),
            references=row["references"] or [""],  # coco keeps a pair without words as one empty reference
            change_types=row["change_types"] or [],
        )
        for row in rows
    }


def load_pairs(clean: Path, predictions: Path) -> tuple[list[EvalPair], int]:
    """The captioned test pairs in the records' order, and how many test pairs there are.

    There may be fewer predictions than test pairs, and fewer of shuffled and of swapped pairs, only where predict
    reports that it made so many (predict.limit, its controls).

    Raises:
        DataError: no test pair; a file of predictions that is truncated, or whose ids repeat, are unknown or missing.
    """
    pairs = read_test_records(clean)
    path = predictions / "report.json"
    with readable(path):
        counts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = read_predictions(predictions / "predictions.json", pairs.keys(), counts.get("rows_out"))
    controls: list[dict[str, str]] = []
    for name, count in (("shuffled", counts.get("control")), ("reversed", counts.get("reversed"))):
        path = predictions / f"predictions_{name}.json"
        controls.append(read_predictions(path, found.keys(), count) if path.is_file() and count != 0 else {})
    shuffled, swapped = controls
    captioned = [
        replace(pair, prediction=found[i], shuffled_prediction=shuffled.get(i), reversed_prediction=swapped.get(i))
        for i, pair in pairs.items()
        if i in found
    ]
    return captioned, len(pairs)


def read_predictions(path: Path, known: Collection[str], count: int | None) -> dict[str, str]:
    """A file [{"image_id": id, "caption": text}] as id -> text: every id is known and there once.

    Args:
        known: ids, each with a caption but where predict reported `count` of them.

    Raises:
        DataError: naming the file and the rows or ids at fault.
    """
    with readable(path, "run `m3diff predict` again"):
        rows: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: expected a list of {{image_id, caption}}, found {type(rows).__name__} without rows")
    for number, row in enumerate(rows):
        if not (isinstance(row, dict) and isinstance(row.get("image_id"), str) and isinstance(row.get("caption"), str)):
            raise DataError(f"{path}: row {number}: expected {{image_id: text, caption: text}}, found {str(row)[:80]}")
    times = Counter(row["image_id"] for row in rows)
    if repeated := [i for i, number in times.items() if number > 1]:
        raise DataError(f"{path}: captioned more than once: {some(sorted(repeated))}; exactly one caption to a pair")
    if unknown := times.keys() - set(known):
        raise DataError(f"{path}: not among the test pairs: {some(sorted(unknown))}; were the records made anew since?")
    if len(rows) != count and (missing := set(known) - times.keys()):
        raise DataError(f"{path}: no prediction for {some(sorted(missing))}; run `m3diff predict` again")
    return {row["image_id"]: without_surrogates(row["caption"]) for row in rows}


def without_surrogates(text: str) -> str:
    """The text with "?" for each lone surrogate, which no file can hold."""
    return text.encode("utf-8", "replace").decode()


def some(ids: Sequence[str]) -> str:
    """The first five ids, and how many there are."""
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5:,} more" if len(ids) > 5 else "")


@dataclass(frozen=True)
class ProtocolPairs:
    dataset: str
    protocol: Protocol
    pairs: list[EvalPair]

    @property
    def name(self) -> str:
        """Name in metrics.json, in scores.parquet and for the gate."""
        return f"{self.dataset}/{self.protocol.name}"

    @cached_property
    def groups(self) -> Groups:
        return {ALL: [pair.id for pair in self.pairs], **group_pairs(self.pairs)}

    @cached_property
    def without_spaces(self) -> tuple[int, int]:
        """How many references are in a script without spaces between words, and how many are not empty."""
        return count_without_spaces(reference for pair in self.pairs for reference in pair.references)

    @property
    def counts_characters(self) -> bool:
        """True if tokens are characters, because enough of the references are in scripts without spaces."""
        references_without_spaces, references = self.without_spaces
        return references > 0 and references_without_spaces >= LEAST_SHARE * references


def load_specs(records: Path, pairs: Iterable[EvalPair]) -> dict[str, DatasetSpec]:
    """The spec of each dataset of the pairs, by the reader that ingest's report `records/<dataset>.json` names.

    Raises:
        DataError: there is no such report, or no such reader; without it neither licence nor protocol is known.
    """
    specs = {}
    for dataset in dict.fromkeys(pair.dataset for pair in pairs):
        path = records / f"{dataset}.json"
        reader = json.loads(path.read_text(encoding="utf-8")).get("reader") if path.is_file() else ""
        if reader not in DATASETS:
            raise DataError(
                f"{path}: names no known reader ({reader!r}), so the licence of {dataset!r} is unknown; known: "
                f"{', '.join(DATASETS)}; run `m3diff ingest` again"
            )
        specs[dataset] = DATASETS[reader]
    return specs


def protocols_of(dataset: str, spec: DatasetSpec) -> tuple[Protocol, ...]:
    """The protocols of the dataset's part, the headline's first; one of every pair where it has none."""
    fitting = [protocol for protocol in spec.protocols if protocol.part in (None, dataset)]
    return tuple(fitting) or (Protocol("test", n=None),)


def select(pairs: Iterable[EvalPair], specs: Mapping[str, DatasetSpec]) -> list[ProtocolPairs]:
    """The pairs of every protocol of every dataset that has any, in the order of `specs`."""
    of: dict[str, list[EvalPair]] = defaultdict(list)
    for pair in pairs:
        of[pair.dataset].append(pair)
    found = [
        ProtocolPairs(dataset, protocol, apply(protocol, of[dataset]))
        for dataset, spec in specs.items()
        for protocol in protocols_of(dataset, spec)
    ]
    return [one for one in found if one.pairs]


def apply(protocol: Protocol, pairs: Iterable[EvalPair]) -> list[EvalPair]:
    """A dataset's pairs that a protocol takes, with references and predictions as it scores them."""
    taken = [pair for pair in pairs if takes(protocol, pair)]
    if protocol.references == "all" and protocol.max_words is None:
        return taken

    def cut(text: str) -> str:
        return " ".join(text.split()[: protocol.max_words])

    scored = []
    for pair in taken:
        references = [". ".join(pair.references)] if protocol.references == "joined" else pair.references
        said = {name: getattr(pair, name) for name in ("prediction", "shuffled_prediction", "reversed_prediction")}
        cuts: dict[str, Any] = {name: text if text is None else cut(text) for name, text in said.items()}
        scored.append(replace(pair, references=[cut(reference) for reference in references], **cuts))
    return scored


def takes(protocol: Protocol, pair: EvalPair) -> bool:
    name, types = pair.id.removeprefix(f"{pair.dataset}/"), set(pair.change_types)
    known = not protocol.change_types or (bool(types) and types <= set(protocol.change_types))
    return known and re.fullmatch(protocol.ids, name) is not None


def group_pairs(pairs: list[EvalPair]) -> Groups:
    """Ids of the pairs of each group that has scores of its own: by what changed, by how many changes there are and by
    how long the references are; the last two only where they tell pairs apart."""
    changed = [pair for pair in pairs if pair.changes]
    types = sorted({pair.changes[0] for pair in changed if len(pair.changes) == 1})
    not_calm = [pair for pair in pairs if not pair.is_distractor]
    by_changes = split_by([(len(pair.changes), pair.id) for pair in changed])
    by_length = split_by([(fewest_words(pair), pair.id) for pair in not_calm])
    return {
        "change": [pair.id for pair in changed],
        "multi_change": [pair.id for pair in changed if len(pair.changes) > 1],
        "distractors": [pair.id for pair in pairs if pair.is_distractor],
        **{f"by_type/{kind}": [pair.id for pair in changed if pair.changes == [kind]] for kind in types},
        **{f"by_changes/{count}": ids for count, ids in by_changes.items()},
        **{f"by_length/{LENGTHS[fewest]}": ids for fewest, ids in by_length.items()},
    }


def split_by(numbered: list[tuple[int, str]]) -> dict[int, list[str]]:
    """The ids of each number, in order; nothing where all have the same."""
    numbers = sorted({number for number, _ in numbered})
    return {each: [i for number, i in numbered if number == each] for each in numbers if len(numbers) > 1}


def fewest_words(pair: EvalPair) -> int:
    """The lower bound of the length of the pair's references, empty ones left out."""
    counts = [len(reference.split()) for reference in pair.references if reference.strip()] or [1]
    return max(fewest for fewest in LENGTHS if fewest <= sum(counts) / len(counts))


class PublishedRow(NamedTuple):
    """A method's figures on a benchmark, times 100."""

    method: str
    venue: str
    scores: dict[str, float | None]  # by the score's name; None: not printed
    source: str
    chosen_on_test: str | None  # how it is known that the epoch was chosen on the test split; None: it is not known


@cache
def published_rows(benchmark: str) -> list[PublishedRow]:
    """The figures of a benchmark's headline protocol, or of its "<benchmark>/<protocol>", in the file's order."""
    found = []
    with (Path(__file__).parent / "published" / "results.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["benchmark"] == benchmark:
                scores = {name: float(row[column]) if row[column] else None for column, name in COLUMNS.items()}
                chosen = row["chosen_on_test"] or None
                found.append(PublishedRow(row["method"], row["venue"], scores, row["source"], chosen))
    return found


def published_of(dataset: str, protocol: Protocol, is_headline: bool) -> list[PublishedRow]:
    """The published rows of a protocol: those of its benchmark are of the headline's."""
    return published_rows(dataset if is_headline else f"{dataset}/{protocol.name}")


def note_of_scripts(one: ProtocolPairs) -> list[str]:
    """A note on references in scripts without spaces between words: their number, and how captions are counted."""
    references_without_spaces, references = one.without_spaces
    if not references_without_spaces:
        return []
    share = f"{references_without_spaces:,} of {references:,} references have no spaces between words"
    if one.counts_characters:
        return [
            f"{one.name}: {share} (Chinese, Japanese, Thai, ...): each of their characters counts as a word, in the "
            "scores whose name ends in -char, which compare with no score of words. METEOR and SPICE read English alone"
        ]
    return [
        f"{one.name}: {share}, fewer than {LEAST_SHARE:.0%}: scores count words, and each of these is one word or a few"
    ]
