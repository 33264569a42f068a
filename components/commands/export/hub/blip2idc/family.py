"""BLIP2IDC in a shared folder."""

from collections.abc import Mapping
from typing import Any

from m3diff.commands.export.hub.family import SharedFamily

CITATION = """\
@inproceedings{evennou2025reframing,
  title = {Reframing Image Difference Captioning with BLIP2IDC and Synthetic Augmentation},
  author = {Evennou, Gautier and Chaffin, Antoine and Chappelier, Vivien and Kijak, Ewa},
  booktitle = {WACV},
  year = {2025},
  note = {arXiv:2412.15939}
}"""

BASE = "blip2-opt-2.7b"


def processor(known: Any, question: str, config: Mapping[str, Any]) -> Any:
    from m3diff.commands.export.hub.blip2idc.processing import shared_processor

    return shared_processor(known)


BLIP2IDC = SharedFamily(
    name="blip2idc",
    title="BLIP2IDC",
    summary=(
        "It is BLIP-2 on both images stacked into one picture, the one before on top, fine-tuned by low-rank\n"
        "adapters, which are merged here ([arXiv 2412.15939](https://arxiv.org/abs/2412.15939))."
    ),
    control=lambda config: "",
    images="Each image is stretched to {side} x {half} pixels, half of the picture that the model reads",
    citation=CITATION,
    bases={BASE: f"Salesforce/{BASE}"},
    tags=("blip-2", "blip2idc"),
    image_processor="Blip2IDCImageProcessor",
    processor=processor,
    omitted={
        "m3diff.models.blip2idc.processing": (
            "Blip2IDCProcessor.__init__",
            "Blip2IDCProcessor.from_pretrained",
            "Blip2IDCProcessor.save_pretrained",
            "Blip2IDCProcessor.decode",
        )
    },
    inner_generation=True,
)
