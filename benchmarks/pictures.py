"""Generate pairs of photo-like pictures for benchmarks/data.py, with natural textures, objects and camera noise.

The pictures compress about as well as photographs, so decoding and hashing them is as expensive as for photographs. At
512 x 512 pixels, a picture takes about 60 kB as JPEG (quality 90) and 490 kB as PNG. Pairs alternate between three
kinds that occur in real benchmarks: an *edit* (identical pixels except for one object), two shots by a *fixed camera*
(different noise and light, and one new object), and two *different* pictures. In the first two kinds, the two pictures
look alike in a thumbnail, so a rule that compares look-alike pairs must decode them."""

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

SEED = 512
PX = 512
TEXTURES = 12
TEXTURE_PX = 1024
JPEG_QUALITY = 90
KINDS = ("edit", "fixed camera", "different")

Levels = NDArray[np.float32]  # [height, width, 3], grey levels from 0 to 255


def write_picture_pair(number: int, before: Path, after: Path) -> None:
    """Write the two pictures of a pair. `number` determines the pixels, and the suffixes determine the file formats."""
    rng = np.random.default_rng([SEED, number])
    kind = KINDS[number % len(KINDS)]
    scene = _draw_scene(rng)
    changed_scene = _draw_scene(rng) if kind == "different" else scene.copy()
    _draw_object(changed_scene, rng)
    noise_before = _camera_noise(rng)
    noise_after = noise_before if kind == "edit" else _camera_noise(rng)
    light = rng.uniform(-3, 3) if kind == "fixed camera" else 0
    _save(np.asarray(scene, np.float32) + noise_before, before)
    _save(np.asarray(changed_scene, np.float32) + noise_after + np.float32(light), after)


@cache
def _textures() -> list[Levels]:
    """Return noise textures like those of photographs.

    The amplitude decreases with the frequency, and it is lower in colour than in brightness.
    """
    rng = np.random.default_rng(SEED)
    frequencies = np.hypot(np.fft.fftfreq(TEXTURE_PX)[:, None], np.fft.rfftfreq(TEXTURE_PX)[None, :])
    frequencies[0, 0] = np.inf  # the mean is set below
    textures = []
    for slope in np.linspace(1.2, 1.8, TEXTURES):
        spectra = np.fft.rfft2(rng.standard_normal((4, TEXTURE_PX, TEXTURE_PX))) / frequencies**slope
        layers = np.fft.irfft2(spectra, s=(TEXTURE_PX, TEXTURE_PX))
        layers /= layers.std(axis=(1, 2), keepdims=True)
        light = 46 * layers[:1] + 14 * layers[1:] + rng.uniform(96, 160, (3, 1, 1))
        textures.append(light.transpose(1, 2, 0).astype(np.float32))
    return textures


@cache
def _noise_field() -> Levels:
    rng = np.random.default_rng(SEED + 1)
    return (1.5 * rng.standard_normal((TEXTURE_PX, TEXTURE_PX, 3))).astype(np.float32)


def _crop(field: Levels, rng: np.random.Generator) -> Levels:
    top, left = rng.integers(0, TEXTURE_PX - PX, 2)
    return field[top : top + PX, left : left + PX]


def _camera_noise(rng: np.random.Generator) -> Levels:
    return _crop(_noise_field(), rng)


def _draw_scene(rng: np.random.Generator) -> Image.Image:
    texture = _crop(_textures()[rng.integers(TEXTURES)], rng)
    levels = texture[:, :: rng.choice([-1, 1])] * rng.uniform(0.8, 1.2) + rng.uniform(-20, 20, 3).astype(np.float32)
    scene = _as_image(levels)
    for _ in range(rng.integers(4, 10)):
        _draw_object(scene, rng)
    return scene


def _draw_object(scene: Image.Image, rng: np.random.Generator) -> None:
    """Draw an object of 40 to 160 pixels onto the scene. It is filled with a texture, so that it has detail."""
    size = rng.integers(40, 160, 2)
    corner = rng.integers(0, PX - size)
    box = [int(value) for value in (*corner, *(corner + size))]
    outline = Image.new("L", (PX, PX))
    pen = ImageDraw.Draw(outline)
    draw = pen.ellipse if rng.random() < 0.5 else pen.rectangle
    draw(box, fill=255)
    tint = rng.uniform(-110, 110, 3).astype(np.float32)
    filling = _as_image(_crop(_textures()[rng.integers(TEXTURES)], rng) + tint)
    scene.paste(filling, mask=outline)


def _as_image(levels: Levels) -> Image.Image:
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def _save(levels: Levels, path: Path) -> None:
    if path.suffix == ".jpg":
        _as_image(levels).save(path, quality=JPEG_QUALITY)
    else:
        _as_image(levels).save(path, compress_level=3)  # level 6 takes three times as long and saves little space
