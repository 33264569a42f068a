"""What the tiny base's vision encoder is taught first: to segment a scene, through a linear head that is dropped.

Each patch says, of POINTS x POINTS points in it, what lies there: nothing, a mark or an object of which kind, colour,
size and state. An encoder that learns from descriptions alone gets as far in ten times as long (LOG.md);
LLaVA-OneVision starts from an encoder that can see, too.
"""

import numpy as np
import torch
from torch import Tensor, nn

from components.datasets.minichange.scene import COLORS, KINDS, MARK_WIDTH, STATES, WIDTHS, Scene

POINTS = 4  # a side of a patch
NONE = -1
SIZES = tuple(dict.fromkeys(size for widths in WIDTHS.values() for size in widths))
SHOWN = tuple((kind, state) for kind, states in STATES.items() for state in states)
MARK = 1 + len(KINDS)
CLASSES = (MARK + 1, len(COLORS), len(SIZES), len(SHOWN))
"""How many there are of what (0 is nothing, then KINDS, then a mark), of colours, of sizes and of states."""


def segment(scene: Scene, side: int) -> np.ndarray:
    """What the frame shows at side x side points, an object as wide and as high as its size.

    Returns: [side, side, 4] int8, the classes of CLASSES, rows from the top; NONE where a class does not apply.
    """
    found = np.full((side, side, len(CLASSES)), NONE, dtype=np.int8)
    found[..., 0] = 0
    points = (np.arange(side) + 0.5) / side
    for mark in scene.marks:
        found[_covered(scene, mark.center, MARK_WIDTH, points)] = (MARK, NONE, NONE, NONE)
    for thing in scene.things:
        state = SHOWN.index((thing.kind, thing.state)) if thing.kind in STATES else NONE
        classes = (1 + KINDS.index(thing.kind), COLORS.index(thing.color), SIZES.index(thing.size), state)
        found[_covered(scene, thing.center, WIDTHS[scene.level][thing.size], points)] = classes
    return found


def _covered(scene: Scene, center: tuple[float, float], width: float, points: np.ndarray) -> tuple[np.ndarray, ...]:
    """Rows and columns of the points inside a square of the table."""
    (left, top), (right, bottom) = (
        scene.view.project((center[0] + half, center[1] + half)) for half in (-width / 2, width / 2)
    )
    return np.ix_((points > top) & (points < bottom), (points > left) & (points < right))


class Segmentation(nn.Module):
    """The vision encoder and the head."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, POINTS * POINTS * sum(CLASSES))

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Logits [images, points, points, classes] of each of CLASSES for pixels [images, 3, height, width]."""
        features = self.encoder(pixel_values=pixels, output_hidden_states=True).hidden_states[
            -1
        ]  # as the LLM gets them
        side = round(features.shape[1] ** 0.5)
        cells = self.head(features).view(len(features), side, side, POINTS, POINTS, -1)
        return (
            cells.permute(0, 1, 3, 2, 4, 5).reshape(len(features), side * POINTS, side * POINTS, -1).split(CLASSES, -1)
        )

    def loss(self, pixels: Tensor, scenes: list[Scene]) -> tuple[Tensor, float]:
        """The classes' mean losses added up, and the share of points on objects and marks whose kind is right."""
        logits = self(pixels)
        truth = torch.from_numpy(np.stack([segment(scene, logits[0].shape[1]) for scene in scenes])).long()
        losses = [
            nn.functional.cross_entropy(each.flatten(0, 2), truth[..., k].flatten(), ignore_index=NONE)
            for k, each in enumerate(logits)
        ]
        kinds = truth[..., 0]
        right = (logits[0].argmax(-1) == kinds)[kinds > 0]
        return torch.stack(losses).sum(), float(right.float().mean())
