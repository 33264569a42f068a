"""The parts of made data that can be replaced: editors, writers, features. `load.py` picks each by its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from m3diff.stages.augment.search import Matrix

if TYPE_CHECKING:
    from PIL import Image

Task = Literal["paraphrase", "difference"]
"""*paraphrase*: {"text": an instruction} in other words, as Syned's references; {"first": a caption of the image
before} may be there, too. *difference*: {"first", "second": captions of two images} -> how the second image differs, as
DiffCap's."""

Facts = Mapping[str, str]


class Editor(Protocol):
    @property
    def identity(self) -> str:
        """Digest of what decides its edits beside the parameters."""

    def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
        """The edited image, RGB, of the original's size; None where it cannot carry the instruction out.

        Raises:
            ImageError: the image cannot be read.
        """


class Written(NamedTuple):
    """What a writer gives for one set of facts: different texts, in order, and how many others were dropped, why."""

    texts: tuple[str, ...]
    dropped: Counter[str]


class Writer(Protocol):
    @property
    def identity(self) -> str:
        """Names what decides its texts beside the parameters; "" where nothing does."""

    def write(self, task: Task, facts: Sequence[Facts], n: int) -> list[Written]:
        """At most `n` texts for each of the facts, in order.

        Raises:
            ParamsError: an endpoint refuses the key, the model or the form of a question.
            ConnectionError: it cannot be reached; what it answered is kept.
        """


class Features(Protocol):
    @property
    def identity(self) -> str:
        """Digest of what decides the features."""

    def features(self, images: Sequence[Path]) -> Matrix:
        """[images, width], float32, rows of length 1.

        Raises:
            ImageError: an image cannot be read.
            ParamsError: the memory would not hold them.
        """
