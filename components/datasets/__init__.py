"""The supported datasets. To add a dataset, write a module with a `SPEC` in this folder and list it in `DATASETS`."""

from typing import TYPE_CHECKING

from m3diff.records import LazyMapping

if TYPE_CHECKING:
    from m3diff.datasets.spec import DatasetSpec

DATASETS: LazyMapping["DatasetSpec"] = LazyMapping(  # the keys are the values of `ingest.datasets.<name>.reader`
    "SPEC",
    {
        "birds_to_words": "m3diff.datasets.birds_to_words",
        "changechat": "m3diff.datasets.changechat",
        "clevr_change": "m3diff.datasets.clevr_change",
        "clevr_dc": "m3diff.datasets.clevr_dc",
        "emu_edit": "m3diff.datasets.emu_edit",
        "iedit": "m3diff.datasets.iedit",
        "levir_cc": "m3diff.datasets.levir_cc",
        "llava_instruct": "m3diff.datasets.llava_instruct",
        "llava_pretrain": "m3diff.datasets.llava_pretrain",
        "magicbrush": "m3diff.datasets.magicbrush",
        "minichange": "m3diff.datasets.minichange",
        "minichange_images": "m3diff.datasets.minichange_images",
        "nlvr2": "m3diff.datasets.nlvr2",
        "omnidiff": "m3diff.datasets.omnidiff",
        "pairs": "m3diff.datasets.pairs",
        "rsrcc": "m3diff.datasets.rsrcc",
        "sidecar": "m3diff.datasets.sidecar",
        "spot_the_diff": "m3diff.datasets.spot_the_diff",
        "syned": "m3diff.datasets.syned",
    },
)
