"""Syned: Emu Edit's photos and instructions, divided for training, with paraphrases as further test references.

Page: https://github.com/gautierevn/BLIP2IDC, folder code_release/Syned (Evennou et al., WACV 2025). Licence: MIT; the
instructions and images are Emu Edit's, CC BY-NC 4.0. `root` holds that folder's files and Emu Edit's root:

    splits.json                              {"train": [296, ...], "validation": [...]}: `idx` of Emu's validation split
    instructions_with_idx_train_split.txt    a line for each of Emu's validation pairs, which train and validate here
    instructions_with_idx_test_split.txt     a line for each of Emu's test pairs
    gt_augmented_test_clean.json             {"0 ": ["Place a goat near the fence", ...], ...}: a space ends each key
    emu_edit/data/*.parquet                  Emu Edit, for the images; the edit is Emu's own

    183 <INSTRUCT> Add a duck on the box of food.

Lines are sorted as text (0, 180, 360, ...): a pair's number is the one that its line begins with. A test pair's
references are its paraphrases, by a language model, and the instruction, as the authors score them. There are none to
eight paraphrases, mostly four; those that are a refusal ("I'm just an AI ...") or end too early stay, since they count
in every published score. Train and validation have the instruction alone. The edits that the authors made themselves,
eight to a photo, are not in the repository; the images here are Emu Edit's own. The paper says 3,590 pairs train and
validate, the files hold 3,589.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from m3diff.datasets import emu_edit, spec
from m3diff.datasets.files import describe, read_json, read_text

PARTS = {"train": "train", "validation": "val"}
MARK = "<INSTRUCT>"
VARIANTS = "gt_augmented_test_clean.json"
EMU = "emu_edit"


def read(root: Path) -> Iterator[spec.Row]:
    """Yield a row per line of the two files of instructions, then the numbers of `splits.json` that have no line."""
    splits, emu = dict[int, str](), root / EMU

    def listed(word: str, idx: int) -> Iterable[spec.Row]:
        splits[idx] = PARTS[word]
        return ()

    yield from spec.by_scene(root / "splits.json", listed, tuple(PARTS))
    images = {row.name: (row.before, row.after) for row in emu_edit.read(emu)} if emu.is_dir() else {}

    def pair(part: str, idx: int, split: str | None, texts: list[Any], source: str, fault: str | None) -> spec.Row:
        """By the name that Emu Edit has for it; an image that is not there by the place where it should be."""
        name, place = f"{part}-{idx}", f"{EMU}/data/{part}-*.parquet, idx {idx}"
        sides = images.get(name, (f"{place}, {emu_edit.BEFORE}", f"{place}, {emu_edit.AFTER}"))
        return spec.Row(name, split, name, *sides, texts, [], source, fault)

    file, seen = "instructions_with_idx_train_split.txt", set[int]()
    for source, idx, text, fault in _lines(root, file):
        if idx is None:
            yield spec.broken(None, source, fault)
            continue
        seen.add(idx)
        fault = None if idx in splits else "split: the number is in no list of splits.json"
        yield pair("validation", idx, splits.get(idx), [text], source, fault)
    for idx in sorted(splits.keys() - seen):
        fault = f"instruction: {file} has no line for it"
        yield pair("validation", idx, splits[idx], [], f"splits.json, {idx}", fault)
    variants = read_json(root / VARIANTS, dict)
    for source, idx, text, fault in _lines(root, "instructions_with_idx_test_split.txt"):
        if idx is None:
            yield spec.broken("test", source, fault)
            continue
        found = variants.get(f"{idx} ")
        if not isinstance(found, list):
            found, fault = [], f"{VARIANTS} {f'{idx} '!r}: expected a list, found {describe(found)}"
        yield pair("test", idx, "test", [] if fault else [*found, text], source, fault)


def _lines(root: Path, file: str) -> Iterator[tuple[str, int | None, str, str | None]]:
    """Place, number (None where there is none), instruction and fault of each line."""
    for number, line in enumerate(read_text(root / file).split("\n"), 1):
        if line.strip():
            idx, mark, text = line.partition(MARK)
            usable = mark and idx.strip().isdecimal()
            fault = None if usable else f"line: expected '<number> {MARK} <text>', found {describe(line)}"
            yield f"{file}, line {number}", int(idx) if usable else None, text.strip(), fault


PUBLISHED = spec.Published(
    "syned", "Syned", spec.SplitCount(3_050, 3_050), spec.SplitCount(539, 539), spec.SplitCount(2_022, 10_053)
)
NOT_SOLD = spec.Permission("conditions", "credit the authors of Syned and of Emu Edit; no commercial use")
BLIP2IDC = "gautierevn/BLIP2IDC: code_release/train_BLIP2IDC.py"
SPEC = spec.DatasetSpec(
    title="Syned",
    page="https://github.com/gautierevn/BLIP2IDC",
    paper="Reframing Image Difference Captioning with BLIP2IDC and Synthetic Augmentation (Evennou et al., WACV 2025)",
    licence=spec.Licence.of("MIT", "https://github.com/gautierevn/BLIP2IDC/blob/main/LICENSE", NOT_SOLD),
    read=read,
    files=("splits.json", "instructions_with_idx_train_split.txt", "instructions_with_idx_test_split.txt", VARIANTS),
    task="edit",
    published=(PUBLISHED,),
    protocols=(spec.Protocol("test", n=PUBLISHED.test.pairs, source=BLIP2IDC),),
)
