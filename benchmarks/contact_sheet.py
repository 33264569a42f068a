"""Pairs of a dataset as sheets of PNG, before beside after at the size they have, each under its first reference: to
look at with one's own eyes.

    python -m benchmarks.contact_sheet data/01_raw/minichange --reader minichange --count 100 --out runs/sheets
"""

import argparse
import sys
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).parent.parent))

from components.datasets import DATASETS
from components.datasets.rows import Row
from components.images import load_image

GAP, LINE, LINES = 6, 13, 3
Shown = tuple[str, Image.Image, Image.Image]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--reader", default="minichange", choices=DATASETS)
    parser.add_argument("--split", default="test")
    parser.add_argument("--count", type=int, default=100, help="pairs, from the first")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--pairs-per-sheet", type=int, default=10)
    parser.add_argument("--columns", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = [row for row in DATASETS[args.reader].read(args.root) if row.split == args.split and not row.fault]
    args.out.mkdir(parents=True, exist_ok=True)
    for first in range(args.skip, min(args.skip + args.count, len(rows)), args.pairs_per_sheet):
        some = rows[first : min(first + args.pairs_per_sheet, args.skip + args.count)]
        path = args.out / f"{first:04d}.png"
        sheet([shown(args.root, row) for row in some], args.columns).save(path)
        print(path)


def shown(root: Path, row: Row) -> Shown:
    """Caption, image before and image after of a row."""
    before, after = (load_image(root / str(path)) for path in (row.before, row.after))
    return f"{row.name}: {row.references[0]}", before, after


def sheet(pairs: list[Shown], columns: int) -> Image.Image:
    """The pairs in reading order."""
    font = ImageFont.load_default(11)
    width = max(2 * before.width + 3 * GAP for _, before, _ in pairs)
    height = max(before.height for _, before, _ in pairs) + LINES * LINE + 2 * GAP
    page = Image.new("RGB", (columns * width, -(-len(pairs) // columns) * height), "white")
    draw = ImageDraw.Draw(page)
    for number, (caption, before, after) in enumerate(pairs):
        x, y = number % columns * width + GAP, number // columns * height
        for line, text in enumerate(textwrap.wrap(caption, width // 6)[:LINES]):
            draw.text((x, y + line * LINE), text, fill="black", font=font)
        page.paste(before, (x, y + LINES * LINE + GAP))
        page.paste(after, (x + before.width + GAP, y + LINES * LINE + GAP))
    return page


if __name__ == "__main__":
    main()
