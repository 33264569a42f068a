"""A saliency map over its image: outlines around what the model looked at, on one scale for every pair and model.

A map sums to 1 over its cells (`mean_map` of the model), so a cell's value times the number of cells says how many
times its even share it has. Regions above 2, 3 and 4 shares are outlined, thin to thick, and the image stays as it is.
"""

from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageDraw

LEVELS = {2.0: (255, 205, 90), 3.0: (240, 90, 40), 4.0: (190, 20, 60)}  # shares, and the colour of their outline

HALO = (20, 20, 20)
Segment = tuple[tuple[float, float], tuple[float, float]]


def outlined(image: Image.Image, grid: np.ndarray) -> Image.Image:
    """The image with the outlines of its map.

    Args:
        image: RGB.
        grid: [rows, columns]. A square one lies over the square that the model pads the image to; any other over the
            image itself, which the model stretches.
    """
    drawn = image.copy()
    pen = ImageDraw.Draw(drawn)
    thin = max(1, round(min(image.size) / 150))
    shares = grid * grid.size
    for number, (share, colour) in enumerate(LEVELS.items()):
        width = thin * (1 + number)
        is_padded = grid.shape[0] == grid.shape[1]
        segments = [fitted(segment, image.size, width, is_padded) for segment in borders(shares >= share)]
        for ink, extra in ((HALO, 2), (colour, 0)):
            for segment in segments:
                pen.line(segment, fill=ink, width=width + extra)
    return drawn


def borders(inside: np.ndarray) -> Iterator[Segment]:
    """The sides between cells inside and outside, as ((x, y), (x, y)) in shares of the grid."""
    rows, columns = inside.shape
    framed = np.pad(inside, 1)
    for row, column in np.argwhere(framed[1:, 1:] != framed[:-1, 1:]):  # between a row and the one above it
        if column < columns:
            yield (column / columns, row / rows), ((column + 1) / columns, row / rows)
    for row, column in np.argwhere(framed[1:, 1:] != framed[1:, :-1]):
        if row < rows:
            yield (column / columns, row / rows), (column / columns, (row + 1) / rows)


def fitted(segment: Segment, size: tuple[int, int], width: int, is_padded: bool = True) -> Segment:
    """A segment in pixels of the image, moved inwards where it would be cut by its edge."""
    across, down = (max(size), max(size)) if is_padded else size
    left, top, inset = (across - size[0]) // 2, (down - size[1]) // 2, (width + 1) / 2

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = point[0] * across - left, point[1] * down - top
        return min(max(x, inset), size[0] - 1 - inset), min(max(y, inset), size[1] - 1 - inset)

    return place(segment[0]), place(segment[1])
