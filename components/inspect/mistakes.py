"""Typical mistakes in a dataset's folder: what was found, what is wrong with it, and what mends it, a line for each."""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from components.datasets.rows import Row
from components.inspect.manifest import is_image, manifests, two_folders
from components.records import NO_CHANGE

ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz")
SHEETS = (".xlsx", ".xls", ".ods", ".numbers")
VIDEOS = (".mp4", ".avi", ".mov", ".mkv", ".webm")
HEADER = "before,after,captions,split"
LISTED = 200_000
"""Files below a root that are looked at for a missing image."""

LOOKED = 1_000
"""Images whose first bytes are looked at; ingest decodes every one."""


def foreign(root: Path) -> str | None:
    """What the folder is, where it holds pairs in a form that no reader takes for its own."""
    names = {path.name for path in root.iterdir()}
    if "change_multi_captions.json" in names:
        return (
            "this is CARD's folder of Spot-the-Diff, whose captions are joined and cut at 60 words; take the original, "
            "which is scored by CARD's protocol, too (multi-change): `git clone "
            "https://github.com/harsh19/spot-the-diff`, folder data, reader spot_the_diff"
        )
    if "dataset_info.json" in names and '"m3diff_' in (root / "dataset_info.json").read_text("utf-8", "replace"):
        return (
            "this is what `m3diff export-llava` wrote of datasets that are in ingest.datasets already; name the folder "
            "of one of these, or, in another project, the folder of the images as root with the file in it: "
            "options: {manifest: train.json, columns: {images: images, captions: conversations, "
            "split: metadata.split, id: null}}"
        )
    return None


def in_folder(root: Path) -> Iterator[str]:
    """Mistakes that the names of a folder's files tell, where no table of pairs can be read."""
    files = sorted(path for path in root.iterdir() if path.name[0] != ".")
    for path in files:
        suffix = path.suffix.lower()
        if suffix in ARCHIVES:
            command = f"unzip {path} -d {root}" if suffix == ".zip" else f"tar -C {root} -xf {path}"
            yield f"{path.name}: is an archive, which is not read; unpack it: `{command}`"
        elif suffix in SHEETS:
            yield f"{path.name}: is a spreadsheet, which is not read; save it as CSV (UTF-8) with the header {HEADER}"
        elif suffix in VIDEOS:
            yield (
                f"{path.name}: is a video, and pairs are images; take frames of it: "
                f"`ffmpeg -i {path} -vf fps=1 {root}/%05d.png`, and write pairs.csv with the header {HEADER}"
            )
        elif suffix == ".dvc":
            yield f"{path.name}: is DVC's pointer to data that are not here; fetch them: `dvc pull {path}`"
        elif suffix in (".txt", ".xml", ".yaml", ".yml", ".ods", ".h5", ".pkl") and path.is_file():
            yield f"{path.name}: is no table that is read; write .csv, .tsv, .json, .jsonl or .parquet with {HEADER}"
    if not manifests(root):
        yield from _images_alone(root, [path for path in files if path.is_dir()], files)
    yield from _elsewhere(root, files)


def _images_alone(root: Path, folders: list[Path], files: list[Path]) -> Iterator[str]:
    """Images without a table: in one folder, or in two whose names do or do not match."""
    write = f"write {root / 'pairs.csv'} with the header {HEADER} and a line for each pair"
    holding = {folder.name: _images_in(folder) for folder in folders}
    holding = {name: images for name, images in holding.items() if images}
    sides = two_folders(root)
    if sides and all(side in holding for side in sides):
        before, after = (set(holding[side]) for side in sides)
        stems = {Path(name).stem for name in before} & {Path(name).stem for name in after}
        same = len(before & after)
        if same == len(before | after):
            yield f"{sides[0]}/ and {sides[1]}/ hold {same:,} pairs of images, but no file has captions; {write}"
        else:
            alone = sorted(before ^ after)[0]
            why = "under other suffixes" if len(stems) > same else "of the same name"
            yield (
                f"{sides[0]}/ and {sides[1]}/ hold {len(before):,} and {len(after):,} images, {same:,} of the same "
                f"name and {len(stems) - same:,} under other suffixes ({alone} has no partner {why}); {write}"
            )
    elif holding or any(is_image(path.name) for path in files):
        where = ", ".join(f"{name}/" for name in holding) or "the folder"
        yield f"{where}: holds images, but no file says which are a pair and what changed; {write}"


def _images_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if is_image(path.name)]
    except OSError:
        return []


def _elsewhere(root: Path, files: list[Path]) -> Iterator[str]:
    """A folder below, or the one above, that holds a table of pairs."""
    for folder in files:
        if folder.is_dir() and (found := _tables(folder)):
            yield f"{folder.name}/ holds {found[0].name}; perhaps you mean `m3diff data check {folder}`"
    above = root.resolve().parent
    if any(is_image(path.name) for path in files) and (found := _tables(above)):
        yield f"the folder above holds {found[0].name}; name that one: `m3diff data check {above}`"


def _tables(folder: Path) -> list[Path]:
    try:
        return manifests(folder)
    except OSError:
        return []


