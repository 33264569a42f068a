"""Explain why a folder does not match any layout: what it contains, and which table of pairs it needs."""

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from m3diff.datasets import DATASETS
from m3diff.datasets.folders import match_names
from m3diff.datasets.guess import DATASET_DICT_FILE, is_saved_by_datasets, table_files
from m3diff.datasets.order import order_names
from m3diff.datasets.tables import TABLE_SUFFIXES, is_image
from m3diff.records.errors import Fault, shell_word

MAX_SHOWN_FILES = 8
MAX_EXAMPLE_LINES = 3  # number of pairs in the example table for the user

HEADER = "before,after,captions,split"
# Suffixes of files that are not tables, by the error code for such files
SUFFIXES_OF_FAULT = {
    "check.archive": (".tar", ".tgz", ".zip", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar"),
    "check.video": (".mp4", ".avi", ".mov", ".mkv", ".webm"),
    "check.pointer_of_dvc": (".dvc",),
    "check.format_not_read": (
        ".txt", ".xml", ".yaml", ".yml", ".h5", ".pkl", ".ndjson", ".tab", ".pq", ".arrow", ".feather",
        ".xlsx", ".xls", ".ods", ".numbers",
    ),
}  # fmt: skip


def fault_of_unknown_folder(root: Path, table_faults: Sequence[Fault]) -> Fault:
    """Return a fault that says what the folder contains, how to turn it into a dataset, and which readers exist.

    Args:
        table_faults: for each table in the folder, the reason why it cannot be read.
    """
    paths = sorted(path for path in root.iterdir() if path.name[0] != ".")
    folders = [path for path in paths if path.is_dir()]
    advice = list(table_faults)
    if is_saved_by_datasets(root):
        advice.append(_advise_on_saved_dataset(root))
        paths_to_explain = []
    else:
        advice += [_advise_on_saved_dataset(folder) for folder in folders if is_saved_by_datasets(folder)]
        paths_to_explain = paths
    for path in paths_to_explain:
        if _is_compressed_table(path.name):
            advice.append(Fault("files.gzip", path=path.name, command=f"gunzip {shell_word(path.name)}"))
            continue
        for code, suffixes in SUFFIXES_OF_FAULT.items():
            if path.name.lower().endswith(suffixes):
                advice.append(Fault(code, path=path.name, header=HEADER))
    if not table_files(root) and any(is_image(path.name) for path in chain(paths, root.glob("*/*"))):
        advice.append(_advise_on_images(root, folders))
    if not advice:
        advice.append(Fault("check.no_pairs", table=root / "pairs.csv", header=HEADER))
    advice += _tables_nearby([*folders, root.resolve().parent])

    return Fault(
        "check.unknown_layout",
        path=root,
        names=[path.name for path in paths[:MAX_SHOWN_FILES]] or ["nothing"],
        faults=advice,
        readers=["pairs", *(reader for reader in DATASETS if reader != "pairs")],
    )


def _advise_on_saved_dataset(folder: Path) -> Fault:
    """Return the command that exports a folder of the library `datasets` to Parquet, one file per split."""
    out_name = f"{folder.resolve().name}-parquet"
    out = folder.with_name(out_name) if folder.name else folder.resolve().with_name(out_name)  # "." has no name
    if (folder / DATASET_DICT_FILE).is_file():
        export = "[part.to_parquet(f'{sys.argv[2]}/{name}.parquet') for name, part in data.items()]"
    else:
        export = "data.to_parquet(sys.argv[2] + '/pairs.parquet')"
    script = f"import sys; from datasets import load_from_disk; data = load_from_disk(sys.argv[1]); {export}"
    arguments = f"{shell_word(folder)} {shell_word(out)}"
    return Fault(
        "check.saved_by_datasets",
        path=folder,
        command=f'mkdir -p {shell_word(out)} && python -c "{script}" {arguments}',
        next_command=f"m3diff data check {shell_word(out)}",
    )


def _is_compressed_table(name: str) -> bool:
    """Return whether a file is a table that is compressed with gzip, such as pairs.jsonl.gz."""
    return name.lower().endswith(tuple(f"{suffix}.gz" for suffix in TABLE_SUFFIXES))


def _tables_nearby(folders: Sequence[Path]) -> Iterator[Fault]:
    """Yield advice for each folder that contains a table, directly or in its folder `annotations`."""
    for folder in folders:
        annotations = folder / "annotations" if (folder / "annotations").is_dir() else folder
        tables = table_files(annotations)
        if tables:
            command = f"m3diff data check {shell_word(folder)}"
            yield Fault("check.table_nearby", file=annotations / tables[0].name, command=command)


def _advise_on_images(root: Path, folders: Sequence[Path]) -> Fault:
    """Return advice for images without a table. If the images in two folders match, include the first table lines."""
    advice = Fault("check.images_without_table", table=root / "pairs.csv", header=HEADER)
    images_of_folder = {folder: _images_by_stem(folder) for folder in folders}
    image_folders = [folder for folder in folders if images_of_folder[folder]]
    if len(image_folders) != 2:
        return advice

    before_folder, after_folder = image_folders
    folder_order = order_names(before_folder.name, after_folder.name)
    if folder_order is not None and folder_order.before == after_folder.name:
        before_folder, after_folder = after_folder, before_folder
    before_images = images_of_folder[before_folder]
    after_images = images_of_folder[after_folder]
    after_of_before = match_names(list(before_images), list(after_images)).pairs
    if not after_of_before:
        return advice

    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(HEADER.split(","))
    for before_name, after_name in islice(sorted(after_of_before.items()), MAX_EXAMPLE_LINES):
        before = before_images[before_name].relative_to(root).as_posix()
        after = after_images[after_name].relative_to(root).as_posix()
        writer.writerow([before, after, "WHAT CHANGED", "train"])
    is_ordered = folder_order is not None
    return Fault(
        "check.matching_images_without_table" if is_ordered else "check.matching_images_in_no_order",
        **advice.fields,
        before=before_folder.name,
        after=after_folder.name,
        pairs=len(after_of_before),
        rows=table.getvalue().splitlines(),
        command=f"m3diff caption {shell_word(before_folder)} {shell_word(after_folder)}",
    )


def _images_by_stem(folder: Path) -> dict[str, Path]:
    """Return the images in a folder by name without suffix. If two images have the same name, return an empty dict."""
    images = [path for path in sorted(folder.glob("[!.]*")) if is_image(path.name)]
    by_stem = {path.stem: path for path in images}
    return by_stem if len(by_stem) == len(images) else {}
