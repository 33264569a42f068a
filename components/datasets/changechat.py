"""ChangeChat-105k: captions of, questions about and dialogues on LEVIR-CC's satellite images of a place at two times.

Page: https://github.com/hanlinwu/DeltaVLM (DeltaVLM, arXiv 2507.22346). The annotations are CC BY 4.0. The images are
LEVIR-CC's, whose page does not state a licence; they are not part of the download. `root` is the folder with:

    annotations/changechat_105k_train.json     87,935 rows of all kinds; changechat_105k_train_loc.json has the same
                                               rows with other answers about places, so only one of them is read
    annotations/changechat_105k_test.json      captions; also test_binary, test_count, test_loc, test_open, test_dialog
    images/test/A/test_000004.png              before, 256x256, in LEVIR-CC's folders
    images/test/B/test_000004.png              after, with the same name

    {"id": 0, "image": ["train/A/train_000001.png", "train/B/train_000001.png"], "changeflag": 1, "conversations":
     [{"from": "human", "value": "<image> <image> Please ..."}, {"from": "gpt", "value": "A road is built."}]}
    {"image_A": "test/A/test_000004.png", "image_B": "test/B/test_000004.png", "captions": [5 texts], "changeflag": 1}

The captions of the test split have the second form. There is no file for validation. To select a checkpoint, add
LEVIR-CC's validation captions: an entry with the reader `levir_cc` and `train_on: []`; its test pairs are then scored,
too. `id` numbers the rows and not the pairs, so it is not read. A pair is called by the name of its files, and a
question by its pair, its kind and its number: "test_000004.png?open-1".

In the test split, the file says the kind of its questions. In the train split, the words of a question tell its kind,
because no field does:

    caption        "Please briefly describe the changes in these two images." Five rows a pair are the references of one
                   record. It has no question of its own, so that it is scored and weighed like a caption of LEVIR-CC.
                   Task `changechat` of profiles/questions.yaml asks the authors' question
    binary         "Please judge whether these two images have changed. Please answer yes or no."
    localisation   "Please indicate the locations where changes have occurred ...", answered by cells of a 3x3 grid
    count          one question about the numbers of roads and buildings, which a language model worded
    dialogue       three turns: changed or not, the numbers of roads and buildings, a caption. In test, each is a record
    open           all others; each row is a record, even if a pair has the same question twice

`changeflag` becomes the change type `change` or `none` of all records of the pair. Rows of some kinds may lack it, so
the flag of any row of the pair counts. The numbers in the answers of test come from contours in LEVIR-MCI's masks. In
train, they are zero wherever `changeflag` is 0.

Captions and open answers are scored like LEVIR-CC's captions, in lower case and without full stops. The authors replace
words by numbers of LEVIR-CC's vocabulary first, so rare words share a number. The protocols `binary`, `count` and
`localisation` have their own metrics. Dialogues are not scored in the paper, and by no protocol here. The option
`kinds` leaves kinds out.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from m3diff.datasets.conversations import Conversation, count_marks, read_conversation, without_leading_marks
from m3diff.datasets.files import enumerate_records, read_json
from m3diff.datasets.spec import (
    DatasetSpec,
    Licence,
    Permission,
    Protocol,
    Published,
    Row,
    RowsWithNotes,
    SplitCount,
    broken_row,
    find_fault,
    merge_rows,
    unexpected,
)
from m3diff.records.errors import DataError, Fault, format_count
from m3diff.records.sample import PAIR
from m3diff.records.schemas import NO_CHANGE

Kind = Literal["caption", "binary", "count", "localisation", "open", "dialogue"]
KINDS: tuple[Kind, ...] = ("caption", "binary", "count", "localisation", "open", "dialogue")
# In train, a pair has one question of each of these kinds
KINDS_OF_EVERY_PAIR: tuple[Kind, ...] = ("binary", "count", "localisation", "dialogue")
TEST_PART_OF_KIND: dict[Kind, str] = {
    "caption": "test",
    "binary": "test_binary",
    "count": "test_count",
    "localisation": "test_loc",
    "open": "test_open",
    "dialogue": "test_dialog",
}
# What a question of train must match, in lower case and with single spaces, to be of a kind
QUESTION_OF_KIND: dict[Kind, re.Pattern[str]] = {
    "caption": re.compile(r"please briefly describe the changes in these two images\b"),
    "binary": re.compile(r"please judge whether these two images have changed\b"),
    "localisation": re.compile(r"please indicate the locations where changes have occurred\b"),
    "count": re.compile(r"(?=.*\b(?:how many|number|count|quantit))(?=.*\broads?\b)(?=.*\b(?:building|house)s?\b)"),
}
FIELDS = {"image": list, "conversations": list}
CAPTION_FIELDS = {"image_A": str, "image_B": str, "captions": list}
CHANGE = "change"
CHANGE_TYPE_OF_FLAG = {0: NO_CHANGE, 1: CHANGE}


@dataclass
class PairFacts:
    """What the rows of a split say about its pairs.

    Attributes:
        change_types: the change type by pair, for pairs with a `changeflag`.
        sources: by pair, the source of the row with the first `changeflag`.
        questions: the number of rows by pair and kind.
    """

    change_types: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    questions: Counter[tuple[str, Kind]] = field(default_factory=Counter)

    def add_flag(self, pair: str, flag: Any, source: str) -> Fault | None:
        """Add the `changeflag` of a row. Return a fault if it is invalid, or contradicts an earlier row of the pair."""
        if flag is None:
            return None
        if not isinstance(flag, int) or flag not in CHANGE_TYPE_OF_FLAG:
            return unexpected("changeflag", "0 or 1", flag)
        change_type = CHANGE_TYPE_OF_FLAG[flag]
        if self.change_types.setdefault(pair, change_type) != change_type:
            return Fault("datasets.flags_contradict", key="changeflag", value=int(flag), source=self.sources[pair])
        self.sources.setdefault(pair, source)
        return None


def read(
    root: Path, images: str = "images", train: Literal["train", "train_loc"] = "train", kinds: Sequence[Kind] = KINDS
) -> RowsWithNotes:
    """Return one row per question and one per captioned pair, the train split first.

    Args:
        images: folder of LEVIR-CC's images, with the folders `train` and `test`.
        train: which of the two files of the train split is read.
        kinds: the kinds of questions to read. Files of the test split with other kinds are not needed.
    """
    notes: list[str] = []

    def read_rows() -> Iterator[Row]:
        train_facts = PairFacts()
        train_rows = list(_read_file(root, images, train, None, train_facts))
        notes.extend(_note_kinds(train_facts))
        yield from _finish_rows(train_rows, train_facts, kinds, f"{_file_of_part(train)}, ")
        test_facts = PairFacts()
        test_rows: list[Row] = []
        for kind in KINDS:
            if kind in kinds:
                test_rows += _read_file(root, images, TEST_PART_OF_KIND[kind], kind, test_facts)
        yield from _finish_rows(test_rows, test_facts, kinds)

    return RowsWithNotes(read_rows(), notes)


def _file_of_part(part: str) -> str:
    return f"annotations/changechat_105k_{part}.json"


def _finish_rows(
    rows: Sequence[Row], facts: PairFacts, kinds: Sequence[Kind], shared_source: str = ""
) -> Iterator[Row]:
    """Yield the rows of the chosen kinds with their change types. The captions of a pair are merged."""
    chosen_rows = [row for row in rows if row.fault or row.kind in kinds]
    for row in merge_rows(chosen_rows, shared_source):
        change_type = facts.change_types.get(row.scene)
        yield replace(row, change_types=[] if change_type is None else [change_type])


def _read_file(root: Path, images: str, part: str, kind: Kind | None, facts: PairFacts) -> Iterator[Row]:
    """Yield one row per record of a file, and add what the records say to the facts.

    Args:
        part: end of the file's name, which begins with the name of the split.
        kind: kind of all questions. None if each question tells its kind.
    """
    split = part.partition("_")[0]
    file = _file_of_part(part)
    for source, record in enumerate_records(file, read_json(root / file, list)):
        is_captions = isinstance(record, Mapping) and "captions" in record
        fault = find_fault(record, CAPTION_FIELDS if is_captions else FIELDS)
        if fault:
            yield broken_row(split, source, fault)
            continue
        paths = [record["image_A"], record["image_B"]] if is_captions else record["image"]
        fault = _fault_of_paths(paths)
        if fault:
            yield broken_row(split, source, fault)
            continue
        pair = PurePosixPath(paths[0]).name
        fault = facts.add_flag(pair, record.get("changeflag"), source)
        if fault:
            yield broken_row(split, source, fault, pair)
            continue
        row = Row(
            name=pair,
            split=split,
            scene=pair,
            images=tuple(f"{images}/{path}" for path in paths),
            references=record["captions"] if is_captions else None,
            kind="caption",
            source=source,
        )
        if is_captions:
            yield row
            continue
        try:
            yield _question_row(row, record, kind, facts.questions)
        except DataError as error:
            yield broken_row(split, source, error.fault, pair)


def _fault_of_paths(paths: Sequence[Any]) -> Fault | None:
    """Return a fault unless the paths are two texts with the same file name in different folders."""
    if len(paths) != PAIR or not all(isinstance(path, str) for path in paths):
        return unexpected("image", "the paths of two images", list(paths))
    if len({PurePosixPath(path).name for path in paths}) > 1 or paths[0] == paths[1]:
        return unexpected("image", "two files with the same name in the folders A and B", list(paths))
    return None


def _question_row(row: Row, record: Mapping[str, Any], kind: Kind | None, questions: Counter[tuple[str, Kind]]) -> Row:
    """Return the row of a conversation.

    Args:
        row: the row of its pair.
        kind: kind of the question. None if the words of the question tell it.
        questions: number of rows by pair and kind, to which this row is added.

    Raises:
        DataError: the conversation cannot be read.
    """
    conversation = _read_turns(record)
    kind = kind or kind_of_question(conversation)
    number = questions[row.name, kind]
    questions[row.name, kind] += 1
    references = [conversation.answers]
    if kind == "caption":
        return replace(row, references=references)
    return replace(
        row,
        name=f"{row.name}?{kind}-{number}",
        image_set=row.name,
        question=conversation.question,
        history=conversation.history,
        references=references,
        kind=kind,
    )


def _read_turns(record: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a record without the image marks at its start. Raise a DataError if it is invalid."""
    key = "conversations"
    messages = record[key]
    if not all(isinstance(message, Mapping) for message in messages):
        raise DataError(unexpected(key, "a list of messages", messages))
    conversation = without_leading_marks(read_conversation(messages, key))
    marks = count_marks(conversation)
    if marks not in (0, PAIR):
        raise DataError("datasets.marks_differ_from_images", key=key, marks=marks, images=PAIR)
    return conversation


