"""Tasks of the tiny base: to describe images, whole, place by place, or the things that are asked for.

Two images of a task are always unrelated (OneDiff's Coupled Sample Training, arXiv 2407.05645): the base is never
shown a difference. Asking for a thing by its looks teaches the way from looks to place and, where there is none, to
"nothing"; without that way a short fine-tuning run does not find the place of a change (see LOG.md).

Before them the vision encoder may learn to segment a scene, through a linear head that is dropped: each patch says, of
POINTS x POINTS points in it, what lies there, nothing, a mark or an object of which kind, colour, size and state. An
encoder that learns from descriptions alone gets as far in ten times as long (LOG.md); LLaVA-OneVision starts from an
encoder that can see, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from m3diff.datasets.minichange.language import describe_cells, describe_scene, describe_things, references
from m3diff.datasets.minichange.scene import (
    COLORS,
    KINDS,
    LEVELS,
    MARK_WIDTH,
    PLACES,
    STATES,
    WIDTHS,
    Level,
    Scene,
    pick,
    sample_types,
)
from m3diff.stages.pretrain.params import TASKS, TaskName

ASKED_FOR = 4  # things a question names
QUESTIONS = (
    "What has changed from the first image to the second?",
    "Describe the difference between the two images.",
    "Compare the two images and say what changed.",
    "What is different in the second image?",
    "Look at the image before and the image after. What changed?",
    "Say in words how the second image differs from the first.",
)
"""What fine-tuning will ask (profiles/questions.yaml, task `difference`; a test compares the two)."""

DESCRIBE = ("Describe the image.", "Describe both images.")


@dataclass(frozen=True)
class Task:
    """`images` scenes make one sample: a question and its answer."""

    name: TaskName
    images: int
    ask: Callable[[np.random.Generator, list[Scene]], tuple[str, str]]


def whole(rng: np.random.Generator, scenes: list[Scene]) -> tuple[str, str]:
    """Each image in reading order."""
    if len(scenes) == 1:
        return DESCRIBE[0], describe_scene(scenes[0])
    return DESCRIBE[1], "; ".join(f"image {k}: {describe_scene(s)}" for k, s in enumerate(scenes, start=1))


def side_by_side(rng: np.random.Generator, scenes: list[Scene]) -> tuple[str, str]:
    """Both images, place by place in any order."""
    first, second = (describe_cells(scene) for scene in scenes)
    cells = rng.permutation(sorted({*first, *second}))
    parts = [f"{PLACES[c]} {first.get(c, 'nothing')} then {second.get(c, 'nothing')}" for c in cells]
    return "Describe both images place by place.", ", ".join(parts)


def asked_for(rng: np.random.Generator, scenes: list[Scene]) -> tuple[str, str]:
    """Some things, named by looks that at most one thing of the images has: where each is, or that there is none."""
    things = [thing for scene in scenes for thing in describe_things(scene)]
    here = [(f"{PLACES[cell]} {text}", tuple(text.split()[1:4])) for cell, text in things]  # `a small red box ...`
    answers: dict[str, str] = {}
    while len(answers) < ASKED_FOR:
        asked = _question(rng, [looks for _, looks in here])
        fitting = [answer for answer, looks in here if set(asked.split()) <= set(looks)]
        if len(fitting) < 2 and (fitting or rng.random() < 0.5):
            answers[asked] = fitting[0] if fitting else "nothing"
    return f"Describe the {', the '.join(answers)}.", ", ".join(answers.values())


def _question(rng: np.random.Generator, here: list[tuple[str, ...]]) -> str:
    """Some or all of the looks of a thing that is there, or looks at random."""
    if rng.random() < 0.4:
        return f"{pick(rng, COLORS)} {pick(rng, KINDS)}" if rng.random() < 0.8 else "mark"
    looks = pick(rng, here)
    if len(looks) == 1:
        return looks[0]
    size, color, kind = looks
    return pick(rng, (kind, f"{color} {kind}", f"{size} {kind}", *2 * (f"{size} {color} {kind}",)))


def sentence(levels: tuple[Level, ...], rng: np.random.Generator, scenes: list[Scene]) -> tuple[str, str]:
    """A caption without any image, of one of the levels: fine-tuning leaves embeddings and head frozen, so the base
    must know the words, those of the questions, too."""
    level = levels[0] if len(levels) == 1 else pick(rng, levels)
    types = sample_types(rng, int(rng.integers(12)), multi_change_share=0.3)
    changes = LEVELS[level].sample_pair(rng, types)[3] if rng.random() < 0.85 else ()
    return str(pick(rng, QUESTIONS)), references(changes, 5)[int(rng.integers(5))]


def curriculum(levels: tuple[Level, ...], tasks: tuple[TaskName, ...] = TASKS) -> tuple[Task, ...]:
    """The tasks of these names in turn, one a step; what asks of two images comes twice."""
    every = (
        Task("image", 1, whole),
        Task("asked for in two", 2, asked_for),
        Task("side by side", 2, side_by_side),
        Task("asked for", 1, asked_for),
        Task("two images", 2, whole),
        Task("asked for in two", 2, asked_for),
        Task("side by side", 2, side_by_side),
        Task("sentence", 0, partial(sentence, levels)),
    )
    return tuple(task for task in every if task.name in tasks)


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
        side = logits[0].shape[1]
        shown = np.stack([segment(scene, side // images, side) for scene in scenes])
        truth = torch.from_numpy(shown).long().view(-1, side, side, len(CLASSES))
        losses = [
            nn.functional.cross_entropy(each.flatten(0, 2), truth[..., k].flatten(), ignore_index=NONE)
            for k, each in enumerate(logits)
        ]
        kinds = truth[..., 0]
        right = (logits[0].argmax(-1) == kinds)[kinds > 0]
        return torch.stack(losses).sum(), float(right.float().mean())
