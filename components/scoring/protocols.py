"""Apply the evaluation protocols of each dataset, and group the pairs that get separate scores.

A protocol states which test pairs of a dataset are scored, and how their texts are joined, truncated and tokenised.
Within a protocol, pairs are grouped by what changed, by the number of changes, by the length of the references and by
the kind of question.

A protocol may contain captions and answers to questions of the dataset. Metrics of captions score the captions and the
kinds of questions whose answers are texts (`find_text_ids`), because answers of a word or two have hardly any n-grams.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Protocol
from m3diff.records.errors import DataError, data_error_if_unreadable, format_count
from m3diff.scoring.characters import (
    MIN_SHARE_WITHOUT_SPACES,
    ScriptCounts,
    count_scripts,
    space_out_characters,
)
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair, Groups, SelectedRecords

# Groups of pairs by the mean length of their references: minimum number of words -> name of the group
LENGTHS = {1: "1-9", 10: "10-19", 20: "20-39", 40: "40 or more"}
# Mean number of words from which answers are texts: CIDEr and BLEU-4 count n-grams of up to four words
MIN_TEXT_WORDS = 4


@dataclass(frozen=True)
class ProtocolPairs:
    """A protocol and the pairs that it includes, or some of these pairs.

    rules: the rules of the protocol.
    pairs: the pairs, with their texts already joined and truncated by the rules.
    full_protocol: the protocol with all of its pairs. None if these are all of them.
    """

    dataset: str
    rules: Protocol
    pairs: list[EvalPair]
    full_protocol: "ProtocolPairs | None" = None

    @property
    def name(self) -> str:
        """Name of the protocol in metrics.json, in scores.parquet and for the gate: "<dataset>/<protocol>"."""
        return f"{self.dataset}/{self.rules.name}"

    @cached_property
    def groups(self) -> Groups:
        """Pair ids of each group that has scores: all pairs, followed by the groups of `group_pairs`.

        Some pairs of a protocol are in the groups of the full protocol.
        """
        ids = [pair.id for pair in self.pairs]
        if self.full_protocol is None:
            return {ALL_PAIRS: ids, **group_pairs(self.pairs)}
        own_ids = set(ids)
        return {
            group: [pair_id for pair_id in ids_of_group if pair_id in own_ids]
            for group, ids_of_group in self.full_protocol.groups.items()
        }

    @cached_property
    def text_ids(self) -> set[str]:
        """Ids of the pairs that metrics of captions score; see `find_text_ids`."""
        return find_text_ids(self.pairs)

    @property
    def has_questions(self) -> bool:
        """Whether at least one record has a question of its own."""
        return any(pair.question is not None for pair in self.pairs)

    def select(self, records: SelectedRecords) -> "ProtocolPairs":
        """Return the protocol with some of its pairs. The protocol itself is returned if they are all of its pairs.

        Args:
            records: "captions" for records without a question of their own, "questions" for records with one, "texts"
                for captions and the questions whose answers are texts.
        """
        match records:
            case "captions":
                pairs = [pair for pair in self.pairs if pair.question is None]
            case "questions":
                pairs = [pair for pair in self.pairs if pair.question is not None]
            case "texts":
                pairs = [pair for pair in self.pairs if pair.id in self.text_ids]
        if len(pairs) == len(self.pairs):
            return self
        return replace(self, pairs=pairs, full_protocol=self.full_protocol or self)

    @cached_property
    def script_counts(self) -> ScriptCounts:
        """Number of references in scripts without spaces between words, and of all references.

        Only references that metrics of captions read are counted.
        """
        return count_scripts(reference for pair in self.select("texts").pairs for reference in pair.references)

    @property
    def counts_characters(self) -> bool:
        """Whether characters are used as tokens, because enough references are in scripts without spaces."""
        counts = self.script_counts
        return counts.texts > 0 and counts.without_spaces >= MIN_SHARE_WITHOUT_SPACES * counts.texts


def load_specs(records: Path, pairs: Iterable[EvalPair]) -> dict[str, DatasetSpec]:
    """Return the spec of each dataset that the pairs come from, by dataset.

    The spec is looked up by the name of the reader in ingest's report `records/<dataset>.json`.

    Raises:
        DataError: the report is missing, malformed or names an unknown reader, so the licence and the protocols are
            not known.
    """
    specs = {}
    for dataset in dict.fromkeys(pair.dataset for pair in pairs):
        path = records / f"{dataset}.json"
        reader = ""
        if path.is_file():
            with data_error_if_unreadable(path, "files.unreadable_stage_output", writer="ingest"):
                reader = json.loads(path.read_text(encoding="utf-8")).get("reader")
        if not isinstance(reader, str) or reader not in DATASETS:
            raise DataError("scoring.reader_unknown", path=path, value=reader, dataset=dataset, names=list(DATASETS))
        specs[dataset] = DATASETS[reader]
    return specs


def list_protocols(dataset: str, spec: DatasetSpec) -> tuple[Protocol, ...]:
    """Return the protocols of a dataset, or of one of its parts. The main protocol comes first.

    A dataset without protocols gets a single protocol that includes all pairs.
    """
    protocols = tuple(protocol for protocol in spec.protocols if protocol.part in (None, dataset))
    return protocols or (Protocol("test", published_pairs=None),)


def select_protocols(pairs: Iterable[EvalPair], specs: Mapping[str, DatasetSpec]) -> list[ProtocolPairs]:
    """Return each protocol that includes at least one pair, with its pairs, in the order of `specs`."""
    pairs_by_dataset: dict[str, list[EvalPair]] = defaultdict(list)
    for pair in pairs:
        pairs_by_dataset[pair.dataset].append(pair)
    protocols = []
    for dataset, spec in specs.items():
        for protocol in list_protocols(dataset, spec):
            protocol_pairs = apply_protocol(protocol, pairs_by_dataset[dataset])
            if protocol_pairs:
                protocols.append(ProtocolPairs(dataset, protocol, protocol_pairs))
    return protocols


def list_protocol_metrics(protocols: Iterable[Protocol]) -> list[str]:
    """Return the names of the metrics that the protocols have besides those that are chosen for every protocol."""
    names: dict[str, None] = {}  # a dict keeps the order
    for protocol in protocols:
        names |= dict.fromkeys(protocol.metrics)
    return list(names)


def select_main_protocols(protocols: Sequence[ProtocolPairs]) -> list[ProtocolPairs]:
    """Return the first protocol of each dataset, which is the one that papers report."""
    protocol_by_dataset: dict[str, ProtocolPairs] = {}
    for protocol in protocols:
        protocol_by_dataset.setdefault(protocol.dataset, protocol)
    return list(protocol_by_dataset.values())


def apply_protocol(protocol: Protocol, pairs: Iterable[EvalPair]) -> list[EvalPair]:
    """Return the pairs that a protocol includes, with their texts joined and truncated according to its rules."""
    protocol_pairs = [pair for pair in pairs if includes_pair(protocol, pair)]
    if protocol.references == "all" and protocol.max_words is None:
        return protocol_pairs
    return [shorten_texts(protocol, pair) for pair in protocol_pairs]


def shorten_texts(protocol: Protocol, pair: EvalPair) -> EvalPair:
    """Return a pair with its references joined into one text and all texts truncated, if the protocol requires it."""

    def truncate(text: str) -> str:
        return " ".join(text.split()[: protocol.max_words])

    references = [". ".join(pair.references)] if protocol.references == "joined" else pair.references
    shuffled = pair.shuffled_prediction
    swapped = pair.reversed_prediction
    return replace(
        pair,
        references=[truncate(reference) for reference in references],
        prediction=truncate(pair.prediction),
        shuffled_prediction=None if shuffled is None else truncate(shuffled),
        reversed_prediction=None if swapped is None else truncate(swapped),
    )


def includes_pair(protocol: Protocol, pair: EvalPair) -> bool:
    """Return True if a protocol includes a pair, based on the pair's name in its dataset, its kind and change types."""
    name = pair.id.removeprefix(f"{pair.dataset}/")
    if re.fullmatch(protocol.ids, name) is None:
        return False
    if protocol.kinds and pair.kind not in protocol.kinds:
        return False
    if not protocol.change_types:
        return True
    types = set(pair.change_types)
    return bool(types) and types <= set(protocol.change_types)


