"""Syned: the photos and instructions of Emu Edit, divided for training, with paraphrases as additional test references.

Page: https://github.com/gautierevn/BLIP2IDC, folder code_release/Syned (Evennou et al., WACV 2025). Licence: MIT; the
instructions and images are Emu Edit's, CC BY-NC 4.0. `root` contains the files of that folder and Emu Edit:

    splits.json                              {"train": [296, ...], "validation": [...]}: `idx` in Emu's validation split
    instructions_with_idx_train_split.txt    one line per validation pair of Emu Edit, for training and validation
    instructions_with_idx_test_split.txt     one line per test pair of Emu Edit
    gt_augmented_test_clean.json             {"0 ": ["Place a goat near the fence", ...], ...}: each key ends in a space
    emu_edit/data/*.parquet                  the dataset Emu Edit with its own edits, for the images

    183 <INSTRUCT> Add a duck on the box of food.

Each line begins with the number of its pair; lines are sorted as text (0, 180, 360, ...). As in the authors' scores,
the references of a test pair are the paraphrases written by a language model, and the instruction. A pair has up to
eight paraphrases, usually four. They include refusals ("I'm just an AI ...") and truncated texts, which are kept
because all published scores include them. Pairs in train and validation only have the instruction. The authors made
eight edits per photo, but these are not in the repository, so the images of Emu Edit are used. The paper mentions 3,590
pairs in train and validation; the files contain 3,589.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3diff.datasets import emu_edit, spec
from m3diff.datasets.files import read_json, read_text
from m3diff.records.errors import Fault

SPLIT_OF_PART = {"train": "train", "validation": "val"}
SEPARATOR = "<INSTRUCT>"
PARAPHRASES_FILE = "gt_augmented_test_clean.json"
FILES = (
    "splits.json",
    "instructions_with_idx_train_split.txt",
    "instructions_with_idx_test_split.txt",
    PARAPHRASES_FILE,
)
EMU_FOLDER = "emu_edit"


def read(root: Path) -> Iterator[spec.Row]:
    """Yield one row per line of the two instruction files, then the numbers in `splits.json` that have no line."""
    split_of_pair: dict[int, str] = {}
    emu_root = root / EMU_FOLDER

    def note_split(part: str, idx: int) -> Iterable[spec.Row]:
        split_of_pair[idx] = SPLIT_OF_PART[part]
        return ()

    # This fills `split_of_pair`. It only yields rows, which are broken, for entries that are not numbers
    yield from spec.rows_by_scene(root / "splits.json", note_split, tuple(SPLIT_OF_PART))
    images_by_name: dict[str, tuple[Any, ...]] = {}
    if emu_root.is_dir():
        images_by_name = {row.name: row.images for row in emu_edit.read(emu_root)}

    def make_row(
        part: str, idx: int, split: str | None, texts: list[Any], source: str, fault: Fault | None
    ) -> spec.Row:
        """Return the row of a pair, with the name and images that the pair has in Emu Edit."""
        name = f"{part}-{idx}"
        # validate reports a missing image by its path, so this path shows where the image should be
        location = f"{EMU_FOLDER}/data/{part}-*.parquet, idx {idx}"
        missing_images = (f"{location}, {emu_edit.BEFORE}", f"{location}, {emu_edit.AFTER}")
        return spec.Row(
            name=name,
            split=split,
            scene=name,
            images=images_by_name.get(name, missing_images),
            references=texts,
            source=source,
            fault=fault,
        )

    file = "instructions_with_idx_train_split.txt"
    numbers_with_line = set[int]()
    for line in _read_lines(root, file):
        if line.idx is None:
            yield spec.broken_row(None, line.source, line.fault)
            continue
        numbers_with_line.add(line.idx)
        fault = None
        if line.idx not in split_of_pair:
            fault = Fault("datasets.scene_without_split", key="split", file="splits.json")
        yield make_row("validation", line.idx, split_of_pair.get(line.idx), [line.text], line.source, fault)
    for idx in sorted(split_of_pair.keys() - numbers_with_line):
        fault = Fault("datasets.no_line_for_pair", key="instruction", file=file)
        yield make_row("validation", idx, split_of_pair[idx], [], f"splits.json, {idx}", fault)

    paraphrases_by_key = read_json(root / PARAPHRASES_FILE, dict)
    for line in _read_lines(root, "instructions_with_idx_test_split.txt"):
        if line.idx is None:
            yield spec.broken_row("test", line.source, line.fault)
            continue
        key = f"{line.idx} "
        paraphrases = paraphrases_by_key.get(key)
        if isinstance(paraphrases, list):
            yield make_row("test", line.idx, "test", [*paraphrases, line.text], line.source, None)
        else:
            fault = spec.unexpected(f"{PARAPHRASES_FILE} {key!r}", "a list", paraphrases)
            yield make_row("test", line.idx, "test", [], line.source, fault)


def recognise(root: Path) -> bool:
    """Return whether the folder has a file besides splits.json, which much other data has."""
    return spec.has_other_file(root, FILES, "splits.json")


@dataclass(frozen=True)
class _InstructionLine:
    """A line of an instruction file. `idx` is the number of its pair, or None if the line has a fault."""

    source: str
    idx: int | None
    text: str
    fault: Fault | None


def _read_lines(root: Path, file: str) -> Iterator[_InstructionLine]:
    """Yield the lines of an instruction file that are not blank."""
    for number, line in enumerate(read_text(root / file).split("\n"), 1):
        if line.strip():
            idx, separator, text = line.partition(SEPARATOR)
            source = f"{file}, line {number}"
            if separator and idx.strip().isdecimal():
                yield _InstructionLine(source, int(idx), text.strip(), fault=None)
            else:
                fault = spec.unexpected("line", f"'<number> {SEPARATOR} <text>'", line)
                yield _InstructionLine(source, None, text.strip(), fault)


PUBLISHED = spec.Published(
    "syned", "Syned", spec.SplitCount(3_050, 3_050), spec.SplitCount(539, 539), spec.SplitCount(2_022, 10_053)
)
NON_COMMERCIAL = spec.Permission("conditions", "credit the authors of Syned and of Emu Edit; no commercial use")
BLIP2IDC = "gautierevn/BLIP2IDC: code_release/train_BLIP2IDC.py"
SPEC = spec.DatasetSpec(
    title="Syned",
    page="https://github.com/gautierevn/BLIP2IDC",
    paper="Reframing Image Difference Captioning with BLIP2IDC and Synthetic Augmentation (Evennou et al., WACV 2025)",
    licence=spec.Licence.for_every_use(
        "MIT", "https://github.com/gautierevn/BLIP2IDC/blob/main/LICENSE", NON_COMMERCIAL
    ),
    read=read,
    files=FILES,
    recognise=recognise,
    task="edit",
    published=(PUBLISHED,),
    protocols=(spec.Protocol("test", published_pairs=PUBLISHED.test.pairs, source=BLIP2IDC),),
)
