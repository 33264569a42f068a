"""Paint MiniChange scenes with Pillow: shaded objects with soft shadows on a table, with a camera and a lamp.

The table is painted at three times the size of the image, with a margin into which the camera may move. It is then
cropped and resampled in one step, which also anti-aliases it. The domain determines the colours, the tables and the
position of the camera. A model that was trained on one domain is tested on the other.
"""

import math
from functools import lru_cache

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

from m3diff.datasets.minichange.scene import KINDS, MARK_WIDTH, WIDTHS, Scene

OVERSAMPLING = 3
INK = {"yellow": (60, 44, 10), "white": (48, 48, 58)}  # colour of dots and letters; nearly white on other colours
SKIN = (238, 200, 166)

Color = tuple[int, int, int]

# Colours of objects and tables, by domain. The shifted domain has the same scenes, words and changes in other shades,
# on chequered tables and with a tilted camera
SHADES: dict[str, dict[str, Color]] = {
    "red": {"standard": (214, 60, 54), "shifted": (182, 22, 50)},
    "green": {"standard": (64, 160, 82), "shifted": (118, 182, 44)},
    "blue": {"standard": (58, 108, 208), "shifted": (70, 172, 226)},
    "yellow": {"standard": (240, 196, 60), "shifted": (252, 226, 104)},
    "purple": {"standard": (142, 80, 178), "shifted": (176, 108, 214)},
    "white": {"standard": (242, 240, 234), "shifted": (218, 224, 238)},
    "linen": {"standard": (190, 178, 160), "shifted": (122, 90, 64)},
    "sand": {"standard": (203, 181, 140), "shifted": (146, 104, 92)},
    "slate": {"standard": (139, 149, 160), "shifted": (88, 94, 106)},
    "sage": {"standard": (155, 170, 146), "shifted": (94, 108, 90)},
}

MARGINS = {"standard": 0.3, "shifted": 0.5}
# Width of the table around the frame, in frames: the sum of the domain's MARGINS and the level's ROOM. The camera moves
# more on the level free
ROOM = {"grid": 0.0, "free": 0.15}

# The camera of the shifted domain. TURN is its rotation in radians. FAR and NEAR are the widths of the table that it
# sees at the far and the near edge of the frame, and DEPTH is the distance between these edges, in frames
TURN = -0.1
FAR = 1.24
NEAR = 1.06
DEPTH = 1.12

PIPS = {
    2: ((0.28, 0.28), (0.72, 0.72)),
    3: ((0.25, 0.25), (0.5, 0.5), (0.75, 0.75)),
    4: ((0.28, 0.28), (0.72, 0.28), (0.28, 0.72), (0.72, 0.72)),
    5: ((0.25, 0.25), (0.75, 0.25), (0.5, 0.5), (0.25, 0.75), (0.75, 0.75)),
    6: ((0.28, 0.22), (0.72, 0.22), (0.28, 0.5), (0.72, 0.5), (0.28, 0.78), (0.72, 0.78)),
}


def render(scene: Scene, image_px: int, rng: np.random.Generator, domain: str = "standard") -> Image.Image:
    """Paint a scene as an RGB image of `image_px` x `image_px`. `rng` is only used for the sensor noise."""
    unit = image_px * OVERSAMPLING
    margin = MARGINS[domain] + ROOM[scene.level]
    cloth = "checks" if domain == "shifted" else scene.cloth
    table = _table(SHADES[scene.background][domain], cloth, unit, margin).copy()
    angle = scene.view.lamp
    for mark in scene.marks:
        x, y = ((value + margin) * unit for value in mark.center)
        _paste(table, _mark(unit), (x, y))
    for thing in scene.things:
        x, y = ((value + margin) * unit for value in thing.center)
        width = WIDTHS[scene.level][thing.size] * unit
        shadow = (x - math.cos(angle) * 0.10 * width, y - math.sin(angle) * 0.10 * width + 0.10 * width)
        _paste(table, _shadow(int(width)), shadow)
        _paste(table, sprite(domain, thing.kind, thing.color, thing.state, int(width), thing.texture), (x, y))
    return _photograph(table, scene, image_px, rng, domain, margin)


