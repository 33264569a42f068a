"""MiniChange: the embedded benchmark, which draws itself: small scenes on a table, one to three changes or none.

Page: this folder. Licence: Apache-2.0, as the project's. Written in CLEVR-Change's layout and read by its reader, with
two files more:

    images/CLEVR_default_000123.png           before
    sc_images/CLEVR_semantic_000123.png       after: the changes, and a small move of camera and light
    nsc_images/CLEVR_nonsemantic_000123.png   after: the small move only
    change_captions.json      {"CLEVR_default_000123.png": ["at the top the small red box turned blue", ...], ...}
    no_change_captions.json   the same keys: ["nothing changed", ...]
    splits.json               {"train": [123, ...], "val": [...], "test": [...]}
    type_mapping.json         {"color": ["000123.png", ...], ...}; a pair with several changes stands under each
    grammar.json              rules that read a caption back into changes: type, object, place, what it was and became
    scenes.json               what each image shows (`generate.py`): for who edits an image or describes it

`scene.py` says how each of OmniDiff's twelve change types is drawn, `generate.py` writes the files. The number of
scenes is a parameter, so no count is published.

Two levels. *Grid*: three to five objects, each in a cell of its own, under a camera that hardly moves; a change shows
in the pixels. *Free*: six to eight objects anywhere, overlapping, of three sizes and several textures,
under a camera and a light that move more between any two images than the smallest changes do. Words and grammar are the
same but for a third size.

With `domain: shifted` the same scenes, changes and words are drawn in other shades, on darker, chequered tables and by
a turned and tilted camera (`render.LOOKS`). The embedded run draws such a dataset for tests alone,
`minichange_shifted`: how far its scores fall says how much of what a model learnt is the look of the training images.
"""

from collections.abc import Iterator
from pathlib import Path

from m3diff.datasets.clevr_change import read
from m3diff.datasets.files import read_json
from m3diff.datasets.minichange.scene import MiniChange
from m3diff.datasets.spec import DatasetSpec, Licence, Permission, Protocol, Row


def _generate(settings: MiniChange) -> None:
    from m3diff.datasets.minichange.generate import generate

    generate(settings)


def _singles(root: Path) -> Iterator[Row]:
    from m3diff.datasets.minichange.generate import read_singles

    return read_singles(root)


ALLOWED = Permission("yes", "drawn by this project, under its licence")
SPEC = DatasetSpec(
    title="MiniChange",
    page="components/datasets/minichange",
    paper=None,
    licence=Licence.of("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0", ALLOWED),
    read=read,
    files=("change_captions.json", "no_change_captions.json", "splits.json", "type_mapping.json", "grammar.json"),
    protocols=(
        Protocol("total", n=None),
        Protocol("semantic", n=None, ids=r"\d+\.png"),
        Protocol("distractor", n=None, ids=r"\d+\.png_n"),
    ),
    grammar=lambda root: read_json(root / "grammar.json", dict),
    singles=_singles,
    generate=_generate,
)
