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
# Colour of dots and letters on yellow and white objects. On all other objects, it is LIGHT_INK
DARK_INK = {"yellow": (60, 44, 10), "white": (48, 48, 58)}
LIGHT_INK = (250, 248, 240)
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

# Width of the table around the frame, in frames: the sum of the domain's and the level's margin. The camera moves more
# on the level `free`
DOMAIN_MARGINS = {"standard": 0.3, "shifted": 0.5}
LEVEL_MARGINS = {"grid": 0.0, "free": 0.15}

# The camera of the shifted domain: its rotation in radians, the widths of the table that it sees at the far and the
# near edge of the frame, and the distance between these edges, in frames
CAMERA_TURN = -0.1
FAR_WIDTH = 1.24
NEAR_WIDTH = 1.06
VIEW_DEPTH = 1.12

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
    margin = DOMAIN_MARGINS[domain] + LEVEL_MARGINS[scene.level]
    cloth = "checks" if domain == "shifted" else scene.cloth
    table = _paint_table(SHADES[scene.background][domain], cloth, unit, margin).copy()
    angle = scene.view.lamp
    for mark in scene.marks:
        x, y = ((value + margin) * unit for value in mark.center)
        _paste(table, _paint_mark(unit), (x, y))
    for thing in scene.things:
        x, y = ((value + margin) * unit for value in thing.center)
        width = WIDTHS[scene.level][thing.size] * unit
        shadow_center = (x - math.cos(angle) * 0.10 * width, y - math.sin(angle) * 0.10 * width + 0.10 * width)
        _paste(table, _paint_shadow(int(width)), shadow_center)
        tile = paint_thing(domain, thing.kind, thing.color, thing.state, int(width), thing.texture)
        _paste(table, tile, (x, y))
    return _photograph(table, scene, image_px, rng, domain, margin)


def _photograph(
    table: Image.Image, scene: Scene, image_px: int, rng: np.random.Generator, domain: str, margin: float
) -> Image.Image:
    """Crop the table to the camera's view and light it: brightness, a soft gradient towards the lamp, and noise."""
    view = scene.view
    unit = image_px * OVERSAMPLING
    half = 0.5 / view.zoom
    left_edge = (0.5 + view.x - half + margin) * unit
    top_edge = (0.5 + view.y - half + margin) * unit
    box = (left_edge, top_edge, left_edge + 2 * half * unit, top_edge + 2 * half * unit)
    corners = _tilt(box) if domain == "shifted" else box
    is_on_table = 0 <= min(corners) < max(corners) <= table.width
    assert is_on_table, f"the camera looks beyond the table: {corners}, table {table.width}"
    if domain == "shifted":
        table = table.transform((unit, unit), Image.Transform.QUAD, corners, Image.Resampling.BICUBIC)
        box = (0, 0, unit, unit)
    resized_table = table.resize((image_px, image_px), Image.Resampling.BOX, box=box)
    frame: np.ndarray = np.asarray(resized_table, dtype=np.float32)
    ramp = np.linspace(-1, 1, image_px, dtype=np.float32)
    towards_lamp = ramp[None, :] * math.cos(view.lamp) + ramp[:, None] * math.sin(view.lamp)
    light = view.brightness * (1 + 0.07 * towards_lamp - 0.06 * (ramp[None, :] ** 2 + ramp[:, None] ** 2))
    frame = frame * light[..., None]
    if view.noise:
        frame += rng.normal(0, view.noise, frame.shape).astype(np.float32)
    return Image.fromarray(np.clip(frame + 0.5, 0, 255).astype(np.uint8))


