"""LLaVA-558k: single images with a short caption, on which LLaVA-1.5 trains its projector.

Page: https://huggingface.co/datasets/liuhaotian/LLaVA-Pretrain (Liu et al., NeurIPS 2023). Its licence is "other": the
terms of CC-3M, LAION and SBU apply to the images, which may be taken down. Each of the 558,128 rows has an image of its
own and one turn, in which the user asks for a brief description. The rows have the form that `llava.py` describes.
`root` is a folder with:

    blip_laion_cc_sbu_558k.json    one JSON list
    images/00453/004539375.jpg     the unpacked images.zip. `images: ""` is for its folders next to the file

The options are `manifest`, the file; `images`, the folder of the images; and `split` (see `pairs.py`).

The counts were published by others; this project has not read the file.
"""

from pathlib import Path

from m3diff.datasets.llava import count_training_rows, read_llava
from m3diff.datasets.pairs import OwnSplit
from m3diff.datasets.spec import DatasetSpec, Licence, Permission, Protocol, RowsWithNotes

FILE = "blip_laion_cc_sbu_558k.json"
ROWS = 558_128  # rows, each with an image of its own


def read(root: Path, manifest: str = FILE, images: str = "images", split: OwnSplit = "train") -> RowsWithNotes:
    """Return one row per image. All rows are for training, unless `split` draws splits (see `drawn_split.py`)."""
    return read_llava(root, manifest, images, split)


IMAGES_OF_OTHERS = Permission("conditions", "the terms of CC-3M, LAION and SBU apply to the images")
SPEC = DatasetSpec(
    title="LLaVA-558k",
    page="https://huggingface.co/datasets/liuhaotian/LLaVA-Pretrain",
    paper="Visual Instruction Tuning (Liu et al., NeurIPS 2023)",
    licence=Licence.for_every_use(
        "other", "https://huggingface.co/datasets/liuhaotian/LLaVA-Pretrain", IMAGES_OF_OTHERS
    ),
    read=read,
    files=(FILE,),
    published=(count_training_rows("llava_pretrain", "LLaVA-558k", ROWS),),
    protocols=(Protocol("test", published_pairs=None),),
)
