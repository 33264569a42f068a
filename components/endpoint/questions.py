"""Define a question to a model behind an endpoint and encode the images in it."""

import base64
import io
from pathlib import Path
from typing import NamedTuple

from m3diff.images.open import load_image, open_image
from m3diff.records.sample import Turn


class EndpointQuestion(NamedTuple):
    """A user message, and the messages before it. The images come before the text of the first user message.

    Attributes:
        text: the text of the last user message.
        images: the image files.
        system: system prompt; empty for none.
        n: number of the repetition if the same question is asked several times. Each repetition has a separate answer.
        history: the turns before the last user message.
    """

    text: str
    images: tuple[Path, ...] = ()
    system: str = ""
    seed: int | None = None
    n: int = 0
    history: tuple[Turn, ...] = ()


def replace_surrogates(text: str) -> str:
    """Replace each lone surrogate with a question mark, because neither files nor servers accept surrogates."""
    return text.encode("utf-8", "replace").decode()


def data_url(path: Path) -> str:
    """Return an image as a data URL, upright and in RGB, as the project's own models see it.

    Metadata such as the place and time of a photograph is removed. A colour JPEG is re-encoded with the quantisation
    tables of the original file, so its size stays the same and its pixels change by less than one grey level on
    average. As a PNG, a photograph would be about nine times as large, which exceeds what servers accept. All other
    images are encoded as PNG.

    Raises:
        ImageError: the image cannot be read.
    """
    from PIL.JpegImagePlugin import JpegImageFile, get_sampling  # reading parameters must not import Pillow

    image = load_image(path)
    image.info.clear()  # Pillow would otherwise write the comment and colour profile again
    encoded = io.BytesIO()
    with open_image(path.read_bytes()) as original:
        if isinstance(original, JpegImageFile) and original.mode == "RGB":
            kind = "jpeg"
            image.save(encoded, "JPEG", qtables=original.quantization, subsampling=get_sampling(original))
        else:
            kind = "png"
            image.save(encoded, "PNG")
    return f"data:image/{kind};base64,{base64.b64encode(encoded.getvalue()).decode()}"