def _tilt(box: tuple[float, float, float, float]) -> tuple[float, ...]:
    """Return the corners of the table area that a tilted camera sees in place of `box`, as alternating x and y."""
    x = (box[0] + box[2]) / 2
    y = (box[1] + box[3]) / 2
    half = (box[2] - box[0]) / 2
    cos = math.cos(CAMERA_TURN)
    sin = math.sin(CAMERA_TURN)
    corners: list[float] = []
    # Upper left, lower left, lower right, upper right: the order that `Image.Transform.QUAD` expects
    for side, end, width in ((-1, -1, FAR_WIDTH), (-1, 1, NEAR_WIDTH), (1, 1, NEAR_WIDTH), (1, -1, FAR_WIDTH)):
        u = side * half * width
        v = end * half * VIEW_DEPTH
        corners += [x + u * cos - v * sin, y + u * sin + v * cos]
    return tuple(corners)


def _paste(table: Image.Image, tile: Image.Image, center: tuple[float, float]) -> None:
    """Paste a tile onto the table. Its alpha channel is the mask, and `center` is in pixels of the table."""
    corner = (round(center[0] - tile.width / 2), round(center[1] - tile.height / 2))
    table.paste(tile.convert("RGB"), corner, tile.getchannel("A"))


@lru_cache(maxsize=16)
def _paint_table(color: Color, cloth: str, unit: int, margin: float) -> Image.Image:
    """Paint an empty table. `unit` is the width of the frame in pixels, and `margin` surrounds it, in frames."""
    side = round(unit * (1 + 2 * margin))
    positions = np.arange(side)
    if cloth == "weave":
        # math.sin, because the last bit of NumPy's float32 sine depends on the CPU
        angles = positions.astype(np.float32) * 2 * np.pi / (unit / 24)
        wave = 2.0 * np.array([math.sin(angle) for angle in angles.tolist()], dtype=np.float32)
        pattern: np.ndarray = wave[None, :] + wave[:, None]
    elif cloth == "checks":
        is_odd_stripe = positions * 9 // unit % 2
        pattern = 9.0 * (is_odd_stripe[None, :] + is_odd_stripe[:, None] - 1)
    elif cloth == "planks":
        # Boards side by side in different shades, with dark gaps
        board, position_in_board = np.divmod(positions * 11, unit)
        is_gap = position_in_board < unit // 10
        pattern = (board * 7 % 5 * 4 - 8 - 14 * is_gap)[None, :]
    else:
        step = unit // 10
        # Distances from the middle of a dot's square are doubled, so that they are whole numbers
        squared_distance = (2 * (positions % step) - step) ** 2
        is_dot = squared_distance[None, :] + squared_distance[:, None] < (step * 2 // 5) ** 2
        pattern = np.where(is_dot, 14, -2)
    pixels = np.asarray(color, dtype=np.float32) + np.broadcast_to(pattern.astype(np.float32), (side, side))[..., None]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@lru_cache(maxsize=8)
def _paint_mark(unit: int) -> Image.Image:
    """Paint a pale ring with a cross as an RGBA tile."""
    side = round(MARK_WIDTH * unit)
    tile = Image.new("RGBA", (side, side), (255, 255, 255, 0))
    draw = ImageDraw.Draw(tile)
    stroke = max(2, side // 10)
    pale = (252, 250, 244, 215)
    draw.ellipse((1, 1, side - 2, side - 2), outline=pale, width=stroke)
    start = 0.33 * side
    end = 0.67 * side
    draw.line((start, start, end, end), fill=pale, width=stroke)
    draw.line((start, end, end, start), fill=pale, width=stroke)
    return tile


@lru_cache(maxsize=8)
def _paint_shadow(width: int) -> Image.Image:
    """Paint the soft shadow of an object of `width` pixels as an RGBA tile."""
    side = int(width * 1.5)
    alpha = Image.new("L", (side, side), 0)
    ImageDraw.Draw(alpha).ellipse((side * 0.17, side * 0.24, side * 0.83, side * 0.86), fill=105)
    alpha = alpha.filter(ImageFilter.GaussianBlur(width * 0.08))
    tile = Image.new("RGBA", (side, side), (24, 20, 30, 0))
    tile.putalpha(alpha)
    return tile


@lru_cache(maxsize=4096)
def paint_thing(domain: str, kind: str, color: str, state: object, width: int, texture: str = "plain") -> Image.Image:
    """Paint an object as an RGBA tile of `width` pixels: first flat, then shaded from upper left to lower right."""
    tile = Image.new("RGBA", (width, width), (0, 0, 0, 0))
    shade = SHADES[color][domain]
    PAINTERS[kind](ImageDraw.Draw(tile), width, shade, DARK_INK.get(color, LIGHT_INK), state)
    if texture != "plain":
        tile = _add_texture(tile, shade, texture)
    ramp = np.linspace(0, 1, width, dtype=np.float32)
    brightness = 255 * (1.0 - 0.30 * (ramp[None, :] * 0.4 + ramp[:, None] * 0.6))
    shading = Image.fromarray(brightness.astype(np.uint8))
    shaded_tile = ImageChops.multiply(tile.convert("RGB"), Image.merge("RGB", (shading,) * 3))
    if kind == "ball":
        glint = Image.new("L", shaded_tile.size, 0)
        ImageDraw.Draw(glint).ellipse((width * 0.22, width * 0.16, width * 0.5, width * 0.42), fill=170)
        glint = glint.filter(ImageFilter.GaussianBlur(width * 0.07))
        white = Image.new("RGB", shaded_tile.size, (255, 255, 255))
        shaded_tile = Image.composite(white, shaded_tile, glint)
    shaded_tile.putalpha(tile.getchannel("A"))
    return shaded_tile


def _add_texture(tile: Image.Image, color: Color, texture: str) -> Image.Image:
    """Add a pattern in a darker shade to all pixels of exactly this colour. Sides, letters and dots are unchanged."""
    pixels = np.array(tile)
    # The tile is divided into 12 x 12 fields
    fields = np.arange(tile.width) * 12 // tile.width
    x = fields[None, :]
    y = fields[:, None]
    is_darker = {
        "striped": (x + y) % 4 < 2,
        "banded": (y + 0 * x) % 4 < 2,
        "chequered": (x // 2 + y // 2) % 2 == 0,
        "dotted": (x % 3 == 1) & (y % 3 == 1),
    }[texture]
    has_color = (pixels == (*color, 255)).all(-1)
    pixels[is_darker & has_color, :3] = _shade(color, 0.78)
    return Image.fromarray(pixels)


Draw = ImageDraw.ImageDraw


def _shade(color: Color, factor: float) -> Color:
    """Return a darker or lighter shade of a colour. Values above 255 become 255."""
    red, green, blue = (max(0, min(255, round(value * factor))) for value in color)
    return red, green, blue


def _to_pixels(points: list[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    """Convert points in a unit square to pixels of a tile."""
    return [(x * (width - 1), y * (width - 1)) for x, y in points]


def _paint_ball(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    draw.ellipse((0, 0, width - 1, width - 1), fill=_shade(color, 0.72))
    draw.ellipse((width * 0.03, width * 0.02, width * 0.94, width * 0.93), fill=color)


def _paint_box(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    draw.polygon(_to_pixels([(0, 0.25), (0.22, 0), (1, 0), (0.78, 0.25)], width), fill=_shade(color, 1.18))
    draw.polygon(_to_pixels([(0.78, 0.25), (1, 0), (1, 0.75), (0.78, 1)], width), fill=_shade(color, 0.62))
    draw.polygon(_to_pixels([(0, 0.25), (0.78, 0.25), (0.78, 1), (0, 1)], width), fill=color)


def _paint_cone(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    draw.ellipse((0, width * 0.74, width - 1, width - 1), fill=_shade(color, 0.7))
    draw.polygon(_to_pixels([(0.5, 0), (0.99, 0.87), (0.5, 0.99), (0.01, 0.87)], width), fill=color)
    draw.polygon(_to_pixels([(0.5, 0), (0.99, 0.87), (0.62, 0.97)], width), fill=_shade(color, 0.72))


def _paint_star(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    points = []
    for number in range(10):
        radius = 0.5 if number % 2 == 0 else 0.22
        angle = math.pi * number / 5 - math.pi / 2
        points.append((0.5 + radius * math.cos(angle), 0.52 + radius * math.sin(angle)))
    draw.polygon(_to_pixels(points, width), fill=color, outline=_shade(color, 0.6), width=max(1, width // 24))


def _paint_arrow(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    points_of_up = [(0.5, 0), (0.98, 0.5), (0.68, 0.5), (0.68, 1), (0.32, 1), (0.32, 0.5), (0.02, 0.5)]
    rotate = {
        "up": lambda x, y: (x, y),
        "right": lambda x, y: (1 - y, x),
        "down": lambda x, y: (1 - x, 1 - y),
        "left": lambda x, y: (y, 1 - x),
    }[str(state)]
    points = _to_pixels([rotate(x, y) for x, y in points_of_up], width)
    draw.polygon(points, fill=color, outline=_shade(color, 0.55), width=max(1, width // 24))


def _paint_doll(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    dark = _shade(color, 0.68)
    stroke = max(2, round(width * 0.13))
    arms_are_up = {"up": (True, True), "down": (False, False), "waving": (False, True)}[str(state)]
    for leg in (0.38, 0.62):
        draw.line(_to_pixels([(0.5, 0.6), (leg, 0.97)], width), fill=dark, width=stroke)
    for side, is_up in zip((-1, 1), arms_are_up, strict=True):
        hand = (0.5 + 0.42 * side, 0.08) if is_up else (0.5 + 0.40 * side, 0.72)
        draw.line(_to_pixels([(0.5 + 0.1 * side, 0.42), hand], width), fill=dark, width=stroke)
        x, y = _to_pixels([hand], width)[0]
        draw.ellipse((x - stroke * 0.6, y - stroke * 0.6, x + stroke * 0.6, y + stroke * 0.6), fill=SKIN)
    draw.polygon(_to_pixels([(0.34, 0.36), (0.66, 0.36), (0.72, 0.74), (0.28, 0.74)], width), fill=color)
    draw.ellipse((width * 0.35, width * 0.04, width * 0.65, width * 0.35), fill=SKIN)


def _paint_sign(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    draw.rectangle((width * 0.44, width * 0.8, width * 0.56, width - 1), fill=(104, 78, 54))
    draw.rounded_rectangle((0, 0, width - 1, width * 0.86), radius=width * 0.1, fill=_shade(color, 0.75))
    draw.rounded_rectangle((width * 0.03, width * 0.03, width * 0.97, width * 0.82), radius=width * 0.08, fill=color)
    font = ImageFont.load_default(round(width * 0.8))
    stroke = max(1, width // 40)
    center = (width * 0.5, width * 0.43)
    draw.text(center, str(state), font=font, fill=ink, anchor="mm", stroke_width=stroke, stroke_fill=ink)


def _paint_die(draw: Draw, width: int, color: Color, ink: Color, state: object) -> None:
    draw.rounded_rectangle((0, 0, width - 1, width - 1), radius=width * 0.16, fill=_shade(color, 0.7))
    draw.rounded_rectangle((0, 0, width * 0.95, width * 0.95), radius=width * 0.16, fill=color)
    assert isinstance(state, int)
    radius = width * 0.105
    for x, y in PIPS[state]:
        center_x = x * width * 0.95
        center_y = y * width * 0.95
        draw.ellipse((center_x - radius, center_y - radius, center_x + radius, center_y + radius), fill=ink)


PAINTERS = {
    "ball": _paint_ball,
    "box": _paint_box,
    "cone": _paint_cone,
    "star": _paint_star,
    "arrow": _paint_arrow,
    "doll": _paint_doll,
    "sign": _paint_sign,
    "die": _paint_die,
}
assert tuple(PAINTERS) == KINDS, "a painter for each kind of object"
