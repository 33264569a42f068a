"""First task of the tiny base's vision encoder: to segment a scene, through a linear head that is dropped.

Each patch says, of POINTS x POINTS points in it, what lies there: nothing, a mark or an object of which kind, colour,
size and state. An encoder that learns from descriptions alone gets as far in ten times as long (LOG.md);
LLaVA-OneVision starts from an encoder that can see, too.
"""

import numpy as np
import torch
from torch import Tensor, nn

from m3diff.datasets.minichange.scene import COLORS, KINDS, MARK_WIDTH, STATES, WIDTHS, Scene

POINTS = 4  # a side of a patch
NONE = -1
SIZES = tuple(dict.fromkeys(size for widths in WIDTHS.values() for size in widths))
SHOWN = tuple((kind, state) for kind, states in STATES.items() for state in states)
MARK = 1 + len(KINDS)
CLASSES = (MARK + 1, len(COLORS), len(SIZES), len(SHOWN))
"""How many there are of what (0 is nothing, then KINDS, then a mark), of colours, of sizes and of states."""


def segment(scene: Scene, rows: int, columns: int) -> np.ndarray:
    """Return what the frame shows at rows x columns points, an object as wide and as high as its size.

    Returns: [rows, columns, 4] int8, the classes of CLASSES, rows from the top; NONE where a class does not apply.
    """
    found = np.full((rows, columns, len(CLASSES)), NONE, dtype=np.int8)
    found[..., 0] = 0
    points = (np.arange(rows) + 0.5) / rows, (np.arange(columns) + 0.5) / columns
    for mark in scene.marks:
        found[_covered(scene, mark.center, MARK_WIDTH, points)] = (MARK, NONE, NONE, NONE)
    for thing in scene.things:
        state = SHOWN.index((thing.kind, thing.state)) if thing.kind in STATES else NONE
        classes = (1 + KINDS.index(thing.kind), COLORS.index(thing.color), SIZES.index(thing.size), state)
        found[_covered(scene, thing.center, WIDTHS[scene.level][thing.size], points)] = classes
    return found


def _covered(
    scene: Scene, center: tuple[float, float], width: float, points: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, ...]:
    """Rows and columns of the points inside a square of the table."""
    (left, top), (right, bottom) = (
        scene.view.project((center[0] + half, center[1] + half)) for half in (-width / 2, width / 2)
    )
    down, across = points
    return np.ix_((down > top) & (down < bottom), (across > left) & (across < right))


def truth_of(scenes: list[Scene], side: int, images: int) -> Tensor:
    """[pictures, side, side, 4]: the classes of pictures of side x side points, of so many scenes each, stacked."""
    parts = [segment(scene, side // images, side) for scene in scenes]
    return torch.from_numpy(np.stack(parts)).long().view(-1, side, side, len(CLASSES))


class Segmentation(nn.Module):
    """The vision encoder, which trains along, and the head on its patches."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, POINTS * POINTS * sum(CLASSES))

    def forward(self, patches: Tensor) -> tuple[Tensor, ...]:
        """Logits [pictures, points, points, classes] of each of CLASSES for patches [pictures, patches, width]."""
        side = round(patches.shape[1] ** 0.5)
        cells = self.head(patches).view(len(patches), side, side, POINTS, POINTS, -1)
        return (
            cells.permute(0, 1, 3, 2, 4, 5).reshape(len(patches), side * POINTS, side * POINTS, -1).split(CLASSES, -1)
        )

    def loss(self, patches: Tensor, scenes: list[Scene], images: int = 1) -> tuple[Tensor, float]:
        """The classes' mean losses added up, and the share of points on objects and marks whose kind is right. Each
        picture shows so many of the scenes, one below the other."""
        logits = self(patches)
        truth = truth_of(scenes, logits[0].shape[1], images)
        losses = [
            nn.functional.cross_entropy(each.flatten(0, 2), truth[..., k].flatten(), ignore_index=NONE)
            for k, each in enumerate(logits)
        ]
        kinds = truth[..., 0]
        right = (logits[0].argmax(-1) == kinds)[kinds > 0]
        return torch.stack(losses).sum(), float(right.float().mean())