def _photograph(
    table: Image.Image, scene: Scene, image_px: int, rng: np.random.Generator, domain: str, margin: float
) -> Image.Image:
    """Crop the table to the camera's view and light it: brightness, a soft gradient towards the lamp, and noise."""
    view = scene.view
    unit = image_px * OVERSAMPLING
    half = 0.5 / view.zoom
    left, top = ((0.5 + shift - half + margin) * unit for shift in (view.x, view.y))
    box = (left, top, left + 2 * half * unit, top + 2 * half * unit)
    seen = _tilted(box) if domain == "shifted" else box
    assert 0 <= min(seen) < max(seen) <= table.width, f"the camera looks beyond the table: {seen}, table {table.width}"
    if domain == "shifted":
        table = table.transform((unit, unit), Image.Transform.QUAD, seen, Image.Resampling.BICUBIC)
        box = (0, 0, unit, unit)
    frame: np.ndarray = np.asarray(table.resize((image_px, image_px), Image.Resampling.BOX, box=box), dtype=np.float32)
    ramp = np.linspace(-1, 1, image_px, dtype=np.float32)
    towards_lamp = ramp[None, :] * math.cos(view.lamp) + ramp[:, None] * math.sin(view.lamp)
    light = view.brightness * (1 + 0.07 * towards_lamp - 0.06 * (ramp[None, :] ** 2 + ramp[:, None] ** 2))
    frame = frame * light[..., None]
    if view.noise:
        frame += rng.normal(0, view.noise, frame.shape).astype(np.float32)
    return Image.fromarray(np.clip(frame + 0.5, 0, 255).astype(np.uint8))


def _tilted(box: tuple[float, float, float, float]) -> tuple[float, ...]:
    """Return the corners of the table area that a tilted camera sees in place of `box`, as alternating x and y."""
    x = (box[0] + box[2]) / 2
    y = (box[1] + box[3]) / 2
    half = (box[2] - box[0]) / 2
    cos = math.cos(TURN)
    sin = math.sin(TURN)
    seen: list[float] = []
    for side, end, width in ((-1, -1, FAR), (-1, 1, NEAR), (1, 1, NEAR), (1, -1, FAR)):
        u = side * half * width
        v = end * half * DEPTH
        seen += [x + u * cos - v * sin, y + u * sin + v * cos]
    return tuple(seen)


def _paste(table: Image.Image, tile: Image.Image, center: tuple[float, float]) -> None:
    corner = (round(center[0] - tile.width / 2), round(center[1] - tile.height / 2))
    table.paste(tile.convert("RGB"), corner, tile.getchannel("A"))


