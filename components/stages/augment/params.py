"""The section `augment`: datasets made from others, by name. Each writes a raw folder that the reader `pairs` reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from m3diff.endpoint import EndpointUrl
from m3diff.records.files import sha256_of_folder
from m3diff.records.schemas import Split
from m3diff.settings.section import ParamsError, Section
from m3diff.stages.ingest.params import RawDataset

MANIFEST = "pairs.jsonl"


class Source(RawDataset):
    """A raw dataset as ingest would read it."""

    splits: tuple[Split, ...] = ("train", "val", "test")  # that something is made from; it stays in its split


class LocalModel(Section):
    """Weights in a folder, as safetensors."""

    model: Path
    # of the folder, which must have it; the report says what it is. null: any
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None

    def identity(self) -> str:
        """The digest of the folder of weights.

        Raises:
            ParamsError: it is no folder, or not the one that the parameters name.
        """
        folder = self.model
        if not any((folder / name).is_file() for name in ("model_index.json", "config.json")):
            raise ParamsError(
                f"{folder}: holds no config.json or model_index.json; fetch the model or correct the path"
            )
        found = sha256_of_folder(folder)
        if self.sha256 not in (None, found):
            raise ParamsError(
                f"{folder}: has the sha256 {found}, the parameters say {self.sha256}; correct one of them"
            )
        return found


class Drawn(Section):
    """Carries instructions in MiniChange's words out on the scenes of a MiniChange."""

    kind: Literal["drawn"]


class InstructPix2Pix(LocalModel):
    """diffusers' StableDiffusionInstructPix2PixPipeline."""

    kind: Literal["instruct_pix2pix"]
    steps: int = Field(default=50, ge=1)
    guidance: float = Field(default=7.5, ge=1)  # towards the instruction
    image_guidance: float = Field(default=1.5, ge=1)  # towards the original
    image_px: int = Field(default=512, ge=8)  # the longer side while it is edited; the edit has the original's size


class Grammar(Section):
    """MiniChange's own templates: other words for an instruction, and the difference of two descriptions."""

    kind: Literal["grammar"]


class Remote(Section):
    """A language model behind an OpenAI-compatible endpoint."""

    kind: Literal["endpoint"]
    url: EndpointUrl  # up to and with /v1
    model: str = Field(min_length=1)
    timeout_s: int = Field(default=60, ge=1)
    max_tokens: int = Field(default=512, ge=1)  # of an answer; one that is cut is not used
    key_variable: str = "OPENAI_API_KEY"  # the environment variable that holds the key; no file holds it
    # Stored answers that are not known to be of this server. null: refuse them; true: use them; false: ask anew
    reuse_answers: bool | None = None


class FeatureModel(LocalModel):
    """The vision encoder of a LLaVA-OneVision base: features of all places, joined; or the image embedding of a CLIP or
    SigLIP."""

    kind: Literal["encoder", "clip"]


Editor = Annotated[Drawn | InstructPix2Pix, Field(discriminator="kind")]
Writer = Annotated[Grammar | Remote, Field(discriminator="kind")]


class Made(Section):
    """The fields of every kind of synthetic data."""

    manifest: ClassVar = MANIFEST  # in `root`, as ingest is told
    source: Source
    root: Path  # the folder to write; its report is next to it, with .json after the name
    seed: int = Field(ge=0)


class Edits(Made):
    """Each original edited by its own instruction, which is the caption (Syned)."""

    kind: Literal["edits"]
    editor: Editor
    writer: Writer
    edits: int = Field(ge=1)  # of each original, by seeds of their own
    paraphrases: Mapping[Split, Annotated[int, Field(ge=0)]]  # further references of a pair, by split; else none


class Neighbours(Made):
    """Images that are alike but not the same, with a caption of the difference (DiffCap)."""

    kind: Literal["neighbours"]
    features: FeatureModel
    writer: Writer
    candidates: int = Field(ge=1)  # nearest images that are looked at, of each image
    band: tuple[float, float]  # lowest and highest cosine of a pair's features
    max_text_similarity: float = Field(ge=0, le=1)  # share of words that the two captions may have in common
    references: int = Field(ge=1)  # captions of a pair

    @field_validator("band")
    @classmethod
    def rising(cls, band: tuple[float, float]) -> tuple[float, float]:
        if not -1 <= band[0] < band[1] <= 1:
            raise ValueError(f"expected two numbers of -1 to 1, the lower first, found {list(band)}")
        return band


class CoupledSamples(Made):
    """Two unrelated images with their captions as one pair (OneDiff's Coupled Sample Training)."""

    kind: Literal["coupled_samples"]
    separator: str = " "  # between the two captions


MadeDataset = Annotated[Edits | Neighbours | CoupledSamples, Field(discriminator="kind")]  # an entry of the section
