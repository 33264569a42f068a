"""The schemas of records and samples, the two kinds of tables that stages pass on.

An *image set* is the images that questions are about: most often a pair, the image before and the image after. The
stages `ingest` and `validate` turn raw files into *records*. A record is one question about one image set, with all of
its right answers (the references) and the turns before it. Most records have no question of their own: their references
describe what changed, and the question is drawn from those of the dataset's task. The stage `convert` turns records
into *samples*. A sample is a record with a single answer.

Records and samples are stored as Parquet (see `tables.py`), so that 896k rows can be read by column and opened by any
tool (DuckDB, polars, `datasets`). They contain the SHA-256 of each image file. A stage that reads samples therefore
depends on the bytes of their images, but not on anything else in the image folder.
"""

from typing import Literal, get_args

import pyarrow as pa

Split = Literal["train", "val", "test"]
SPLITS = ("train", "val", "test")

Role = Literal["task", "retention"]
# Role of a dataset whose test split measures what the model keeps of its base, and the folder of these test splits
RETENTION: Role = "retention"

ChangeType = Literal[
    "viewpoint",
    "illumination",
    "addition",
    "disappearance",
    "removal",
    "substitution",
    "size",
    "color",
    "orientation",
    "pose",
    "ocr",
    "counting",
]
# The twelve change types of OmniDiff (paper, section 3)
CHANGE_TYPES: tuple[ChangeType, ...] = get_args(ChangeType)

NO_CHANGE = "none"  # change type of a distractor, a pair in which only camera, light or noise differ slightly

IMAGE = pa.struct([("uri", pa.string()), ("sha256", pa.binary())])  # an `ImageRef`
TURN = pa.struct([("question", pa.string()), ("answer", pa.string())])  # a `Turn`

RECORD_SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # "<dataset>/<name>", unique in the whole mixture
        ("image_set", pa.string()),  # "<dataset>/<name>", equal to the id if the record has no question of its own
        ("dataset", pa.string()),
        ("split", pa.string()),  # one of SPLITS
        ("scene", pa.string()),  # "<dataset>/<scene>"; all image sets of a scene must be in the same split
        # Of two images, the image before, then the image after. In raw records, a path or digest that cannot be read is
        # null
        ("images", pa.list_(IMAGE)),
        ("history", pa.list_(TURN)),  # the turns before the question, with their true answers; mostly empty
        ("question", pa.string()),  # null: a question of the dataset's task is asked
        ("references", pa.list_(pa.string())),  # all references in the dataset's order, including empty references
        ("change_types", pa.list_(pa.string())),  # CHANGE_TYPES, types of the dataset, [NO_CHANGE], or [] if unknown
        ("kind", pa.string()),  # kind of question, such as "count", or null
        ("source", pa.string()),  # file and row or key of the record, for messages
    ]
)

RAW_SCHEMA = pa.schema(  # schema of the files that ingest writes
    [
        *RECORD_SCHEMA,
        ("own_split", pa.string()),  # split in the dataset's files; if `train_on` contains it, `split` is "train"
        ("fault", pa.string()),  # why the row cannot be read (validate quarantines it), or null
    ]
)

SAMPLE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # "<record id>#<reference number>"; for a repeated pair, followed by "x<copy number>"
        ("record", pa.string()),  # the record's id; the samples of a record are consecutive
        ("image_set", pa.string()),  # the record's image set; its samples are consecutive, too
        ("dataset", pa.string()),
        ("split", pa.string()),
        ("images", pa.list_(IMAGE)),  # of two images, the image before, then the image after
        ("history", pa.list_(TURN)),  # the turns before the question
        ("question", pa.string()),  # the record's, or one of the dataset's task
        ("answer", pa.string()),  # the answer to train on: one reference of the record, or all references joined
    ]
)

# A column after those of SAMPLE_SCHEMA, only in training splits with couples (`convert.sources.<name>.couple`). For a
# sample of a single image that training joins with another one, it is the question about both images. It is null for
# other samples. The couples themselves are not stored, because they differ in each epoch
COUPLE_QUESTION = "couple_question"
COUPLED_SAMPLE_SCHEMA = SAMPLE_SCHEMA.append(pa.field(COUPLE_QUESTION, pa.string()))
