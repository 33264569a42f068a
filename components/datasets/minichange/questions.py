"""Questions about whole images of MiniChange, with their answers. The base learns to answer them (`pretrain`).

The questions are about one image or about two unrelated images, never about a change. `minichange_images` asks them
again after fine-tuning, to measure what a model still knows.
"""

import numpy as np

from m3diff.datasets.minichange.language import describe_cells, describe_scene, describe_things
from m3diff.datasets.minichange.scene import COLORS, KINDS, PLACE_NAMES, Scene, pick

DESCRIBE_ONE_IMAGE = "Describe the image."
DESCRIBE_TWO_IMAGES = "Describe both images."
OBJECTS_PER_QUESTION = 4


def ask_for_images(rng: np.random.Generator, scenes: list[Scene]) -> tuple[str, str]:
    """Return a question that asks to describe each image, and the answer with the objects in reading order."""
    if len(scenes) == 1:
        return DESCRIBE_ONE_IMAGE, describe_scene(scenes[0])
    descriptions = [f"image {number}: {describe_scene(scene)}" for number, scene in enumerate(scenes, start=1)]
    return DESCRIBE_TWO_IMAGES, "; ".join(descriptions)


def ask_for_places(rng: np.random.Generator, scenes: list[Scene]) -> tuple[str, str]:
    """Return a question that asks to describe two images by place, and the answer with the places in random order."""
    scene_1, scene_2 = scenes
    objects_1 = describe_cells(scene_1)
    objects_2 = describe_cells(scene_2)
    parts = []
    for cell in rng.permutation(sorted({*objects_1, *objects_2})):
        object_1 = objects_1.get(cell, "nothing")
        object_2 = objects_2.get(cell, "nothing")
        parts.append(f"{PLACE_NAMES[cell]} {object_1} then {object_2}")
    return "Describe both images place by place.", ", ".join(parts)


def ask_for_objects(rng: np.random.Generator, scenes: list[Scene]) -> tuple[str, str]:
    """Return a question about objects with a given appearance, and the answer.

    For each object, the answer contains its place and description, or "nothing". Each appearance matches at most one
    object in the images.
    """
    descriptions: list[str] = []
    appearances: list[tuple[str, ...]] = []  # the words after the article in `a small red box ...`, or `mark`
    for scene in scenes:
        for cell, text in describe_things(scene):
            descriptions.append(f"{PLACE_NAMES[cell]} {text}")
            appearances.append(tuple(text.split()[1:4]))
    answers: dict[str, str] = {}  # by the appearance in the question
    while len(answers) < OBJECTS_PER_QUESTION:
        appearance = _sample_appearance(rng, appearances)
        matching_descriptions = []
        for description, words in zip(descriptions, appearances, strict=True):
            if set(appearance.split()) <= set(words):
                matching_descriptions.append(description)
        if len(matching_descriptions) > 1:
            continue  # the question would be ambiguous
        if matching_descriptions:
            answers[appearance] = matching_descriptions[0]
        elif rng.random() < 0.5:
            answers[appearance] = "nothing"
    return f"Describe the {', the '.join(answers)}.", ", ".join(answers.values())


def _sample_appearance(rng: np.random.Generator, appearances: list[tuple[str, ...]]) -> str:
    """Return an appearance such as `red box`, which may match an object in the images or no object.

    Args:
        appearances: the appearance of each object in the images: size, color and kind, or only `mark`.
    """
    if rng.random() < 0.4:  # any appearance, which may match no object
        if rng.random() < 0.8:
            return f"{pick(rng, COLORS)} {pick(rng, KINDS)}"
        return "mark"
    words = pick(rng, appearances)
    if len(words) == 1:
        return words[0]
    size, color, kind = words
    full_appearance = f"{size} {color} {kind}"
    return pick(rng, (kind, f"{color} {kind}", f"{size} {kind}", full_appearance, full_appearance))
