"""The page at `/`: one file that asks nothing of any other machine, and pairs of the test split to try."""

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import check_licence
from m3diff.images.open import open_image
from m3diff.records.errors import DataError, readable
from m3diff.stages.ingest.params import DatasetEntry

FILE = Path(__file__).with_name("page.html")
EXAMPLES = 6
"""Pairs of the test split on the page."""


def read_page() -> tuple[str, str]:
    """The page and its Content-Security-Policy: this server alone, and no script or style but its own, by hash."""
    html, hashes = FILE.read_text(encoding="utf-8"), []
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        hashes.append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
    policy = (
        f"default-src 'none'; script-src {hashes[0]}; style-src {hashes[1]}; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


class Example(NamedTuple):
    id: str
    before: Path
    after: Path
    reference: str

    def as_dict(self, number: int) -> dict[str, Any]:
        """Its entry for the page, without any path of this machine."""
        images = {side: f"/examples/{number}/{side}" for side in ("before", "after")}
        return {"id": self.id, "reference": self.reference, **images}

    def read(self, side: str) -> tuple[bytes, str]:
        """(bytes, media type) of one image."""
        from PIL import Image

        data = (self.before if side == "before" else self.after).read_bytes()
        with open_image(data) as image:
            return data, Image.MIME.get(image.format or "", "application/octet-stream")


def find_examples(clean: Path, entries: Mapping[str, DatasetEntry], count: int = EXAMPLES) -> list[Example]:
    """Pairs of the test split, evenly over each dataset that the licence lets us show; fewer if there are fewer.

    Args:
        clean: the folder that validate writes; it need not be there.
        entries: datasets by name, as `ingest.datasets`.
    """
    table = clean / "records.parquet"
    shown = [name for name, entry in entries.items() if may_show(entry)]
    if not shown or not table.is_file():
        return []
    import polars as pl

    columns = ["id", "dataset", "before", "after", "references"]
    rows = pl.scan_parquet(table).filter(pl.col("split") == "test", pl.col("dataset").is_in(shown)).select(columns)
    found: list[Example] = []
    with readable(table):
        parts = rows.sort("id").collect().partition_by("dataset", maintain_order=True)
    for number, part in enumerate(parts):
        wanted = (count + number) // len(parts)  # the shares of all add up to count
        for place in range(min(wanted, len(part))):
            row = part.row((2 * place + 1) * len(part) // (2 * wanted), named=True)
            example = Example(row["id"], Path(row["before"]), Path(row["after"]), (row["references"] or [""])[0])
            if example.before.is_file() and example.after.is_file():
                found.append(example)
    return found


def may_show(entry: DatasetEntry) -> bool:
    """True if the licence of its dataset lets its images be on a page."""
    if entry.reader not in DATASETS:
        return False
    try:
        check_licence(DATASETS[entry.reader], "show")
    except DataError:
        return False
    return True
