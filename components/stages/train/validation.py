"""Validation at a checkpoint: the loss of each dataset, and captions with their CIDEr. It touches no random state.

Pairs are drawn from the whole validation split of each dataset, by the seed, so that a dataset's loss does not hang on
which dataset or scene comes first. Work is dealt to the workers.
"""

import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from m3diff.images.open import load_image
from m3diff.models import FAMILIES
from m3diff.models.device import Device
from m3diff.models.generation import Captioner
from m3diff.models.processing import PairProcessor
from m3diff.models.tuning import unwrapped
from m3diff.stages.train.batches import Loader, Samples, Weighted, complete
from m3diff.stages.train.engine import sum_over_ranks, token_loss
from m3diff.stages.train.job import Job, Runtime

MAX_NEW_TOKENS, CAPTION_BATCH = 64, 32


def sample_pairs(samples: Samples, count: int, seed: int) -> dict[str, list[np.ndarray]]:
    """Return `count` pairs of each dataset (all where it has fewer), as row numbers in the split's order, by dataset.

    A smaller count is a part of a larger one, and a dataset's choice does not depend on the other datasets.
    """
    by_dataset: dict[str, list[np.ndarray]] = {}
    for rows in samples.pairs():
        by_dataset.setdefault(samples.value("dataset", rows[0]), []).append(rows)
    chosen = {}
    for dataset, pairs in sorted(by_dataset.items()):
        order = np.random.default_rng([seed, zlib.crc32(dataset.encode())]).permutation(len(pairs))
        chosen[dataset] = [pairs[number] for number in sorted(order[:count])]
    return chosen


class Validation:
    """The validated pairs, chosen once: those of `datasets` with a loss, and those that are captioned."""

    def __init__(self, job: Job, samples: Samples, runtime: Runtime, processor: PairProcessor, device: Device) -> None:
        compute, seed = job.compute, job.cfg.seed
        self.samples, self.processor, self.device = samples, processor, device
        self.family, self.rank, self.ranks = FAMILIES[job.model.family], runtime.rank, runtime.ranks
        self.alike = compute.zero_stage == 3  # a forward brings weights together: every worker takes as many
        self.loader = Loader(samples, processor, threads=compute.cpus_per_worker, device=device)
        chosen = sample_pairs(samples, compute.val_pairs, seed)
        self.datasets = [dataset for dataset, pairs in chosen.items() if pairs]
        dealt = self._dealt([chosen[dataset] for dataset in self.datasets], compute.micro_batch)
        self.batches = [(number, self.loader.read(batch)) for number, batch in dealt]
        self.captioned = [pairs for pairs in sample_pairs(samples, compute.caption_val_pairs, seed).values() if pairs]

    def _dealt(self, datasets: list[list[np.ndarray]], size: int) -> list[tuple[int, list[Weighted]]]:
        """Return this worker's (number of the dataset, sequences); with weight 0 where others have a batch more."""
        batches: list[tuple[int, list[Weighted]]] = []
        for number, pairs in enumerate(datasets):
            batches += [(number, [(rows, 1) for rows in pairs[at : at + size]]) for at in range(0, len(pairs), size)]
        while len(batches) % self.ranks:
            number, first = batches[0]
            batches.append((number, [(rows, 0) for rows, _ in first]))
        return batches[self.rank :: self.ranks]

    @torch.no_grad()
    def losses(self, engine: Any) -> dict[str, float]:
        """Return val_loss, the mean per supervised token over all datasets, and val_loss_<dataset>; nothing without
        pairs."""
        sums = torch.zeros(len(self.datasets), 2, dtype=torch.float64)
        engine.eval()
        for number, batch in self.batches:
            whole = complete(batch, self.device, self.processor.pad_id)
            loss = token_loss(engine, whole, self.processor, self.device)
            sums[number] += torch.tensor([float(loss), batch.supervised_tokens], dtype=torch.float64)
        engine.train()
        if not self.datasets:
            return {}
        total, tokens = sum_over_ranks(sums, self.ranks).T.tolist()
        each = {f"val_loss_{name}": total[n] / tokens[n] for n, name in enumerate(self.datasets)}
        return {"val_loss": sum(total) / sum(tokens), **each}

    def cider(self, engine: Any) -> dict[str, float]:
        """Return val_cider, the mean over the datasets of `cider` of greedy captions; nothing without pairs."""
        if not self.captioned:
            return {}
        captions = self._captions(engine, [int(rows[0]) for pairs in self.captioned for rows in pairs])
        scores = []
        for pairs in self.captioned:
            references = [[self.samples.value("reference", row) for row in rows] for rows in pairs]
            scores.append(cider(references, [captions[int(rows[0])] for rows in pairs]))
        return {"val_cider": float(np.mean(scores))}

    def _captions(self, engine: Any, pairs: list[int]) -> dict[int, str]:
        """Return captions by row number. A batch holds one question: no padding, so no pair changes another's."""
        mine = pairs if self.alike else pairs[self.rank :: self.ranks]
        by_question: dict[str, list[int]] = {}
        for row in mine:
            by_question.setdefault(self.samples.value("question", row), []).append(row)
        engine.eval()
        captioner = Captioner(unwrapped(engine.module), self.processor, self.family, MAX_NEW_TOKENS)
        captions: dict[int, str] = {}
        for question, rows in by_question.items():
            for at in range(0, len(rows), CAPTION_BATCH):
                batch = rows[at : at + CAPTION_BATCH]
                images = [self.samples.images(row) for row in batch]
                opened = [(load_image(*before), load_image(*after)) for before, after in images]
                captions |= zip(batch, captioner.caption(opened, question), strict=True)
        engine.train()
        if self.alike or self.ranks == 1:
            return captions
        parts: list[Any] = [None] * self.ranks
        dist.all_gather_object(parts, captions)
        return {row: caption for part in parts for row, caption in part.items()}


def cider(references: Sequence[Sequence[str]], predictions: Sequence[str]) -> float:
    """Return CIDEr-D of one corpus on lower-cased word tokens, without Java.

    It is not the reported CIDEr: that uses the PTB tokenizer, all references of a pair and the test split. It serves to
    compare checkpoints of one run.
    """
    from pycocoevalcap.cider.cider import Cider

    def words(text: str) -> str:
        return " ".join(re.findall(r"\w+", text.lower()))

    gold = {number: [words(text) for text in texts] for number, texts in enumerate(references)}
    found = {number: [words(text)] for number, text in enumerate(predictions)}
    return float(Cider().compute_score(gold, found)[0])
