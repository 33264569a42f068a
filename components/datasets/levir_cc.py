"""LEVIR-CC: satellite images of a place at two times, with five sentences per pair. Half of the pairs show no change.

Page: https://github.com/Chen-Yang-Liu/LEVIR-CC-Dataset (Liu et al., TGRS 2022). The page does not state a licence.

    LevirCCcaptions.json             an object with a list `images`, which has one record per pair
    images/val/A/val_000001.png      before, 256x256
    images/val/B/val_000001.png      after, with the same name (LEVIR-MCI adds a folder `label`, which is not read)

    {"filepath": "val", "filename": "val_000001.png", "imgid": 6815, "split": "val", "changeflag": 1, "sentids": [...],
     "sentences": [{"raw": " a road is built .", "tokens": ["a", "road", "is", "built"], "imgid": 6815, ...}, ...]}

A reference consists of the tokens of a sentence, joined by spaces. `raw` is not used, because it has extra spaces and a
full stop that evaluations ignore. 5,039 pairs have the same five sentences, which no other pair has. A pair with one of
these sentences has no change. The kind of change is not annotated, so all other pairs have the type `change`.
`changeflag` only serves to recognise other data in this layout, because its values in LEVIR-CC have not been counted.

The authors replace words by vocabulary numbers before scoring. Words that occur fewer than five times share a number.
CCExpert and other papers with language models use the same scorers for the lowercase text without full stops. The
protocols here follow these papers: words are split at spaces, without the PTB tokenizer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3diff.datasets.doubts import as_yaml
from m3diff.datasets.files import describe, pick, read_json
from m3diff.datasets.spec import (
    UNSTATED_LICENCE,
    DatasetSpec,
    Protocol,
    Published,
    Row,
    SplitCount,
    broken_row,
    find_fault,
    unexpected,
)
from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE

FILE = "LevirCCcaptions.json"
FIELDS = {"filename": str, "split": str, "sentences": list}
CHANGE = "change"
# The sentences of the pairs without a change. No other pair has them
NO_CHANGE_SENTENCES = {
    "the scene is the same as before",
    "there is no difference",
    "the two scenes seem identical",
    "no change has occurred",
    "almost nothing has changed",
}


def read(root: Path, images: str = "images") -> Iterator[Row]:
    """Yield one row per image pair, in the order of the file. Each reference is the joined tokens of a sentence.

    Raises:
        DataError: the file cannot be used, or most of the pairs that are unchanged by their `changeflag` do not have
            LEVIR-CC's sentences. Such pairs would be read as changed.
    """
    records = read_json(root / FILE, dict).get("images")
    if not isinstance(records, list):
        raise DataError("datasets.no_list_of_images", path=root / FILE, key="images", value=describe(records))
    names_with_flag_0 = []
    unchanged_pairs = 0
    for number, record in enumerate(records):
        source = f"{FILE}, image {number}"
        fault = find_fault(record, FIELDS)
        tokens_of_sentences = [] if fault else pick(record, "sentences.*.tokens")
        if not all(map(_are_tokens, tokens_of_sentences)):
            fault = unexpected("sentences", "objects with a list `tokens` of text", record["sentences"])
        if fault:
            split = record.get("split") if isinstance(record, dict) else None
            yield broken_row(split, source, fault)
            continue
        name = record["filename"]
        split = record["split"]
        texts = [" ".join(tokens) for tokens in tokens_of_sentences]
        change_type = CHANGE if NO_CHANGE_SENTENCES.isdisjoint(texts) else NO_CHANGE
        unchanged_pairs += change_type == NO_CHANGE
        if str(record.get("changeflag")) in ("0", "False"):
            names_with_flag_0.append(name)
        yield Row(
            name=name,
            split=split,
            scene=name,
            images=(f"{images}/{split}/A/{name}", f"{images}/{split}/B/{name}"),
            references=texts,
            change_types=[change_type],
            source=source,
        )
    if len(names_with_flag_0) > 2 * unchanged_pairs:
        raise DataError(
            "datasets.own_data_like_levir_cc",
            path=root / FILE,
            pairs=len(names_with_flag_0),
            unchanged=unchanged_pairs,
            example=names_with_flag_0[0],
            options=as_yaml(_entry_of_own_data(root, images)),
        )


def _entry_of_own_data(root: Path, images: str) -> dict[str, Any]:
    """Return an entry that reads data in this layout with `pairs`. `changeflag` marks the unchanged pairs."""
    columns = {
        "before": f"{images}/{{split}}/A/{{filename}}",
        "after": f"{images}/{{split}}/B/{{filename}}",
        "captions": "sentences.*.raw",
        "id": "filename",
    }
    options = {"manifest": FILE, "rows": "images", "columns": columns, "no_change": {"changeflag": [0, False]}}
    return {"reader": "pairs", "root": str(root), "options": options}


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(token, str) for token in value)


PUBLISHED = Published(
    "levir_cc", "LEVIR-CC", SplitCount(6_815, 34_075), SplitCount(1_333, 6_665), SplitCount(1_929, 9_645)
)
CCEXPERT = "Meize0729/CCExpert: llava/train/llava_trainer_eval.py"
RSICC = "Chen-Yang-Liu/RSICC: eval.py, its subsets; Meize0729/CCExpert, its texts"
SPEC = DatasetSpec(
    title="LEVIR-CC",
    page="https://github.com/Chen-Yang-Liu/LEVIR-CC-Dataset",
    paper="Remote Sensing Image Change Captioning With Dual-Branch Transformers (Liu et al., TGRS 2022)",
    licence=UNSTATED_LICENCE,
    read=read,
    files=(FILE,),
    published=(PUBLISHED,),
    protocols=(
        Protocol("total", published_pairs=PUBLISHED.test.pairs, tokenizer="whitespace", source=CCEXPERT),
        Protocol("change", published_pairs=964, change_types=(CHANGE,), tokenizer="whitespace", source=RSICC),
        Protocol("no_change", published_pairs=965, change_types=(NO_CHANGE,), tokenizer="whitespace", source=RSICC),
    ),
)