def kind_of_question(conversation: Conversation) -> Kind:
    """Return the kind of a question by its words, as the authors' generator wrote them."""
    if conversation.history:
        return "dialogue"
    question = " ".join(str(conversation.question).lower().split())
    return next((kind for kind, pattern in QUESTION_OF_KIND.items() if pattern.match(question)), "open")


def _note_kinds(facts: PairFacts) -> Iterator[str]:
    """Yield a sentence for each kind about which some pairs of train have no question, or several."""
    questions_by_kind = Counter[Kind]()
    for (_, kind), count in facts.questions.items():
        questions_by_kind[kind] += count
    pairs = len({pair for pair, _ in facts.questions})
    for kind in KINDS_OF_EVERY_PAIR:
        if questions_by_kind[kind] != pairs:
            questions = format_count(questions_by_kind[kind], "question")
            yield (
                f"train: {questions} of the kind {kind} about {format_count(pairs, 'pair')}, of which each should have "
                "one; the words of a question tell its kind"
            )


PUBLISHED = Published(
    "changechat",
    "ChangeChat-105k",
    # captions of 6,815 pairs, 3 x 6,815 single questions, 26,600 open questions and 6,815 dialogues
    SplitCount(6_815, 87_935, records=87_935, questions=60_675),
    SplitCount(0, 0),
    # captions of 1,929 pairs, 3 x 1,929 single questions, 7,527 open questions and 3 x 1,929 turns of dialogues
    SplitCount(1_929, 28_746, records=17_172, questions=21_030),
)
TEST_PAIRS = PUBLISHED.test.pairs
SCRIPTS = "hanlinwu/DeltaVLM: scripts"
CAPTION_SOURCE = f"{SCRIPTS}/test_cap.ipynb, without its vocabulary"
CAPTIONS = Protocol(
    "caption",
    published_pairs=TEST_PAIRS,
    kinds=("caption",),
    pairs="captions",
    tokenizer="lowercase",
    source=CAPTION_SOURCE,
)
CAPTION_SUBSET = replace(CAPTIONS, pairs="", source=f"{CAPTION_SOURCE}; LEVIR-CC's numbers of pairs")
UNLICENSED_IMAGES = "the images are LEVIR-CC's, whose page states no licence"
WITH_CREDIT = Permission("conditions", f"annotations: credit the authors; {UNLICENSED_IMAGES}")
SPEC = DatasetSpec(
    title="ChangeChat-105k",
    page="https://github.com/hanlinwu/DeltaVLM",
    paper="DeltaVLM (arXiv 2507.22346; Remote Sensing 2026, 18(4), 541)",
    licence=Licence(
        name="CC BY 4.0",
        url="https://creativecommons.org/licenses/by/4.0/",
        train=WITH_CREDIT,
        redistribute=Permission("unstated", f"annotations: credit the authors; {UNLICENSED_IMAGES}"),
        show=WITH_CREDIT,
    ),
    read=read,
    files=tuple(map(_file_of_part, ("train", *TEST_PART_OF_KIND.values()))),
    task="changechat",
    published=(PUBLISHED,),
    protocols=(
        CAPTIONS,
        replace(CAPTION_SUBSET, name="change", published_pairs=964, change_types=(CHANGE,)),
        replace(CAPTION_SUBSET, name="no_change", published_pairs=965, change_types=(NO_CHANGE,)),
        Protocol(
            "binary",
            published_pairs=TEST_PAIRS,
            kinds=("binary",),
            pairs="questions whether anything changed",
            metrics=("binary_change",),
            source=f"{SCRIPTS}/test-cls.ipynb",
        ),
        Protocol(
            "count",
            published_pairs=TEST_PAIRS,
            kinds=("count",),
            pairs="questions for numbers of roads and buildings",
            metrics=("object_counts",),
            source=f"{SCRIPTS}/test-count.ipynb",
        ),
        Protocol(
            "localisation",
            published_pairs=TEST_PAIRS,
            kinds=("localisation",),
            pairs="questions for changed cells of a grid",
            metrics=("grid_cells",),
            source=f"{SCRIPTS}/test-loc.ipynb",
        ),
        Protocol(
            "open",
            published_pairs=7_527,
            kinds=("open",),
            pairs="open questions",
            tokenizer="lowercase",
            source=f"{SCRIPTS}/test_open_questions.ipynb, without its vocabulary",
        ),
    ),
)
