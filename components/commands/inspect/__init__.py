"""Check a dataset's folder before running a stage: `m3diff data check ROOT`.

1. `layout.py` recognises the layout by the annotation files, unless `--reader` names it. If the folder contains a table
   of the user's own pairs, `datasets/guess.py` proposes how to read it.
2. `reading.py` reads the folder with the dataset's reader. It compares the numbers of pairs and references with the
   published numbers, and counts unreadable rows and missing images. Known mistakes are printed with a remedy.
3. `judgement.py` runs ingest and validate on the folder, with outputs in a temporary folder.

The check prints an entry for `ingest.datasets`. If it finds no problem, both stages accept the folder with this entry.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from m3diff.commands.inspect.judgement import EMBEDDED_LIMITS, StageLimits, judge_dataset
from m3diff.commands.inspect.layout import RecognisedDataset, annotation_files, has_file, recognise
from m3diff.commands.inspect.reading import FolderReading, read_folder
from m3diff.datasets import DATASETS
from m3diff.datasets.doubts import Doubt, as_yaml
from m3diff.datasets.files import require_utf8
from m3diff.datasets.guess import combine_answers
from m3diff.records.errors import DataError
from m3diff.stages.ingest.params import DatasetEntry

MAX_COMPARED_PAIRS = 20  # number of pairs whose files are compared for each answer to a question


def check(
    root: Path,
    entries: Mapping[str, DatasetEntry],
    reader: str | None = None,
    stage_limits: StageLimits = EMBEDDED_LIMITS,
) -> tuple[list[str], bool]:
    """Check the folder of one dataset.

    Args:
        entries: `ingest.datasets`. If the root of an entry is this folder, the folder is read with that entry.
        reader: the reader of the folder's layout. If it is None, the layout is recognised.
        stage_limits: the limits with which ingest and validate would check the dataset.

    Returns:
        Lines to print, and whether the folder can be used without changes.

    Raises:
        DataError: the folder does not exist, or does not match any layout.
    """
    if not root.is_dir():
        raise DataError("check.no_folder", path=root)
    require_utf8(root)
    dataset = _configured_dataset(root, entries, reader)
    is_configured = dataset is not None
    if dataset is None:
        dataset = recognise(root, entries, reader)
        lines = [f"{root} {'is read as' if reader else 'looks like'} {dataset.entry.reader}"]
    else:
        lines = [f"{root} is {dataset.name} ({dataset.entry.reader})"]
    entry = dataset.entry
    lines.append(_licence_line(entry))

    is_present = {file: has_file(root, file) for file in annotation_files(entry)}
    lines += [f"  {'found  ' if is_file else 'MISSING'} {file}" for file, is_file in is_present.items()]
    lines += [f"  {note}" for note in dataset.notes]
    if not all(is_present.values()):
        return [*lines, "  nothing was read; download the missing files again"], False

    if dataset.doubts:
        # The table cannot be read until the user has decided what its columns mean
        reading = FolderReading([], is_sound=True, can_be_judged=True, doubts=dataset.doubts)
    else:
        reading = read_folder(dataset.name, entry)
    lines += reading.lines
    is_sound = reading.is_sound
    if reading.can_be_judged and all(doubt.is_sure for doubt in reading.doubts):
        judgement_lines, is_accepted = judge_dataset(
            dataset.name, _with_first_answers(entry, reading.doubts), stage_limits
        )
        lines += judgement_lines
        is_sound = is_sound and is_accepted

    # A sure answer goes into a new entry without asking. The user has to add it to an existing entry in params.yaml
    open_doubts = [doubt for doubt in reading.doubts if doubt.answers and (is_configured or not doubt.is_sure)]
    lines += _question_lines(open_doubts, with_answers=is_configured)
    if not is_configured and not reading.names_other_entry:
        lines += _entry_lines(dataset.name, entry, reading.doubts, open_doubts)
    return lines, is_sound and not open_doubts


def _configured_dataset(
    root: Path, entries: Mapping[str, DatasetEntry], reader: str | None
) -> RecognisedDataset | None:
    """Return the dataset of the entry with this root. Return None if no entry has this root and reader."""
    for name, entry in entries.items():
        if entry.root.resolve() == root.resolve():
            return RecognisedDataset(name, entry) if reader in (None, entry.reader) else None
    return None


def _licence_line(entry: DatasetEntry) -> str:
    licence = DATASETS[entry.reader].licence
    return (
        f"  licence: {licence.name} (train: {licence.train.answer}, redistribute: {licence.redistribute.answer}, "
        f"show: {licence.show.answer})"
    )


def _question_lines(doubts: Sequence[Doubt], with_answers: bool) -> list[str]:
    """Return the lines of all questions. With `with_answers`, add the options for each answer."""
    lines = []
    for doubt in doubts:
        lines += [f"  ASK {line}" for line in str(doubt.question).split("\n")]
    if with_answers:
        for doubt in doubts:
            lines += [f"    options: {as_yaml(answer)}" for answer in doubt.answers]
    return lines


def _entry_lines(name: str, entry: DatasetEntry, doubts: Sequence[Doubt], open_doubts: Sequence[Doubt]) -> list[str]:
    """Return the lines of the possible entries for params.yaml.

    Entries that pair images with copies of themselves are left out, unless all entries do.
    """
    remaining_doubts = []
    for doubt in doubts:
        answers = doubt.answers if doubt in open_doubts else doubt.answers[:1]
        if answers:
            remaining_doubts.append(doubt._replace(answers=answers))
    possible_options = combine_answers(dict(entry.options), remaining_doubts)
    without_copies = [options for options in possible_options if not _pairs_copies(entry, options)]
    possible_options = without_copies or possible_options

    choice = "one of these is " if len(possible_options) > 1 else ""
    lines = [f"{choice}the entry for ingest.datasets in params.yaml:"]
    for options in possible_options:
        fields = {"reader": entry.reader, "root": str(entry.root)} | ({"options": options} if options else {})
        # YAML quotes the name of a folder such as `no` or `007`
        lines.append(f"    {as_yaml({name: fields})[1:-1]}")
    if open_doubts:
        lines.append("copy the right entry into params.yaml or into a profile, and check again")
    return lines


def _pairs_copies(entry: DatasetEntry, options: dict[str, Any]) -> bool:
    """Return True if the options pair images with copies of themselves. Only the first pairs are compared."""
    try:
        rows = list(islice(DATASETS[entry.reader].read(entry.root, **options), MAX_COMPARED_PAIRS))
    except DataError:
        return False
    file_pairs = []
    for row in rows:
        if all(isinstance(image, str) for image in row.images) and len(row.images) == len(set(row.images)) == 2:
            before, after = (entry.root / image for image in row.images)
            if before.is_file() and after.is_file():
                file_pairs.append((before, after))
    return bool(file_pairs) and all(before.read_bytes() == after.read_bytes() for before, after in file_pairs)


def _with_first_answers(entry: DatasetEntry, doubts: Sequence[Doubt]) -> DatasetEntry:
    """Return the entry with the first answer to each doubt added to its options."""
    first_answers = [doubt._replace(answers=doubt.answers[:1]) for doubt in doubts if doubt.answers]
    (options,) = combine_answers(dict(entry.options), first_answers)
    return entry.model_copy(update={"options": options})
