"""The section `augment`: datasets that are made from other datasets, by name.

Each synthetic dataset is a folder of raw data that ingest reads with the reader `pairs`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from m3diff.endpoint.url import EndpointUrl
from m3diff.records.errors import ValueFault
from m3diff.records.files import sha256_of_folder
from m3diff.records.schemas import Split
from m3diff.settings.section import ParamsError, Section
from m3diff.stages.ingest.params import RawDataset

MANIFEST = "pairs.jsonl"


class RawSource(RawDataset):
    """A raw dataset to make pairs from. It has the same settings as a dataset that ingest reads."""

    splits: tuple[Split, ...] = ("train", "val", "test")
    """Splits to make pairs from. A new pair is in the same split as the images that it is made from."""


class LocalModel(Section):
    """A model on disk, with weights in the safetensors format."""

    model: Path
    """Folder of the model, with config.json or model_index.json."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Expected SHA-256 over all files in the folder. null accepts any model. The report contains the actual digest."""

    def identity(self) -> str:
        """Return the digest of the model's folder.

        Raises:
            ParamsError: the folder does not contain a model, or its digest differs from `sha256`.
        """
        folder = self.model
        if not any((folder / name).is_file() for name in ("model_index.json", "config.json")):
            raise ParamsError("settings.no_model_in_folder", path=folder)
        digest = sha256_of_folder(folder)
        if self.sha256 not in (None, digest):
            raise ParamsError("settings.other_model_in_folder", path=folder, value=digest, expected=self.sha256)
        return digest


class DrawnEditorSettings(Section):
    """Edits images of MiniChange by drawing changed scenes. Instructions must be in MiniChange's vocabulary."""

    kind: Literal["drawn"]
    """Kind of the editor."""


class InstructPix2Pix(LocalModel):
    """Edits images with diffusers' StableDiffusionInstructPix2PixPipeline."""

    kind: Literal["instruct_pix2pix"]
    """Kind of the editor."""

    steps: int = Field(default=50, ge=1)
    """Number of denoising steps per edit. More steps take more time."""

    guidance: float = Field(default=7.5, ge=1)
    """Guidance scale for the instruction. With larger values, edits follow the instruction more closely and change more
    of the image."""

    image_guidance: float = Field(default=1.5, ge=1)
    """Guidance scale for the original image. With larger values, more of the image stays unchanged."""

    image_px: int = Field(default=512, ge=8)
    """Longer side of the image during the edit, in pixels. The result is scaled back to the original size."""


class GrammarWriterSettings(Section):
    """Paraphrases instructions and describes differences with MiniChange's sentence templates."""

    kind: Literal["grammar"]
    """Kind of the writer."""


class EndpointWriterSettings(Section):
    """Paraphrases instructions and describes differences with a language model behind an OpenAI-compatible endpoint."""

    kind: Literal["endpoint"]
    """Kind of the writer."""

    url: EndpointUrl
    """URL of the endpoint, up to and including /v1."""

    model: str = Field(min_length=1)
    """Name of the model at the endpoint."""

    timeout_s: int = Field(default=60, ge=1)
    """Maximum time to wait for an answer, in seconds."""

    max_tokens: int = Field(default=512, ge=1)
    """Maximum length of an answer, in tokens. Truncated answers are not used."""

    key_variable: str = "OPENAI_API_KEY"
    """Name of the environment variable with the API key. The key itself is not stored in any file."""

    reuse_answers: bool | None = None
    """What to do with stored answers that may come from another server: true uses them, false asks the endpoint again,
    null stops with an error."""


class FeatureModel(LocalModel):
    """A model that computes image features, by which similar images are found."""

    kind: Literal["encoder", "clip"]
    """Kind of features: `encoder` concatenates the features of all patches, computed by the vision encoder of a
    LLaVA-OneVision base model; `clip` uses the image embedding of a CLIP or SigLIP model."""


Editor = Annotated[DrawnEditorSettings | InstructPix2Pix, Field(discriminator="kind")]
Writer = Annotated[GrammarWriterSettings | EndpointWriterSettings, Field(discriminator="kind")]


class SyntheticDataset(Section):
    """Settings that all kinds of synthetic datasets share."""

    manifest: ClassVar = MANIFEST  # ingest must read `root` with this value of the option `manifest`

    source: RawSource
    """Raw dataset whose images and captions are used to make the pairs."""

    root: Path
    """Folder to write to. Every run replaces it. The report is written to `<root>.json`, next to the folder."""

    seed: int = Field(default=0, ge=0)
    """Seed of all random draws."""


class Edits(SyntheticDataset):
    """Pairs of an image and an edited copy (Syned). The instruction for the edit becomes the caption."""

    kind: Literal["edits"]
    """Kind of the synthetic data."""

    editor: Editor
    """Model or program that edits images according to instructions."""

    writer: Writer
    """Writer that paraphrases the instructions."""

    edits: int = Field(default=1, ge=1)
    """Number of edits per original image, each with a different seed."""

    paraphrases: Mapping[Split, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Number of paraphrases per split. Each pair gets them as additional references. Pairs in splits that are not
    listed do not get paraphrases. An original image with fewer usable paraphrases is left out."""


class Neighbours(SyntheticDataset):
    """Pairs of similar images with a caption that describes their difference (DiffCap)."""

    kind: Literal["neighbours"]
    """Kind of the synthetic data."""

    features: FeatureModel
    """Model whose image features are compared."""

    writer: Writer
    """Writer that describes the difference between two images, given their captions."""

    candidates: int = Field(ge=1)
    """Number of most similar images to consider per image. A larger number gives more pairs, but their images are less
    similar."""

    band: tuple[float, float]
    """Minimum and maximum cosine similarity between the features of two paired images, in [-1, 1]. Below the minimum,
    images have too little in common. Above the maximum, they show the same scene without a change."""

    max_text_similarity: float = Field(default=1.0, ge=0, le=1)
    """Maximum share of words that the captions of two paired images have in common. 1 accepts all pairs with different
    captions."""

    references: int = Field(default=1, ge=1)
    """Number of captions per pair. A pair with fewer usable captions is left out."""

    @field_validator("band")
    @classmethod
    def require_rising_cosines(cls, band: tuple[float, float]) -> tuple[float, float]:
        """Check that the cosines are in [-1, 1] and that the first is lower than the second.

        Raises:
            ValueFault: a number is outside the range, or the first is not lower than the second.
        """
        if not -1 <= band[0] < band[1] <= 1:
            raise ValueFault("settings.cosines_do_not_rise", value=list(band))
        return band


class CoupledSamples(SyntheticDataset):
    """Pairs of unrelated images whose captions are joined (OneDiff's Coupled Sample Training)."""

    kind: Literal["coupled_samples"]
    """Kind of the synthetic data."""

    separator: str = " "
    """Text between the two captions."""


# An entry of the section
AnySyntheticDataset = Annotated[Edits | Neighbours | CoupledSamples, Field(discriminator="kind")]