def of_images(root: Path, manifest: str, rows: Iterable[Row], missing: list[str]) -> Iterator[str]:
    """Why images are not found where the rows name them."""
    file = root / manifest
    values = [str(value) for row in rows for value in (row.before, row.after) if isinstance(value, str) and value]
    gone = [path.removeprefix(f"{root}/") for path in missing]
    above = f"{root.resolve()}/"
    if inside := [value for value in values if value.startswith((above, f"{root.absolute()}/"))]:
        start = above if inside[0].startswith(above) else f"{root.absolute()}/"
        yield f"{inside[0]}: is absolute; paths are relative to the root: `sed -i 's#{start}##g' {file}`"
    elif outside := [value for value in values if value.startswith("/")]:
        yield f"{outside[0]}: is absolute and outside of the root; copy the images into {root}"
    if links := [value for value in values if value.startswith(("http://", "https://"))]:
        yield f"{links[0]}: is an address; download the images into {root} and write their paths"
        return
    if slashes := [value for value in gone if "\\" in value]:
        pattern = r"\\\\" if file.suffix.startswith(".json") else r"\\"
        yield f"{slashes[0]}: has backslashes; paths have slashes: `sed -i 's#{pattern}#/#g' {file}`"
    elif blanks := [value for value in gone if value != value.strip()]:
        yield f"{blanks[0]!r}: begins or ends in a blank; remove it: `sed -i -E 's/ *, */,/g' {file}`"
    elif gone:
        yield _where_it_is(root, manifest, gone[0])


def _where_it_is(root: Path, manifest: str, name: str) -> str:
    """What is there in place of one missing image."""
    path = root / name
    if os.path.islink(path):
        return f"{name}: is a symbolic link to {os.readlink(path)}, which leads to no file; copy the file there"
    if os.path.isfile(root.resolve().parent / name):
        above, to = root.resolve().parent, root.resolve().name
        return f"{name}: is found from the folder above; take {above} as root: options: {{manifest: {to}/{manifest}}}"
    there = list(_below(root))
    if case := next((each for each in there if each.lower() == name.lower()), None):
        return f"{name}: there is {case}; large and small letters differ, write names as the files have them"
    stem = os.path.splitext(name)[0]
    if other := next((each for each in there if os.path.splitext(each)[0] == stem and is_image(each)), None):
        return f"{name}: there is {other}; write the suffix that the files have"
    if deeper := next((each for each in there if each.endswith(f"/{name}")), None):
        folder = deeper.removesuffix(name)
        return f"{name}: there is {deeper}; name the folder: columns: {{before: '{folder}{{before}}', after: ...}}"
    return f"{name}: is nowhere below {root}; fetch the images, or name the folder that holds them as root"


def _below(root: Path) -> Iterator[str]:
    """Files below the root, relative to it: the first of them."""
    count = 0
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name), root)
        if (count := count + len(names)) > LISTED:
            return


def of_rows(rows: Iterable[Row]) -> Iterator[str]:
    """What is wrong with captions, and with pairs of one image."""
    rows = list(rows)
    same = [row for row in rows if row.before and row.before == row.after and row.change_types != [NO_CHANGE]]
    if same:
        yield f"{same[0].source}: both images are {same[0].before} ({len(same):,} such pairs); name both"
    untyped = [row for row in rows if not isinstance(row.references, list) and row.references is not None]
    if untyped:
        yield f"{untyped[0].source}: captions are a text, a list of texts, or a JSON list in a field of a table"


FAULTS: dict[str, str] = {
    "has the same id": "one id is one pair: give each its own, or read without ids: columns: {id: null}",
    "quote fields that hold": "put captions between double quotes, or save the table as .tsv or .jsonl",
    "ends too early": "the file is cut off there: fetch or write it again",
    "is a symbolic link out of": "copy the images into the root, or set follow_links: true in the entry",
}
"""What mends the faults that hold these words."""


def of_faults(faults: list[str]) -> Iterator[str]:
    """What mends rows that cannot be read."""
    yield from (remedy for words, remedy in FAULTS.items() if any(words in fault for fault in faults))


def no_images(paths: Iterable[str]) -> Iterator[str]:
    """Of the first files, those that no image format begins like, with what they are instead."""
    for path in islice(paths, LOOKED):
        try:
            with Image.open(path):
                pass
        except UnidentifiedImageError:
            yield f"{path}: {_instead(Path(path).read_bytes()[:200])}"
        except OSError as error:
            yield f"{path}: cannot be read: {error.strerror}; check its permissions"
        except Image.DecompressionBombError:
            pass  # validate has a limit of its own


KINDS: tuple[tuple[Callable[[bytes], bool], str], ...] = (
    (lambda data: data.startswith(b"version https://git-lfs"), "is a pointer of Git LFS; fetch it: `git lfs pull`"),
    (lambda data: b"<html" in data.lower() or b"<!doctype" in data.lower(), "is a web page; download the image again"),
    (lambda data: data[4:8] == b"ftyp", "is a video or HEIC; convert it to PNG or JPEG"),
)


def _instead(data: bytes) -> str:
    return next((what for fits, what in KINDS if fits(data)), "is of no known image format; write PNG or JPEG")
