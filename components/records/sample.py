"""An image, and a turn of a dialogue about images, in the tables that stages pass on."""

from typing import NamedTuple

PAIR = 2  # number of images of a pair
MOST_IMAGES = 2  # number of images that a question can be about
IMAGE_MARK = "<image>"  # where a question of a dataset says that an image belongs in the text


class ImageRef(NamedTuple):
    """Where an image is, and the bytes that it must have.

    Attributes:
        uri: path of the image file, relative to the project or absolute.
        sha256: SHA-256 digest of the file (32 bytes). None if it is unknown.
    """

    uri: str
    sha256: bytes | None = None


class Turn(NamedTuple):
    """A question of a dialogue with its answer.

    Attributes:
        question: the question.
        answer: the answer, or an empty text if the question is still to be answered.
    """

    question: str
    answer: str = ""
