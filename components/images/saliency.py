"""Draw a saliency map on an image, as outlines around the regions that the model attended to.

The scale is the same for all models. The cells of a map sum to 1 (see `mean_map` of the model), so with even attention,
each cell would have the value 1 / number of cells, the even share. Regions above 2, 3 and 4 even shares are outlined
with increasingly thick lines. The image stays visible.
"""

from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageDraw

# Minimum multiple of an even share -> colour of the outline
OUTLINE_COLOURS = {2.0: (255, 205, 90), 3.0: (240, 90, 40), 4.0: (190, 20, 60)}

HALO_COLOUR = (20, 20, 20)  # dark rim that makes outlines visible on any image
Segment = tuple[tuple[float, float], tuple[float, float]]  # two points (x, y)


def draw_outlines(image: Image.Image, grid: np.ndarray) -> Image.Image:
    """Return a copy of the image with the outlines of its saliency map.

    Args:
        image: an RGB image.
        grid: the saliency map, [rows, columns]. A square map covers the image after padding to a square. Any other map
            covers the image itself, which the model stretches.
    """
    outlined_image = image.copy()
    pen = ImageDraw.Draw(outlined_image)
    thinnest_px = max(1, round(min(image.size) / 150))
    is_padded = grid.shape[0] == grid.shape[1]
    multiples = grid * grid.size
    for number, (threshold, colour) in enumerate(OUTLINE_COLOURS.items()):
        width = thinnest_px * (1 + number)
        borders = region_borders(multiples >= threshold)
        segments = [segment_in_pixels(segment, image.size, width, is_padded) for segment in borders]
        for segment in segments:
            pen.line(segment, fill=HALO_COLOUR, width=width + 2)
        for segment in segments:
            pen.line(segment, fill=colour, width=width)
    return outlined_image


def region_borders(is_inside: np.ndarray) -> Iterator[Segment]:
    """Yield the edges between cells inside and outside a region, as fractions of the grid's width and height.

    Args:
        is_inside: boolean array [rows, columns] that is true for cells of the region.
    """
    rows, columns = is_inside.shape
    padded = np.pad(is_inside, 1)
    differs_from_above = padded[1:, 1:] != padded[:-1, 1:]
    for row, column in np.argwhere(differs_from_above):
        if column < columns:
            yield (column / columns, row / rows), ((column + 1) / columns, row / rows)
    differs_from_left = padded[1:, 1:] != padded[1:, :-1]
    for row, column in np.argwhere(differs_from_left):
        if row < rows:
            yield (column / columns, row / rows), (column / columns, (row + 1) / rows)


def segment_in_pixels(segment: Segment, size: tuple[int, int], width: int, is_padded: bool = True) -> Segment:
    """Convert a segment to pixels of the image. Move it inwards if the image's border would cut off the drawn line.

    Args:
        segment: two points, as fractions of the grid's width and height.
        size: width and height of the image, in pixels.
        width: width of the line, in pixels.
        is_padded: whether the grid covers the image after padding to a square. If false, it covers the image itself.
    """
    image_width, image_height = size
    grid_width, grid_height = (max(size), max(size)) if is_padded else size
    left_padding = (grid_width - image_width) // 2
    top_padding = (grid_height - image_height) // 2
    inset = (width + 1) / 2

    def to_pixels(point: tuple[float, float]) -> tuple[float, float]:
        x = point[0] * grid_width - left_padding
        y = point[1] * grid_height - top_padding
        return min(max(x, inset), image_width - 1 - inset), min(max(y, inset), image_height - 1 - inset)

    return to_pixels(segment[0]), to_pixels(segment[1])
