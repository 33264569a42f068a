"""Compute the loss of each dataset and the scores of generated answers on validation samples, at a checkpoint.

The validation pairs are sampled, based on the seed, from the whole validation split of each dataset, so the loss does
not depend on which dataset or scene comes first. Nothing else is random. The pairs are distributed among the workers.
"""

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from m3diff.models import FAMILIES
from m3diff.models.contract import Processor
from m3diff.models.device import Device
from m3diff.models.generation import Captioner
from m3diff.models.sample_batches import split_by_shape
from m3diff.models.tuning import unwrap_model
from m3diff.scoring.characters import space_out_characters
from m3diff.scoring.metrics.answers import is_exact_match
from m3diff.stages.train import batches, engine
from m3diff.stages.train.job import Job, WorkerContext

MAX_NEW_TOKENS = 64
CAPTION_BATCH = 32


def sample_pairs(samples: batches.Samples, count: int, seed: int) -> dict[str, list[np.ndarray]]:
    """Sample up to `count` pairs of each dataset. Return the row numbers of each pair, in the order of the split.

    The pairs selected with a smaller count are a subset of those selected with a larger count. A dataset's selection
    does not depend on the other datasets.
    """
    if not count:
        return {}
    pairs_by_dataset: dict[str, list[np.ndarray]] = {}
    for rows in samples.image_sets():
        dataset = samples.value("dataset", rows[0])
        pairs_by_dataset.setdefault(dataset, []).append(rows)
    sampled_pairs = {}
    for dataset, pairs in sorted(pairs_by_dataset.items()):
        rng = np.random.default_rng([seed, zlib.crc32(dataset.encode())])
        sampled_numbers = rng.permutation(len(pairs))[:count]
        sampled_pairs[dataset] = [pairs[number] for number in sorted(sampled_numbers)]
    return sampled_pairs


