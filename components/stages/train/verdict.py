"""Check at the end of a training run whether the model has learned anything, long before the test split is scored.

If the model has learned something, its validation captions share words with their references. If nothing was captioned,
the loss is compared with the entropy of the tokens, which is the loss of a model that only knows how often each token
occurs.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from tokenizers import Tokenizer

from m3diff.records.errors import Fault
from m3diff.records.tables import part_paths
from m3diff.stages.train.params import ENOUGH_STEPS, NO_CIDER

# Captions of fewer pairs than this do not show whether the model has learned anything
MIN_CAPTIONED_PAIRS = 5

# Maximum number of distinct references whose tokens are counted, spread evenly over all of them
COUNTED_REFERENCES = 20_000


@dataclass(frozen=True)
class TrainingEnd:
    """The figures at the end of a training run.

    Attributes:
        loss: loss per supervised token in nats, on the validation pairs. If there are none, the loss of the last
            training step.
        val_cider: CIDEr of the validation captions, or None if no validation pair was captioned.
        model: name of the model's settings in the section `models`.
    """

    steps: int
    epochs: float
    loss: float
    val_cider: float | None
    model: str


def judge_learning(end: TrainingEnd, mixture: Path, tokenizer: Path, caption_val_pairs: int) -> Fault | None:
    """Return a warning with remedies if the model has not learned anything yet, else None.

    Args:
        mixture: folder of the training and validation samples.
        tokenizer: tokenizer.json of the base. If the file does not exist, the loss cannot be judged.
        caption_val_pairs: maximum number of captioned pairs per dataset.
    """
    if end.val_cider is not None and can_judge_captions(mixture / "val", caption_val_pairs):
        if end.val_cider >= NO_CIDER:
            return None
        evidence = Fault("train.captions_share_nothing", value=end.val_cider)
    else:
        guessing_loss = entropy_of_tokens(mixture / "train", tokenizer)
        if guessing_loss is None or end.loss < guessing_loss:
            return None
        evidence = Fault("train.loss_of_frequencies", value=guessing_loss)
    return Fault(
        "train.nothing_learned", steps=end.steps, loss=end.loss, evidence=evidence, remedies=list(_remedies(end))
    )


def _remedies(end: TrainingEnd) -> Iterator[Fault]:
    if end.steps < ENOUGH_STEPS:
        epochs = math.ceil(end.epochs * ENOUGH_STEPS / end.steps)
        yield Fault("train.try_more_steps", epochs=epochs, steps=ENOUGH_STEPS)
    yield Fault("train.try_another_base")
    yield Fault("train.try_higher_rates", field=f"models.{end.model}.rates")


def can_judge_captions(folder: Path, caption_val_pairs: int) -> bool:
    """Return whether the CIDEr of the validation captions shows what the model has learned.

    Returns False if too few pairs were captioned. Also returns False if all references are the same, because CIDEr is
    then 0 even for correct captions.
    """
    samples = read_split(folder, ["dataset", "record", "answer"])
    if samples is None or samples["answer"].n_unique() < 2:
        return False
    pairs_per_dataset = samples.group_by("dataset").agg(pl.col("record").n_unique())["record"]
    captioned_pairs = sum(min(pairs, caption_val_pairs) for pairs in pairs_per_dataset)
    return captioned_pairs >= MIN_CAPTIONED_PAIRS


def entropy_of_tokens(folder: Path, tokenizer: Path) -> float | None:
    """Return the entropy in nats of the tokens in a split's references, including end tokens.

    Returns None if there are no references or if the tokenizer file does not exist.
    """
    samples = read_split(folder, ["answer"])
    if samples is None or not tokenizer.is_file():
        return None
    encoder = Tokenizer.from_file(str(tokenizer))
    texts = samples["answer"].value_counts().sort("answer")
    sampled_texts = texts.gather_every(math.ceil(texts.height / COUNTED_REFERENCES))
    token_counts: Counter[int] = Counter()
    end_tokens = 0
    for text, occurrences in sampled_texts.iter_rows():
        end_tokens += occurrences
        for token in encoder.encode(text, add_special_tokens=False).ids:
            token_counts[token] += occurrences
    total = token_counts.total() + end_tokens
    shares = [count / total for count in (*token_counts.values(), end_tokens)]
    return -sum(share * math.log(share) for share in shares)


def read_split(folder: Path, columns: list[str]) -> pl.DataFrame | None:
    """Read columns of a split of the mixture. Return None if the split is empty."""
    shards = part_paths(folder)
    if not shards:
        return None
    samples = pl.concat([pl.read_parquet(shard, columns=columns) for shard in shards])
    return None if samples.is_empty() else samples