@lru_cache(maxsize=16)
def _table(color: Color, cloth: str, unit: int, margin: float) -> Image.Image:
    side = round(unit * (1 + 2 * margin))
    at = np.arange(side)
    if cloth == "weave":  # math.sin, because the last bit of NumPy's float32 sine depends on the CPU
        angles = at.astype(np.float32) * 2 * np.pi / (unit / 24)
        wave = 2.0 * np.array([math.sin(angle) for angle in angles.tolist()], dtype=np.float32)
        pattern: np.ndarray = wave[None, :] + wave[:, None]
    elif cloth == "checks":
        odd = at * 9 // unit % 2
        pattern = 9.0 * (odd[None, :] + odd[:, None] - 1)
    elif cloth == "planks":  # boards side by side in different shades, with dark gaps
        board, within = np.divmod(at * 11, unit)
        pattern = (board * 7 % 5 * 4 - 8 - 14 * (within < unit // 10))[None, :]
    else:
        step = unit // 10
        from_middle = (2 * (at % step) - step) ** 2
        pattern = np.where(from_middle[None, :] + from_middle[:, None] < (step * 2 // 5) ** 2, 14, -2)
    pixels = np.asarray(color, dtype=np.float32) + np.broadcast_to(pattern.astype(np.float32), (side, side))[..., None]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@lru_cache(maxsize=8)
def _mark(unit: int) -> Image.Image:
    side = round(MARK_WIDTH * unit)
    tile = Image.new("RGBA", (side, side), (255, 255, 255, 0))
    draw = ImageDraw.Draw(tile)
    stroke = max(2, side // 10)
    pale = (252, 250, 244, 215)
    draw.ellipse((1, 1, side - 2, side - 2), outline=pale, width=stroke)
    a = 0.33 * side
    b = 0.67 * side
    draw.line((a, a, b, b), fill=pale, width=stroke)
    draw.line((a, b, b, a), fill=pale, width=stroke)
    return tile


@lru_cache(maxsize=8)
def _shadow(width: int) -> Image.Image:
    side = int(width * 1.5)
    alpha = Image.new("L", (side, side), 0)
    ImageDraw.Draw(alpha).ellipse((side * 0.17, side * 0.24, side * 0.83, side * 0.86), fill=105)
    alpha = alpha.filter(ImageFilter.GaussianBlur(width * 0.08))
    tile = Image.new("RGBA", (side, side), (24, 20, 30, 0))
    tile.putalpha(alpha)
    return tile


@lru_cache(maxsize=4096)
def sprite(domain: str, kind: str, color: str, state: object, width: int, texture: str = "plain") -> Image.Image:
    """Return an object as an RGBA tile of `width` pixels, drawn flat and then shaded from upper left to lower right."""
    tile = Image.new("RGBA", (width, width), (0, 0, 0, 0))
    shade_of = SHADES[color][domain]
    PAINTERS[kind](ImageDraw.Draw(tile), width, shade_of, INK.get(color, (250, 248, 240)), state)
    if texture != "plain":
        tile = _textured(tile, shade_of, texture)
    ramp = np.linspace(0, 1, width, dtype=np.float32)
    shading = Image.fromarray((255 * (1.0 - 0.30 * (ramp[None, :] * 0.4 + ramp[:, None] * 0.6))).astype(np.uint8))
    alpha = tile.getchannel("A")
    lit = ImageChops.multiply(tile.convert("RGB"), Image.merge("RGB", (shading,) * 3))
    if kind == "ball":
        glint = Image.new("L", lit.size, 0)
        ImageDraw.Draw(glint).ellipse((width * 0.22, width * 0.16, width * 0.5, width * 0.42), fill=170)
        glint = glint.filter(ImageFilter.GaussianBlur(width * 0.07))
        lit = Image.composite(Image.new("RGB", lit.size, (255, 255, 255)), lit, glint)
    lit.putalpha(alpha)
    return lit


def _textured(tile: Image.Image, color: Color, texture: str) -> Image.Image:
    """Add a pattern in a darker shade to all pixels of exactly this colour. Sides, letters and dots are unchanged."""
    pixels = np.array(tile)
    across = np.arange(tile.width) * 12 // tile.width
    x = across[None, :]
    y = across[:, None]
    pattern = {
        "striped": (x + y) % 4 < 2,
        "banded": (y + 0 * x) % 4 < 2,
        "chequered": (x // 2 + y // 2) % 2 == 0,
        "dotted": (x % 3 == 1) & (y % 3 == 1),
    }[texture]
    pixels[pattern & (pixels == (*color, 255)).all(-1), :3] = _shift(color, 0.78)
    return Image.fromarray(pixels)


Draw = ImageDraw.ImageDraw


def _shift(color: Color, factor: float) -> Color:
    red, green, blue = (max(0, min(255, round(value * factor))) for value in color)
    return red, green, blue


def _scaled(points: list[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    return [(x * (width - 1), y * (width - 1)) for x, y in points]


def _ball(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    draw.ellipse((0, 0, width - 1, width - 1), fill=_shift(color, 0.72))
    draw.ellipse((width * 0.03, width * 0.02, width * 0.94, width * 0.93), fill=color)


def _box(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    draw.polygon(_scaled([(0, 0.25), (0.22, 0), (1, 0), (0.78, 0.25)], width), fill=_shift(color, 1.18))
    draw.polygon(_scaled([(0.78, 0.25), (1, 0), (1, 0.75), (0.78, 1)], width), fill=_shift(color, 0.62))
    draw.polygon(_scaled([(0, 0.25), (0.78, 0.25), (0.78, 1), (0, 1)], width), fill=color)


def _cone(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    draw.ellipse((0, width * 0.74, width - 1, width - 1), fill=_shift(color, 0.7))
    draw.polygon(_scaled([(0.5, 0), (0.99, 0.87), (0.5, 0.99), (0.01, 0.87)], width), fill=color)
    draw.polygon(_scaled([(0.5, 0), (0.99, 0.87), (0.62, 0.97)], width), fill=_shift(color, 0.72))


def _star(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    points = []
    for k in range(10):
        radius = 0.5 if k % 2 == 0 else 0.22
        angle = math.pi * k / 5 - math.pi / 2
        points.append((0.5 + radius * math.cos(angle), 0.52 + radius * math.sin(angle)))
    draw.polygon(_scaled(points, width), fill=color, outline=_shift(color, 0.6), width=max(1, width // 24))


def _arrow(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    up = [(0.5, 0), (0.98, 0.5), (0.68, 0.5), (0.68, 1), (0.32, 1), (0.32, 0.5), (0.02, 0.5)]
    turn = {
        "up": lambda x, y: (x, y),
        "right": lambda x, y: (1 - y, x),
        "down": lambda x, y: (1 - x, 1 - y),
        "left": lambda x, y: (y, 1 - x),
    }[str(state)]
    points = _scaled([turn(x, y) for x, y in up], width)
    draw.polygon(points, fill=color, outline=_shift(color, 0.55), width=max(1, width // 24))


def _doll(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    dark = _shift(color, 0.68)
    stroke = max(2, round(width * 0.13))
    raised = {"up": (True, True), "down": (False, False), "waving": (False, True)}[str(state)]
    for leg in (0.38, 0.62):
        draw.line(_scaled([(0.5, 0.6), (leg, 0.97)], width), fill=dark, width=stroke)
    for side, is_up in zip((-1, 1), raised, strict=True):
        hand = (0.5 + 0.42 * side, 0.08) if is_up else (0.5 + 0.40 * side, 0.72)
        draw.line(_scaled([(0.5 + 0.1 * side, 0.42), hand], width), fill=dark, width=stroke)
        x, y = _scaled([hand], width)[0]
        draw.ellipse((x - stroke * 0.6, y - stroke * 0.6, x + stroke * 0.6, y + stroke * 0.6), fill=SKIN)
    draw.polygon(_scaled([(0.34, 0.36), (0.66, 0.36), (0.72, 0.74), (0.28, 0.74)], width), fill=color)
    draw.ellipse((width * 0.35, width * 0.04, width * 0.65, width * 0.35), fill=SKIN)


def _sign(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    draw.rectangle((width * 0.44, width * 0.8, width * 0.56, width - 1), fill=(104, 78, 54))
    draw.rounded_rectangle((0, 0, width - 1, width * 0.86), radius=width * 0.1, fill=_shift(color, 0.75))
    draw.rounded_rectangle((width * 0.03, width * 0.03, width * 0.97, width * 0.82), radius=width * 0.08, fill=color)
    font = ImageFont.load_default(round(width * 0.8))
    stroke = max(1, width // 40)
    at = (width * 0.5, width * 0.43)
    draw.text(at, str(state), font=font, fill=ink, anchor="mm", stroke_width=stroke, stroke_fill=ink)


def _die(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    draw.rounded_rectangle((0, 0, width - 1, width - 1), radius=width * 0.16, fill=_shift(color, 0.7))
    draw.rounded_rectangle((0, 0, width * 0.95, width * 0.95), radius=width * 0.16, fill=color)
    assert isinstance(state, int)
    radius = width * 0.105
    for x, y in PIPS[state]:
        center_x = x * width * 0.95
        center_y = y * width * 0.95
        draw.ellipse((center_x - radius, center_y - radius, center_x + radius, center_y + radius), fill=ink)


PAINTERS = dict(zip(KINDS, (_ball, _box, _cone, _star, _arrow, _doll, _sign, _die), strict=True))