class Validation:
    """Computes losses and captions of validation pairs, which are selected once when the object is created.

    The argument `model` of the methods is DeepSpeed's engine around the model.

    Attributes:
        datasets: names of the datasets for which a loss is computed.
    """

    def __init__(
        self, job: Job, samples: batches.Samples, worker: WorkerContext, processor: Processor, device: Device
    ) -> None:
        compute = job.compute
        seed = job.cfg.seed
        self.samples = samples
        self.processor = processor
        self.device = device
        self.family = FAMILIES[job.model.family]
        self.rank = worker.rank
        self.ranks = worker.ranks
        # with ZeRO 3, a forward pass gathers weights from all workers, so all workers must run the same number of
        # forward passes
        self.needs_equal_forwards = compute.zero_stage == 3
        self.packing = self.family.packing()
        self.loader = batches.Loader(samples, processor, self.packing, compute.cpus_per_worker, device)

        loss_pairs = sample_pairs(samples, compute.val_pairs, seed)
        self.datasets = list(loss_pairs)
        own_batches = self._deal_batches(list(loss_pairs.values()), compute.micro_batch)
        self.batches = [(dataset_number, self.loader.read(batch)) for dataset_number, batch in own_batches]
        # the records of each dataset whose answers are scored, as the row numbers of each record
        self.captioned_records: list[list[np.ndarray]] = []
        self.questioned_records: list[list[np.ndarray]] = []  # of datasets with questions of their own
        for image_sets in sample_pairs(samples, compute.caption_val_pairs, seed).values():
            records = [record for rows in image_sets for record in samples.records(rows)]
            if any(samples.has_own_question(record[0]) for record in records):
                self.questioned_records.append(records)
            else:
                self.captioned_records.append(records)

    def _deal_batches(
        self, datasets: list[list[np.ndarray]], batch_size: int
    ) -> list[tuple[int, list[batches.Weighted]]]:
        """Split the pairs into batches and return this worker's batches, each with the index of its dataset.

        All workers get the same number of batches. Where a batch is missing, a batch of weight 0 is added.
        """
        all_batches: list[tuple[int, list[batches.Weighted]]] = []
        for dataset_number, pairs in enumerate(datasets):
            for start in range(0, len(pairs), batch_size):
                all_batches.append((dataset_number, [(rows, 1) for rows in pairs[start : start + batch_size]]))
        while len(all_batches) % self.ranks:
            dataset_number, sequences = all_batches[0]
            all_batches.append((dataset_number, [(rows, 0) for rows, _ in sequences]))
        return all_batches[self.rank :: self.ranks]

    @torch.no_grad()
    def losses(self, model: Any) -> dict[str, float]:
        """Return the mean loss per supervised token: `val_loss` over all datasets, and `val_loss_<dataset>` for each.

        Returns an empty dictionary if there are no pairs to compute a loss for.
        """
        if not self.datasets:
            return {}
        sums = torch.zeros(len(self.datasets), 2, dtype=torch.float64)  # [datasets, 2]: loss and tokens
        model.eval()
        for dataset_number, sequences in self.batches:
            batch = self.packing.batch(sequences, self.processor, self.device)
            loss = engine.token_loss(model, batch, self.packing, self.processor, self.device)
            sums[dataset_number] += torch.tensor([float(loss), float(batch.weights.sum())], dtype=torch.float64)
        model.train()
        loss_sums, token_counts = engine.sum_over_ranks(sums, self.ranks).T.tolist()
        losses = {"val_loss": sum(loss_sums) / sum(token_counts)}
        for name, loss_sum, tokens in zip(self.datasets, loss_sums, token_counts, strict=True):
            losses[f"val_loss_{name}"] = loss_sum / tokens
        return losses

    @property
    def answer_scores(self) -> list[str]:
        """Names of the scores that `score_answers` returns if `compute.caption_val_pairs` is above 0."""
        return ["val_match"] if self.questioned_records else []

    def score_answers(self, model: Any) -> dict[str, float]:
        """Answer validation records and return the scores of the answers.

        `val_cider` is the CIDEr of greedy captions, averaged over the datasets without questions of their own.
        `val_match` is the share of greedy answers that match a reference exactly, averaged over the other datasets. In
        a dialogue, the true answers to the earlier questions are given. A score is missing if no dataset has it.
        """
        scores = {}
        if self.captioned_records:
            scores["val_cider"] = self._mean_score(model, self.captioned_records, cider)
        if self.questioned_records:
            scores["val_match"] = self._mean_score(model, self.questioned_records, match_share)
        return scores

    def _mean_score(
        self,
        model: Any,
        records_by_dataset: Sequence[Sequence[np.ndarray]],
        score: Callable[[Sequence[Sequence[str]], Sequence[str]], float],
    ) -> float:
        """Return the mean over the datasets of a score of greedy answers."""
        first_rows = [int(rows[0]) for records in records_by_dataset for rows in records]
        answers = self._answers(model, first_rows)
        scores = []
        for records in records_by_dataset:
            references = [[self.samples.value("answer", row) for row in rows] for rows in records]
            scores.append(score(references, [answers[int(rows[0])] for rows in records]))
        return float(np.mean(scores))

    def _answers(self, model: Any, first_rows: list[int]) -> dict[int, str]:
        """Answer the records that start at these rows and return the answers by row number.

        All prompts of a batch have the same length, so none needs padding and the records do not affect each other's
        answers. `Captioner.answer` splits a batch in which they differ because the number of visual tokens depends on
        the images.
        """
        own_rows = first_rows if self.needs_equal_forwards else first_rows[self.rank :: self.ranks]
        model.eval()
        captioner = Captioner(unwrap_model(model.module), self.processor, self.family, MAX_NEW_TOKENS)
        shapes: list[tuple[int, int]] = []  # number of images and length of the prompt
        for row in own_rows:
            images = len(self.samples.images(row))
            prompt = captioner.encode_prompt(self.samples.turns(row), self.processor.marks(images))
            shapes.append((images, len(prompt)))
        answers: dict[int, str] = {}
        for positions in split_by_shape(shapes, CAPTION_BATCH):
            rows = [own_rows[position] for position in positions]
            prepared = (self.loader.prepared(self.samples.images(row)) for row in rows)
            texts = captioner.answer_in_parts(prepared, [self.samples.turns(row) for row in rows])
            answers |= zip(rows, texts, strict=True)
        model.train()
        if self.needs_equal_forwards or self.ranks == 1:
            return answers
        answers_by_rank: list[Any] = [None] * self.ranks
        dist.all_gather_object(answers_by_rank, answers)
        all_answers: dict[int, str] = {}
        for rank_answers in answers_by_rank:
            all_answers |= rank_answers
        return all_answers


def match_share(references: Sequence[Sequence[str]], predictions: Sequence[str]) -> float:
    """Return the share of predictions that match a reference exactly; see `is_exact_match`."""
    matches = [is_exact_match(prediction, texts) for texts, prediction in zip(references, predictions, strict=True)]
    return float(np.mean(matches))


def cider(references: Sequence[Sequence[str]], predictions: Sequence[str]) -> float:
    """Return the CIDEr-D of captions, for comparing the checkpoints of one run.

    It is computed on lowercase words, without Java. It differs from the CIDEr in reports, which uses the PTB tokenizer,
    all references of a pair and the test split.

    Args:
        references: references of each pair.
        predictions: one caption per pair.
    """
    from pycocoevalcap.cider.cider import Cider

    def tokenize(text: str) -> str:
        # in a script without spaces between words, a whole caption would be a single token
        return " ".join(re.findall(r"\w+", space_out_characters(text.lower())))

    references_by_pair = {}
    predictions_by_pair = {}
    for number, (texts, prediction) in enumerate(zip(references, predictions, strict=True)):
        references_by_pair[number] = [tokenize(text) for text in texts]
        predictions_by_pair[number] = [tokenize(prediction)]
    score, _ = Cider().compute_score(references_by_pair, predictions_by_pair)
    return float(score)
