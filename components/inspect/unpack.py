"""Images out of a dataset's Parquet files: `m3diff data unpack ROOT`. The dataset's file says which, by what names."""

from pathlib import Path

from components.datasets import DATASETS
from components.inspect.check import recognise
from components.records import DataError


def unpack(root: Path) -> str:
    """Write the images that are not there yet; what to tell the user.

    Raises:
        DataError: the folder is of no known layout, or its images are files already.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; name the folder that holds a dataset's Parquet files")
    name, entry, *_ = recognise(root)
    spec = DATASETS[entry.reader]
    if spec.unpack is None:
        raise DataError(f"{root}: looks like {name}, whose images are files already; `m3diff data check {root}`")
    return f"{spec.title}: {spec.unpack(root):,} images in {root / 'images'}"
