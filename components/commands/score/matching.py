"""Match captions to the pairs of the references by their ids, and detect common faults of such files.

A fault stops the command unless `--allow-faults` is given. A note is only part of the report.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from m3diff.commands.score.predictions import read_predictions
from m3diff.commands.score.references import References
from m3diff.commands.score.task import ScoringTask
from m3diff.datasets.spec import SplitCount
from m3diff.records.errors import DataError, Fault, format_count
from m3diff.scoring.pairs import EvalPair
from m3diff.scoring.protocols import includes_pair

EXTENSION = re.compile(r"\.(?:png|jpe?g|gif|webp)", re.IGNORECASE)
# File names of CLEVR-Change
SCENE = re.compile(r"(?:CLEVR_(?P<kind>semantic|nonsemantic)_)?0*(?P<number>\d+)(?P<distractor>_n)?")
JOINED_SENTENCES = re.compile(r"\w\. +\w")


@dataclass(frozen=True)
class MatchedPairs:
    """The captioned pairs that a protocol includes, and the faults and notes about the files."""

    pairs: list[EvalPair]
    faults: list[Fault]
    notes: list[str]


def find_pairs(path: Path, task: ScoringTask, references: References, allow_faults: bool) -> MatchedPairs:
    """Read a file of captions and match each caption to a pair of the references.

    Raises:
        DataError: the file cannot be read, it has faults that are not allowed, or it has no caption for any pair of the
            protocol.
    """
    predictions = read_predictions(path)
    # replace names assigned by `m3diff caption` with the names of the pairs
    captions = [(references.aliases.get(name, name), caption) for name, caption in predictions.captions]
    protocol = task.protocol
    protocol_pairs = {name: pair for name, pair in references.pairs.items() if includes_pair(protocol, pair)}
    if not protocol_pairs:
        raise DataError("score.no_pair_of_protocol", key=task.dataset, protocol=protocol.name)
    known_names = dict.fromkeys([*references.pairs, *references.names_in_other_splits])
    caption_by_name = match_captions(path, captions, known_names, task)
    scored_pairs = [
        replace(pair, prediction=caption_by_name[name])
        for name, pair in protocol_pairs.items()
        if name in caption_by_name
    ]
    faults = [*references.faults]
    if references.are_as_scored:
        faults += [fault.at(key="references") for fault in find_reference_faults(protocol_pairs, task)]
    faults += predictions.faults
    faults += find_caption_faults(caption_by_name, known_names, protocol_pairs, task.counts)
    if protocol.published_pairs is not None and len(scored_pairs) != protocol.published_pairs:
        faults.append(Fault("score.other_number_of_pairs", value=len(scored_pairs), expected=protocol.published_pairs))
    if faults and not allow_faults:
        raise DataError(
            "score.faults_not_allowed", path=path, dataset=task.dataset, protocol=protocol.name, faults=faults
        )
    if not scored_pairs:
        raise DataError("score.no_caption_of_protocol", path=path, protocol=protocol.name)
    notes = note_changed_ids([name for name, _ in captions], list(caption_by_name))
    notes += references.notes
    captions_in_other_splits = len(caption_by_name.keys() & set(references.names_in_other_splits))
    if captions_in_other_splits:
        one_caption = "caption of a pair in another split is"
        captions_text = format_count(captions_in_other_splits, one_caption, "captions of pairs in other splits are")
        notes.append(f"{captions_text} not scored")
    captions_left_out = len(caption_by_name.keys() & references.pairs.keys()) - len(scored_pairs)
    if captions_left_out:
        outside = f"outside the protocol {protocol.name!r}"
        one_caption = f"caption of a pair {outside} is"
        captions_text = format_count(captions_left_out, one_caption, f"captions of pairs {outside} are")
        notes.append(f"{captions_text} not scored")
    notes += note_pairs(scored_pairs)
    return MatchedPairs(pairs=scored_pairs, faults=faults, notes=notes)


def note_changed_ids(ids: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return a note if an id differs from the name of its pair in more than the Unicode form, with an example."""
    for pair_id, name in zip(ids, names, strict=True):
        if unicodedata.normalize("NFC", pair_id) != unicodedata.normalize("NFC", name):
            return [f"ids such as {pair_id!r} are matched to {name!r}"]
    return []


def note_pairs(pairs: Sequence[EvalPair]) -> list[str]:
    """Return notes on empty captions and on references that are the same for all pairs."""
    notes = []
    empty_captions = sum(not pair.prediction.strip() for pair in pairs)
    if empty_captions:
        notes.append(format_count(empty_captions, "caption is empty", "captions are empty"))
    distinct_references = {tuple(pair.references) for pair in pairs}
    has_captions = any(pair.question is None for pair in pairs)
    if has_captions and len(pairs) > 1 and len(distinct_references) == 1:
        notes.append(
            "all pairs have the same references, so CIDEr is 0, because no word distinguishes a pair from the others"
        )
    return notes


