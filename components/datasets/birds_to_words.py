"""Birds-to-Words: two photos of birds and paragraphs that tell them apart. The direction matters ("animal 1 ...").

Page: https://github.com/google-research-datasets/birds-to-words (Forbes et al., EMNLP 2019), CC BY-SA 4.0.

    birds-to-words-v1.0.tsv    tab-separated with a header and double quotes; a row per paragraph, 11 columns:
        img1ObservationURL img1ImgURL img1Species img1Selection, the same four of img2, split annN description
    images/13985343.jpg        fetched by the user from iNaturalist; a few have been taken down

    https://www.inaturalist.org/photos/13985343 <tab> ... <tab> train <tab> 1 <tab> Animal 1 has a yellow head ...

The image id is the last part of the ObservationURL. A pair's paragraphs are its rows; 8 to 10 of them mean that the
pair was sampled twice, and they are merged. 59 images (no pair) are shared between splits.

The white space protocol is of texts that are tokens already, in lower case ("animal1 has a white belly ."), as the
files of cwj1412/image-difference-captioning hold them; it changes neither case nor punctuation, and its scores compare
with no PTB ones.
"""

from collections.abc import Iterator
from pathlib import Path

from m3diff.datasets import spec
from m3diff.datasets.files import read_values

COLUMNS = ("img1ObservationURL", "img2ObservationURL", "split", "description")


def read(
    root: Path, manifest: str = "birds-to-words-v1.0.tsv", images: str = "images", suffix: str = ".jpg"
) -> Iterator[spec.Row]:
    """Yield a row per pair and split, at the place of its first paragraph; broken rows stand alone."""

    def row(_: object, where: str, line: dict[str, str]) -> spec.Row:
        split, ids = line["split"], [line[column].rstrip("/").rsplit("/", 1)[-1] for column in COLUMNS[:2]]
        if not all(map(str.isdecimal, ids)):
            return spec.broken(split, where, "image URL: expected https://www.inaturalist.org/photos/<number>")
        name, (before, after) = "_".join(ids), (f"{images}/{photo}{suffix}" for photo in ids)
        return spec.Row(name, split, name, before, after, [line["description"]], [], where)

    return spec.merged(spec.as_rows(None, read_values(root / manifest, COLUMNS), {}, row))


PUBLISHED = spec.Published(
    "birds_to_words",
    "Birds-to-Words",
    spec.SplitCount(2_685, 12_890, repeated=23),
    spec.SplitCount(325, 1_556, repeated=6),
    spec.SplitCount(337, 1_604),
)
CITED = spec.Permission("conditions", "credit the authors; each photo has the licence that iNaturalist states for it")
IDC = "yaolinli/IDC: eval/eval_models.py"
SPEC = spec.DatasetSpec(
    title="Birds-to-Words",
    page="https://github.com/google-research-datasets/birds-to-words",
    paper="Neural Naturalist: Generating Fine-Grained Image Comparisons (Forbes et al., EMNLP 2019)",
    licence=spec.Licence(
        name="CC BY-SA 4.0",
        url="https://creativecommons.org/licenses/by-sa/4.0/",
        train=CITED,
        redistribute=spec.Permission("conditions", "texts: credit the authors, same licence; the photos are not in it"),
        show=CITED,
    ),
    read=read,
    files=("birds-to-words-v1.0.tsv",),
    task="birds",
    published=(PUBLISHED,),
    protocols=(
        spec.Protocol("test", n=PUBLISHED.test.pairs, source="Neural Naturalist (Forbes et al., EMNLP 2019)"),
        spec.Protocol("whitespace", n=PUBLISHED.test.pairs, tokenizer="whitespace", source=IDC),
    ),
)
