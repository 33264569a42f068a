"""LEVIR-CC: a place seen by satellite at two times, five sentences to a pair; half of the pairs show no change.

Page: https://github.com/Chen-Yang-Liu/LEVIR-CC-Dataset (Liu et al., TGRS 2022). The page states no licence.

    LevirCCcaptions.json             one object with a list `images`, a record for each pair
    images/val/A/val_000001.png      before, 256x256
    images/val/B/val_000001.png      after: the same name (LEVIR-MCI adds a folder `label`, which is not read)

    {"filepath": "val", "filename": "val_000001.png", "imgid": 6815, "split": "val", "changeflag": 1, "sentids": [...],
     "sentences": [{"raw": " a road is built .", "tokens": ["a", "road", "is", "built"], "imgid": 6815, ...}, ...]}

A reference is its tokens with a space between: `raw` holds spaces and a full stop that no evaluation counts. 5,039
pairs have all the same five sentences, and no other pair has one of them: they say that a pair is without a change, and
`changeflag`, which was not counted, is not read. What changed is not annotated: the others have the type `change`.

The authors score numbers of a vocabulary, separated by spaces, with words seen fewer than five times as one; CCExpert
and other papers with language models score the text itself, in lower case without full stops, by the same scorers. The
protocols here are these papers': words between spaces, no PTB tokenizer.
"""

from collections.abc import Iterator
from pathlib import Path

from m3diff.datasets.files import describe, pick, read_json
from m3diff.datasets.spec import UNSTATED, DatasetSpec, Protocol, Published, Row, SplitCount, broken, fault_in
from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE

FIELDS = {"filename": str, "split": str, "sentences": list}
CHANGE = "change"
SAME = {  # the sentences of every pair without a change, and of no other
    "the scene is the same as before",
    "there is no difference",
    "the two scenes seem identical",
    "no change has occurred",
    "almost nothing has changed",
}


def read(root: Path, images: str = "images") -> Iterator[Row]:
    file = "LevirCCcaptions.json"
    records = read_json(root / file, dict).get("images")
    if not isinstance(records, list):
        raise DataError(f"{root / file}: expected a list `images`, found {describe(records)}; fetch it again")
    for number, record in enumerate(records):
        source = f"{file}, image {number}"
        fault = fault_in(record, FIELDS)
        tokens = [] if fault else pick(record, "sentences.*.tokens")
        if not all(isinstance(each, list) and all(isinstance(token, str) for token in each) for each in tokens):
            fault = "sentences: expected objects with a list `tokens` of text"
        if fault:
            yield broken(record.get("split") if isinstance(record, dict) else None, source, fault)
            continue
        name, split = record["filename"], record["split"]
        pair = f"{images}/{split}/A/{name}", f"{images}/{split}/B/{name}"
        texts = [*map(" ".join, tokens)]
        yield Row(name, split, name, *pair, texts, [CHANGE if SAME.isdisjoint(texts) else NO_CHANGE], source)


PUBLISHED = Published(
    "levir_cc", "LEVIR-CC", SplitCount(6_815, 34_075), SplitCount(1_333, 6_665), SplitCount(1_929, 9_645)
)
CCEXPERT = "Meize0729/CCExpert: llava/train/llava_trainer_eval.py"
RSICC = "Chen-Yang-Liu/RSICC: eval.py, its subsets; Meize0729/CCExpert, its texts"
SPEC = DatasetSpec(
    title="LEVIR-CC",
    page="https://github.com/Chen-Yang-Liu/LEVIR-CC-Dataset",
    paper="Remote Sensing Image Change Captioning With Dual-Branch Transformers (Liu et al., TGRS 2022)",
    licence=UNSTATED,
    read=read,
    files=("LevirCCcaptions.json",),
    published=(PUBLISHED,),
    protocols=(
        Protocol("total", n=PUBLISHED.test.pairs, tokenizer="whitespace", source=CCEXPERT),
        Protocol("change", n=964, change_types=(CHANGE,), tokenizer="whitespace", source=RSICC),
        Protocol("no_change", n=965, change_types=(NO_CHANGE,), tokenizer="whitespace", source=RSICC),
    ),
)