def find_text_ids(pairs: Iterable[EvalPair]) -> set[str]:
    """Return the ids of the pairs whose references are texts: captions, and long answers to questions.

    The answers of a kind of question are texts if its references have at least MIN_TEXT_WORDS words on average. In
    scripts without spaces, each character counts as a word. Questions whose kind is not known count as one kind.
    """
    text_ids = set()
    pairs_by_kind: dict[str | None, list[EvalPair]] = defaultdict(list)
    for pair in pairs:
        if pair.question is None:
            text_ids.add(pair.id)
        else:
            pairs_by_kind[pair.kind].append(pair)
    for pairs_of_kind in pairs_by_kind.values():
        word_counts: list[int] = []
        for pair in pairs_of_kind:
            answers = [reference for reference in pair.references if reference.strip()]
            word_counts += [len(space_out_characters(answer).split()) for answer in answers]
        if word_counts and sum(word_counts) >= MIN_TEXT_WORDS * len(word_counts):
            text_ids |= {pair.id for pair in pairs_of_kind}
    return text_ids


def group_pairs(pairs: list[EvalPair]) -> Groups:
    """Return the pair ids of each group. The group of all pairs is not included.

    Pairs are grouped by what changed, by the number of changes, by the length of the references and by the kind of
    question. A grouping by number or length is left out if all pairs would be in the same group. Pairs with short
    answers have no group by length, and pairs without a kind have no group by kind.
    """
    changed_pairs = [pair for pair in pairs if pair.changes]
    groups = {
        "change": [pair.id for pair in changed_pairs],
        "multi_change": [pair.id for pair in changed_pairs if len(pair.changes) > 1],
        "distractors": [pair.id for pair in pairs if pair.is_distractor],
    }
    for change_type in sorted({pair.changes[0] for pair in changed_pairs if len(pair.changes) == 1}):
        groups[f"by_type/{change_type}"] = [pair.id for pair in changed_pairs if pair.changes == [change_type]]
    for changes, ids in group_by_number(changed_pairs, lambda pair: len(pair.changes)).items():
        groups[f"by_changes/{changes}"] = ids
    text_ids = find_text_ids(pairs)
    pairs_to_describe = [pair for pair in pairs if pair.id in text_ids and not pair.is_distractor]
    for fewest_words, ids in group_by_number(pairs_to_describe, length_class).items():
        groups[f"by_length/{LENGTHS[fewest_words]}"] = ids
    for kind in sorted({pair.kind for pair in pairs if pair.kind}):
        groups[f"by_kind/{kind}"] = [pair.id for pair in pairs if pair.kind == kind]
    return groups


