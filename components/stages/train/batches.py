"""Read training samples, arrange them into optimizer steps, and prepare micro-batches ahead of the training loop.

A sample is a question about an image set with one answer, and a sequence has one or more samples of the same image set
(see `m3diff.models.contract`). Each worker keeps the columns of its split in memory.

A dataset with `couple` also trains on couples (OneDiff's Coupled Sample Training, arXiv 2407.05645, section 4.2): two
unrelated single images, the question that convert wrote beside them, and both captions as the answer. In each epoch,
every image set of the dataset is in one couple, and the partners are drawn anew. If the number of image sets is odd,
one of them is in no couple. In the next epoch, this is another one.

The order of the sequences depends only on the seed. A resumed run therefore sees the same batches as an uninterrupted
run, and neither the number of workers nor the micro-batch size changes a global batch. Image augmentation depends only
on the seed, the epoch and the sequence. Each reference is used once per epoch. Threads prepare micro-batches ahead, so
that a training step only has to copy them to its device.
"""

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from cachetools import LRUCache, cached

from m3diff.images.open import load_image
from m3diff.models.contract import Branch, PackedBatch, Packing, Prepared, Processor, TrainingSequence
from m3diff.models.device import Device
from m3diff.models.dialogue import encode_dialogue
from m3diff.models.threads import preparing_threads
from m3diff.records.errors import DataError, data_error_if_unreadable
from m3diff.records.progress import prefetch
from m3diff.records.sample import PAIR, ImageRef, Turn
from m3diff.records.schemas import COUPLE_QUESTION
from m3diff.records.tables import part_paths
from m3diff.stages.train.job import DatasetFilter

SCHEMA = pl.Schema(  # columns of a split that training reads (components/records/schemas.py)
    dict.fromkeys(("record", "image_set", "dataset", "question", "answer"), pl.String)
    | {
        "images": pl.List(pl.Struct({"uri": pl.String, "sha256": pl.Binary})),
        "history": pl.List(pl.Struct({"question": pl.String, "answer": pl.String})),
    }
)

ALL_DATASETS = DatasetFilter()

CACHED_BYTES = 1 << 30  # size of the prepared images that a worker keeps in memory
CACHED_PROMPTS = 4096
CACHED_ANSWERS = 100_000
PREFETCHED = 4  # maximum number of micro-batches prepared ahead of the current step
PREFETCHED_BYTES = 1 << 30  # maximum size of the images of these micro-batches, except that one step is always prepared


class Couple(NamedTuple):
    """The row numbers of two samples about single images, which are trained on as one sample about both images."""

    first_row: int
    second_row: int


SampleRows = np.ndarray | Couple  # row numbers of the samples of an image set, or a couple

Weighted = tuple[SampleRows, int]  # a sequence, and its weight: 1, or 0 if it only pads a batch

Visit = tuple[int, int]  # seed and epoch; with a sequence's first row number, they seed its image augmentation

# Extra seeds, so that the augmentation and the couples do not reuse the random numbers of the epoch's order
AUGMENTATION_SEED = 1
COUPLING_SEED = 2

ENDS_OF_SENTENCES = (".", "!", "?", "…", "。", "！", "？")


def count_samples(sequence: SampleRows) -> int:
    """Return the number of samples in a sequence. A couple is one sample."""
    return 1 if isinstance(sequence, Couple) else len(sequence)


def join_captions(first_caption: str, second_caption: str) -> str:
    """Return the answer of a couple: both captions as sentences, such as "a cat. A dog." for "a cat" and "A dog."."""
    sentences = []
    for caption in (first_caption, second_caption):
        sentence = " ".join(caption.split())
        sentences.append(sentence if sentence.endswith(ENDS_OF_SENTENCES) else f"{sentence}.")
    return " ".join(sentences)


class SingleImages(NamedTuple):
    """The image sets of a dataset that are coupled.

    Attributes:
        starts: first row of each image set.
        sizes: number of rows of each image set.
    """

    starts: np.ndarray
    sizes: np.ndarray


