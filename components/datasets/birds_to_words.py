"""Birds-to-Words: two photos of birds, and paragraphs that compare them ("animal 1 ..."). The order of photos matters.

Page: https://github.com/google-research-datasets/birds-to-words (Forbes et al., EMNLP 2019), CC BY-SA 4.0.

    birds-to-words-v1.0.tsv    tab-separated with a header and double quotes; one row per paragraph, 11 columns:
        img1ObservationURL img1ImgURL img1Species img1Selection, the same four for img2, split annN description
    images/13985343.jpg        downloaded from iNaturalist by the user; a few photos are no longer available

    https://www.inaturalist.org/photos/13985343 <tab> ... <tab> train <tab> 1 <tab> Animal 1 has a yellow head ...

The image id is the last part of the ObservationURL. Each row is one paragraph of a pair, and the rows of a pair are
merged. A pair with 8 to 10 rows was sampled twice. The splits share 59 images, but no pairs.

The protocol `whitespace` expects lowercase text that is already tokenized ("animal1 has a white belly ."), as in the
files of cwj1412/image-difference-captioning. It does not change case or punctuation, so its scores cannot be compared
with scores that use the PTB tokenizer.
"""

from collections.abc import Iterator
from pathlib import Path

from m3diff.datasets import spec
from m3diff.datasets.files import read_values

COLUMNS = ("img1ObservationURL", "img2ObservationURL", "split", "description")


def read(
    root: Path, manifest: str = "birds-to-words-v1.0.tsv", images: str = "images", suffix: str = ".jpg"
) -> Iterator[spec.Row]:
    """Yield one row per pair and split, at the position of its first paragraph. Broken rows are not merged."""

    def make_row(_: object, source: str, line: dict[str, str]) -> spec.Row:
        split = line["split"]
        photo_ids = []
        for column in COLUMNS[:2]:
            photo_id = line[column].rstrip("/").rsplit("/", 1)[-1]
            if not photo_id.isdecimal():
                expected = "https://www.inaturalist.org/photos/<number>"
                return spec.broken_row(split, source, spec.unexpected(column, expected, line[column]))
            photo_ids.append(photo_id)
        name = "_".join(photo_ids)
        return spec.Row(
            name=name,
            split=split,
            scene=name,
            images=tuple(f"{images}/{photo_id}{suffix}" for photo_id in photo_ids),
            references=[line["description"]],
            source=source,
        )

    return spec.merge_rows(spec.make_rows(None, read_values(root / manifest, COLUMNS), {}, make_row))


PUBLISHED = spec.Published(
    "birds_to_words",
    "Birds-to-Words",
    spec.SplitCount(2_685, 12_890, repeated=23),
    spec.SplitCount(325, 1_556, repeated=6),
    spec.SplitCount(337, 1_604),
)
WITH_CREDIT = spec.Permission("conditions", "credit the authors; iNaturalist states the licence of each photo")
IDC_SOURCE = "yaolinli/IDC: eval/eval_models.py"
SPEC = spec.DatasetSpec(
    title="Birds-to-Words",
    page="https://github.com/google-research-datasets/birds-to-words",
    paper="Neural Naturalist: Generating Fine-Grained Image Comparisons (Forbes et al., EMNLP 2019)",
    licence=spec.Licence(
        name="CC BY-SA 4.0",
        url="https://creativecommons.org/licenses/by-sa/4.0/",
        train=WITH_CREDIT,
        redistribute=spec.Permission(
            "conditions", "texts: credit the authors, same licence; the licence does not cover the photos"
        ),
        show=WITH_CREDIT,
    ),
    read=read,
    files=("birds-to-words-v1.0.tsv",),
    task="birds",
    published=(PUBLISHED,),
    protocols=(
        spec.Protocol(
            "test", published_pairs=PUBLISHED.test.pairs, source="Neural Naturalist (Forbes et al., EMNLP 2019)"
        ),
        spec.Protocol("whitespace", published_pairs=PUBLISHED.test.pairs, tokenizer="whitespace", source=IDC_SOURCE),
    ),
)