def group_by_number(pairs: Iterable[EvalPair], number_of_pair: Callable[[EvalPair], int]) -> dict[int, list[str]]:
    """Group pair ids by a number, in ascending order. Return an empty dict if all pairs have the same number."""
    ids_by_number: dict[int, list[str]] = defaultdict(list)
    for pair in pairs:
        ids_by_number[number_of_pair(pair)].append(pair.id)
    return dict(sorted(ids_by_number.items())) if len(ids_by_number) > 1 else {}


def length_class(pair: EvalPair) -> int:
    """Return the key of LENGTHS for a pair, based on the mean number of words of its non-empty references."""
    word_counts = [len(reference.split()) for reference in pair.references if reference.strip()] or [1]
    mean = sum(word_counts) / len(word_counts)
    return max(fewest_words for fewest_words in LENGTHS if fewest_words <= mean)


def note_scripts(protocol: ProtocolPairs) -> list[str]:
    """Return a note if some references have no spaces between words, otherwise an empty list.

    The note says how many references have no spaces, and whether scores count characters or words.
    """
    counts = protocol.script_counts
    if not counts.without_spaces:
        return []
    references = format_count(counts.texts, "reference has", "references have")
    sentence = f"{counts.without_spaces:,} of {references} no spaces between words"
    if protocol.counts_characters:
        return [
            f"{protocol.name}: {sentence} (Chinese, Japanese, Thai, ...). Each of their characters counts as a word "
            "in scores whose names end in -char, which cannot be compared with scores on words. METEOR and SPICE can "
            "only score English"
        ]
    return [
        f"{protocol.name}: {sentence}. This is less than {MIN_SHARE_WITHOUT_SPACES:.0%}, so scores count words, and "
        "such a reference counts as one word or a few"
    ]