def match_captions(
    path: Path, captions: Sequence[tuple[str, str]], names: Iterable[str], task: ScoringTask
) -> dict[str, str]:
    """Match captions to pairs by their ids, and return them by the name of their pair.

    An id may differ from the pair's name in its Unicode form, folder, extension, zero padding or the parts that
    CLEVR-Change adds to file names, as long as it still identifies a single pair. A caption that does not match any
    pair is returned under its id.

    Args:
        captions: (id, caption) for each row of the file.
        names: names of the pairs in the references.

    Raises:
        DataError: several captions match the same pair.
    """
    name_by_form = {unicodedata.normalize("NFC", name): name for name in names}
    stripped_ids = {form: strip_id(form) for form in name_by_form}
    times = Counter(stripped_ids.values())
    name_by_stripped_id = {}
    for form, name in name_by_form.items():
        if times[stripped_ids[form]] == 1:
            name_by_stripped_id[stripped_ids[form]] = name
    captions_by_name: dict[str, list[str]] = {}
    for pair_id, caption in captions:
        form = unicodedata.normalize("NFC", pair_id).removeprefix(f"{task.dataset}/")
        name = name_by_form.get(form) or name_by_stripped_id.get(strip_id(form)) or pair_id
        captions_by_name.setdefault(name, []).append(caption)
    if len(captions_by_name) < len(captions):
        name, captions_of_name = max(captions_by_name.items(), key=lambda item: len(item[1]))
        raise DataError(
            "score.ids_repeated",
            path=path,
            value=len(captions),
            total=len(captions_by_name),
            name=name,
            times=len(captions_of_name),
            levels=explain_count(len(captions), task.counts),
        )
    return {name: captions_of_pair[0] for name, captions_of_pair in captions_by_name.items()}


def strip_id(pair_id: str) -> str:
    """Return an id without folder, extension, zero padding and CLEVR-Change's affixes: "235" for "a/000235.png"."""
    file_name = re.split(r"[/\\]", pair_id)[-1]
    stem = EXTENSION.sub("", file_name)
    scene = SCENE.fullmatch(stem)
    if scene is None:
        return stem
    is_distractor = scene["distractor"] is not None or scene["kind"] == "nonsemantic"
    return scene["number"] + ("_n" if is_distractor else "")


def find_caption_faults(
    captions: Mapping[str, str],
    known_names: Collection[str],
    protocol_pairs: Mapping[str, EvalPair],
    counts: SplitCount | None,
) -> list[Fault]:
    """Return faults for unknown and missing ids, with the likely reason.

    Args:
        captions: captions by the name of their pair.
        known_names: names of all pairs of the references.
        protocol_pairs: pairs that the protocol includes.
        counts: published counts of the protocol.
    """
    faults = []
    unknown_names = [name for name in captions if name not in known_names]
    if unknown_names:
        unknown_fault = Fault(
            "score.ids_unknown",
            value=len(unknown_names),
            total=len(captions),
            names=unknown_names,
            excerpt=list_names(unknown_names),
            valid=list_names(list(known_names)),
        )
        faults.append(unknown_fault)
    missing_names = [name for name in protocol_pairs if name not in captions]
    wordless_names = [
        name for name, pair in protocol_pairs.items() if not any(text.strip() for text in pair.references)
    ]
    are_wordless = bool(missing_names) and missing_names == wordless_names
    if missing_names:
        missing_fault = Fault(
            "score.wordless_pairs_missing" if are_wordless else "score.ids_missing",
            value=len(missing_names),
            total=len(protocol_pairs),
            names=missing_names,
            excerpt=list_names(missing_names),
        )
        faults.append(missing_fault)
    if unknown_names or (missing_names and not are_wordless):
        faults += explain_count(len(captions), counts)
    return faults


def list_names(names: Sequence[str]) -> str:
    """Return the first three names as text, in quotation marks."""
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")


def explain_count(ids: int, counts: SplitCount | None) -> list[Fault]:
    """Explain a wrong number of ids: the file may have a caption per annotation record or per distinct image pair.

    Return one fault if the number of ids equals one of these published counts, otherwise an empty list.
    """
    if counts is None or ids == counts.pairs:
        return []
    if ids == counts.image_pairs:
        return [Fault("score.level_of_images", value=ids)]
    if ids == counts.records:
        return [Fault("score.level_of_records", value=ids)]
    return []


def find_reference_faults(pairs: Mapping[str, EvalPair], task: ScoringTask) -> Iterator[Fault]:
    """Yield a fault for each way in which a file of references differs from the benchmark's references."""
    protocol = task.protocol
    counts = task.counts
    texts: list[str] = []
    for pair in pairs.values():
        texts += pair.references
    longest = max(len(text.split()) for text in texts)
    if counts is not None and len(pairs) != counts.pairs:
        if counts.wordless and len(pairs) == counts.pairs - counts.wordless:
            yield Fault(
                "score.references_without_wordless", value=len(pairs), expected=counts.pairs, wordless=counts.wordless
            )
        else:
            yield Fault("score.references_of_other_pairs", value=len(pairs), expected=counts.pairs)
        yield from explain_count(len(pairs), counts)
    elif protocol.references == "joined" and len(texts) > len(pairs):
        yield Fault("score.references_not_joined", value=len(texts), pairs=len(pairs), protocol=protocol.name)
    elif protocol.max_words is not None and longest > protocol.max_words:
        yield Fault("score.references_not_cut", value=longest, limit=protocol.max_words, protocol=protocol.name)
    elif counts is not None and len(texts) < (counts.references or 0):
        is_joined = len(texts) == len(pairs) and any(JOINED_SENTENCES.search(text) for text in texts)
        yield Fault(
            "score.references_joined" if is_joined else "score.references_overwritten",
            value=len(texts),
            expected=counts.references,
            protocol=protocol.name,
        )
