"""Tasks of the tiny base: to describe images, whole, place by place, or the things that are asked for.

Two images of a task are always unrelated (OneDiff's Coupled Sample Training, arXiv 2407.05645): the base is never
shown a difference. Asking for a thing by its looks teaches the way from looks to place and, where there is none, to
"nothing"; without that way a short fine-tuning run does not find the place of a change (see LOG.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from m3diff.datasets.minichange.language import describe_cells, describe_scene, describe_things, references
from m3diff.datasets.minichange.levels import LEVELS, sample_types
from m3diff.datasets.minichange.scene import COLORS, KINDS, PLACES, Level, Scene, pick
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