class Samples:
    """The samples of a split as columns. Samples of the same image set are adjacent.

    Args:
        table: table with the columns of SCHEMA, and COUPLE_QUESTION if any samples are coupled.

    Attributes:
        starts: first row of each image set.
        singles: the image sets that are coupled, by dataset.
    """

    def __init__(self, table: pl.DataFrame) -> None:
        self.table = table
        image_set = table["image_set"]
        self.starts = (image_set != image_set.shift()).fill_null(True).arg_true().to_numpy()
        self.singles = self._find_singles() if COUPLE_QUESTION in table.columns else {}

    @cached_property
    def has_history(self) -> np.ndarray:
        """Whether a sample has earlier turns, [samples] bool. `turns` does not read the history of other samples."""
        return (self.table["history"].list.len() > 0).to_numpy()

    def _find_singles(self) -> dict[str, SingleImages]:
        sizes = np.diff(self.starts, append=len(self))
        first_rows = self.table[self.starts].select("dataset", is_coupled=pl.col(COUPLE_QUESTION).is_not_null())
        singles = {}
        for name in first_rows.filter("is_coupled")["dataset"].unique().sort():
            is_single = first_rows.select(pl.col("is_coupled") & (pl.col("dataset") == name)).to_series().to_numpy()
            singles[name] = SingleImages(self.starts[is_single], sizes[is_single])
        return singles

    def __len__(self) -> int:
        return len(self.table)

    def value(self, column: str, row: int) -> Any:
        """Return the value of a column of SCHEMA in one row."""
        return self.table[column][int(row)]

    def image_sets(self) -> list[np.ndarray]:
        """Return the row numbers of each image set, in order of appearance."""
        rows = np.arange(len(self), dtype=np.int32)
        return [rows[start:end] for start, end in pairwise([*self.starts, len(self)])]

    def records(self, rows: np.ndarray) -> list[np.ndarray]:
        """Split the rows of an image set by record."""
        names = self.table["record"].gather(rows).to_numpy()
        return np.split(rows, np.flatnonzero(names[1:] != names[:-1]) + 1)

    def has_own_question(self, row: int) -> bool:
        """Return whether the question of a sample is from the dataset, and not from the dataset's task."""
        return self.value("record", row) != self.value("image_set", row)

    def images(self, row: int) -> tuple[ImageRef, ...]:
        """Return the images of a sample. Of two images, the first is the image before."""
        return tuple(ImageRef(**image) for image in self.value("images", row))

    def turns(self, row: int) -> tuple[Turn, ...]:
        """Return the turns of a sample. The last one is its question and answer."""
        history = [Turn(**turn) for turn in self.value("history", row)] if self.has_history[row] else []
        return (*history, Turn(self.value("question", row), self.value("answer", row)))

    def images_of(self, sequence: SampleRows) -> tuple[ImageRef, ...]:
        """Return the images of a sequence. Of a couple, these are the images of both samples, in its order."""
        if isinstance(sequence, Couple):
            return (*self.images(sequence.first_row), *self.images(sequence.second_row))
        return self.images(sequence[0])

    def dialogues_of(self, sequence: SampleRows) -> list[tuple[Turn, ...]]:
        """Return the turns of each sample in a sequence."""
        if not isinstance(sequence, Couple):
            return [self.turns(row) for row in sequence]
        captions = (self.value("answer", row) for row in sequence)
        return [(Turn(self.value(COUPLE_QUESTION, sequence.first_row), join_captions(*captions)),)]

    @property
    def couples_per_epoch(self) -> int:
        """Number of couples in an epoch."""
        return sum(len(singles.starts) // 2 for singles in self.singles.values())


def read_samples(folder: Path, chosen: DatasetFilter = ALL_DATASETS) -> Samples:
    """Read a split's Parquet files in the order of their names and return the samples of the chosen datasets.

    The result is empty if there are no such samples.

    Raises:
        DataError: a file cannot be read.
    """
    tables = [SCHEMA.to_frame()]
    for file in part_paths(folder):
        with data_error_if_unreadable(file):
            couple_columns = [name for name in pl.read_parquet_schema(file) if name == COUPLE_QUESTION]
            columns = [*SCHEMA.names(), *couple_columns]
            tables.append(pl.read_parquet(file, columns=columns).select(columns))
    table = pl.concat(tables, how="diagonal")
    has_named_dataset = pl.col("dataset").is_in(chosen.names)
    return Samples(table.filter(~has_named_dataset if chosen.excludes else has_named_dataset).rechunk())


def find_usual_question(*splits: Samples) -> str | None:
    """Return the question to ask by default: the most frequent question of the first split that has one.

    Only questions without turns before them count, because a follow-up such as "And the star?" says nothing by itself.
    If there are such questions about pairs, only these count, otherwise those about the most frequent number of images.
    If several questions are equally frequent, the first in the order of the split is returned.

    Returns:
        The question, or None if all questions have turns before them, or if there are no samples.
    """
    tables = []
    for samples in splits:
        questions = samples.table.filter(pl.col("history").list.len() == 0)
        tables.append(questions.select("question", images=pl.col("images").list.len()))
    questions_by_images = Counter(pl.concat(tables)["images"])
    if not questions_by_images:
        return None
    images = PAIR if PAIR in questions_by_images else most_common(questions_by_images)
    for table in tables:
        frequencies = Counter(table.filter(images=images)["question"])
        if frequencies:
            return most_common(frequencies)
    return None


def most_common(frequencies: Counter[Any]) -> Any:
    """Return the element with the largest count. Of several, return the one that was counted first."""
    ((element, _),) = frequencies.most_common(1)
    return element


def read_training_samples(mixture: Path, chosen: DatasetFilter = ALL_DATASETS) -> Samples:
    """Return the training samples of the chosen datasets.

    Raises:
        DataError: there are no such samples.
    """
    samples = read_samples(mixture / "train", chosen)
    if not len(samples):
        code = "train.no_sample"
        if chosen.names:
            code = "train.no_sample_of_other_datasets" if chosen.excludes else "train.no_sample_of_datasets"
        raise DataError(code, path=mixture / "train", names=chosen.names)
    return samples


@dataclass(frozen=True, eq=False)
class Schedule:
    """Assigns sequences, and the couples of each epoch, to the optimizer steps of a run.

    Each step has `global_batch` sequences. They are distributed to `ranks` workers, which process them in
    micro-batches.

    Attributes:
        max_captions: maximum number of samples per sequence; None allows all samples of an image set.
        micro_batch: number of sequences per micro-batch.
        ranks: number of workers.
    """

    samples: Samples
    max_captions: int | None
    seed: int
    global_batch: int
    micro_batch: int
    epochs: float
    ranks: int = 1

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps per epoch. The last one may have fewer than `global_batch` sequences."""
        sizes = np.diff(self.samples.starts, append=len(self.samples))
        sequences = np.ceil(sizes / self.max_captions).sum() if self.max_captions else len(sizes)
        return math.ceil((sequences + self.samples.couples_per_epoch) / self.global_batch)

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the run, rounded up."""
        return math.ceil(self.epochs * self.steps_per_epoch)

    @lru_cache(maxsize=2)  # noqa: B019  # the current epoch, and the next one while it is prefetched
    def epoch(self, epoch: int) -> list[SampleRows]:
        """Return the sequences of an epoch, in training order.

        A sequence has up to `max_captions` rows, all of the same image set, or is a couple.
        """
        rng = np.random.default_rng([self.seed, epoch])
        sequences: list[SampleRows] = []
        for rows in self.samples.image_sets():
            rng.shuffle(rows)
            size = self.max_captions or len(rows)
            sequences += [rows[start : start + size] for start in range(0, len(rows), size)]
        sequences += self.couples(epoch)
        return [sequences[number] for number in rng.permutation(len(sequences))]

    def couples(self, epoch: int) -> list[Couple]:
        """Return the couples of an epoch. They depend only on the seed, the epoch and the samples of their dataset.

        An image set with several samples, such as an image with several captions, is coupled by one of them.
        """
        couples = []
        for dataset, singles in self.samples.singles.items():
            rng = np.random.default_rng([self.seed, epoch, zlib.crc32(dataset.encode()), COUPLING_SEED])
            rows = singles.starts + rng.integers(singles.sizes)
            if len(rows) % 2:
                rows = np.delete(rows, (self.seed + epoch) % len(rows))  # another one in each epoch
            for pair_of_rows in rng.permutation(rows).reshape(-1, 2).tolist():
                couples.append(Couple(*pair_of_rows))
        return couples

    def global_sequences(self, step: int) -> list[SampleRows]:
        """Return the sequences of a step for all workers. An epoch's last step may have fewer than `global_batch`."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return self.epoch(epoch)[batch * self.global_batch : (batch + 1) * self.global_batch]

    def captions(self, steps: int) -> int:
        """Return the number of samples that the first `steps` steps train on, over all workers."""
        epochs, further_steps = divmod(steps, self.steps_per_epoch)
        further_sequences = self.epoch(epochs)[: further_steps * self.global_batch] if further_steps else []
        samples_per_epoch = len(self.samples) + self.samples.couples_per_epoch
        return epochs * samples_per_epoch + sum(map(count_samples, further_sequences))

    def micro_batches(self, step: int, rank: int) -> list[list[Weighted]]:
        """Return one worker's micro-batches of a step. Sequences of weight 0 pad the last batch of an epoch."""
        chosen = self.global_sequences(step)
        weighted: list[Weighted] = [(sequence, 1) for sequence in chosen]
        weighted += [(chosen[0], 0)] * (self.global_batch - len(chosen))
        mine = weighted[rank :: self.ranks]
        return [mine[at : at + self.micro_batch] for at in range(0, len(mine), self.micro_batch)]


class Loader:
    """Prepares micro-batches in threads, because Pillow and the tokenizer release the global interpreter lock.

    Args:
        packing: packing of the model's family.
        device: device for which the micro-batches are prepared.
        augment: function that randomly changes the prepared images of an image set; None disables augmentation.
    """

    def __init__(
        self,
        samples: Samples,
        processor: Processor,
        packing: Packing,
        threads: int,
        device: Device,
        augment: Callable[[Prepared, np.random.Generator], Prepared] | None = None,
    ) -> None:
        self.samples = samples
        self.processor = processor
        self.packing = packing
        self.device = device
        self.augment = augment
        self.pool = preparing_threads(max(1, threads))
        # image sets, and not images, because a processor may prepare the images of a set depending on each other
        cache: LRUCache[Any, Prepared] = LRUCache(CACHED_BYTES, getsizeof=lambda prepared: prepared.nbytes)
        self.prepared = cached(cache, lock=Lock())(self._prepare)
        self.encode_prompt = lru_cache(maxsize=CACHED_PROMPTS)(processor.encode_prompt)
        self.encode_answer = lru_cache(maxsize=CACHED_ANSWERS)(processor.encode_answer)

    def _prepare(self, images: tuple[ImageRef, ...]) -> Prepared:
        return self.processor.prepare(load_image(*image) for image in images)

    def encode(self, sequence: SampleRows, marks: tuple[str, ...]) -> list[Branch]:
        """Return the branches of the samples in a sequence, whose images have these marks."""
        branches: list[Branch] = []
        for turns in self.samples.dialogues_of(sequence):
            branches += encode_dialogue(self.encode_prompt, self.encode_answer, turns, marks)
        return branches

    def prepare_images(self, sequence: SampleRows, visit: Visit | None) -> Prepared:
        """Return the prepared images of a sequence. They are augmented only if `visit` is given."""
        prepared = self.prepared(self.samples.images_of(sequence))
        if visit is None or self.augment is None:
            return prepared
        rows = sequence if isinstance(sequence, Couple) else (int(sequence[0]),)
        return self.augment(prepared, np.random.default_rng([*visit, *rows, AUGMENTATION_SEED]))

    def read(self, micro_batch: list[Weighted], visit: Visit | None = None) -> list[TrainingSequence]:
        """Decode and tokenise the sequences of a micro-batch. They take less memory until `build` packs them."""
        sequences = []
        for sequence, weight in micro_batch:
            prepared = self.prepare_images(sequence, visit)
            sequences.append(TrainingSequence(prepared, self.encode(sequence, prepared.marks), weight))
        return sequences

    def build(self, micro_batch: list[Weighted], visit: Visit | None = None) -> PackedBatch:
        """Return a micro-batch that is ready for a training step: decoded, tokenised and packed for the device."""
        return self.packing.batch(self.read(micro_batch, visit), self.processor, self.device)

    def stream(self, schedule: Schedule, rank: int, first_step: int) -> Iterator[list[PackedBatch]]:
        """Return an iterator over this worker's micro-batches: one list per step, starting with `first_step`."""

        def submit(step: int) -> list[Future[PackedBatch]]:
            visit = (schedule.seed, step // schedule.steps_per_epoch)
            micro_batches = schedule.micro_batches(step, rank)
            return [self.pool.submit(self.build, sequences, visit) for sequences in micro_batches]

        bytes_per_batch = schedule.micro_batch * self.prepared(self.samples.images(0)).nbytes
        batches_ahead = min(PREFETCHED, PREFETCHED_BYTES // max(1, bytes_per_batch))
        steps = max(1, batches_ahead * schedule.micro_batch * schedule.ranks // schedule.global_batch)
        return prefetch(submit, range(first_step, schedule.steps), steps)
