"""LLaVA-665k: questions and dialogues about an image, and text alone, on which LLaVA-1.5 is instruction-tuned.

Page: https://huggingface.co/datasets/liuhaotian/LLaVA-Instruct-150K (Liu et al., CVPR 2024). The annotations are
CC BY 4.0; those written by GPT-4 are subject to OpenAI's terms, and the images to the terms of COCO, GQA, OCR-VQA,
TextVQA and Visual Genome. The rows have the form that `llava.py` describes. `root` is a folder with:

    llava_v1_5_mix665k.json                   one JSON list of 665,298 rows
    coco/train2017/000000033471.jpg           364,100 rows
    gqa/images/                               72,140 rows
    ocr_vqa/images/                           80,000 rows
    textvqa/train_images/                     21,953 rows
    vg/VG_100K/, vg/VG_100K_2/                86,417 rows
                                              40,688 rows are dialogues of ShareGPT without an image

About 250,000 rows share their image with another row. Some addresses of OCR-VQA are dead, so images are missing: a row
without its image goes to quarantine, and `validate.max_quarantined_share` says how many may. Dialogues of ShareGPT
contain HTML and long answers; `validate` puts answers with HTML into quarantine, too, and answers above
`validate.max_caption_chars`. The counts were published by others; this project has not read the file.

The options are `manifest`, the file; `images`, a folder of the folders of images; and `split` (see `pairs.py`).
"""

from pathlib import Path

from m3diff.datasets.llava import count_training_rows, read_llava
from m3diff.datasets.pairs import OwnSplit
from m3diff.datasets.spec import DatasetSpec, Licence, Permission, Protocol, RowsWithNotes

FILE = "llava_v1_5_mix665k.json"
# rows by the first folder of their image; "" are rows without an image
ROWS_BY_FOLDER = {
    "coco": 364_100,
    "vg": 86_417,
    "ocr_vqa": 80_000,
    "gqa": 72_140,
    "textvqa": 21_953,
    "": 40_688,
}
ROWS = sum(ROWS_BY_FOLDER.values())


def read(root: Path, manifest: str = FILE, images: str = "", split: OwnSplit = "train") -> RowsWithNotes:
    """Return one row per dialogue. All rows are for training, unless `split` draws splits (see `drawn_split.py`)."""
    return read_llava(root, manifest, images, split)


WITH_CREDIT = Permission("conditions", "credit the authors; OpenAI's terms and those of the image sets apply")
SPEC = DatasetSpec(
    title="LLaVA-665k",
    page="https://huggingface.co/datasets/liuhaotian/LLaVA-Instruct-150K",
    paper="Improved Baselines with Visual Instruction Tuning (Liu et al., CVPR 2024)",
    licence=Licence.for_every_use("CC BY 4.0", "https://creativecommons.org/licenses/by/4.0/", WITH_CREDIT),
    read=read,
    files=(FILE,),
    published=(count_training_rows("llava_instruct", "LLaVA-665k", ROWS, ROWS_BY_FOLDER[""]),),
    protocols=(Protocol("test", published_pairs=None),),
)
