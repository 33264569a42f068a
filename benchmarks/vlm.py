"""Train nine tiny vision-language bases of transformers with the family `auto`, and compare its packing with rows.

    python benchmarks/vlm.py                    all bases -> benchmarks/results/vlm.json
    python benchmarks/vlm.py qwen3_vl gemma3    print the figures of these bases

Each base has random weights. It is trained on eight pairs in both orders with adapters, and then has to describe all
sixteen. A step that packs all references of a pair behind one prompt takes turns with a step in which each reference is
a row with its own copy of the images, for one, three and six references. The differences of loss and gradients between
packed and separate passes are relative, in fp32.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers.models.smolvlm import processing_smolvlm
from transformers.utils import is_num2words_available

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import describe_machine, write_results  # noqa: E402
from m3diff.models import FAMILIES  # noqa: E402
from m3diff.models.cached_prompts import CachedBatch, CachedPrompts, UnitKind, make_unit  # noqa: E402
from m3diff.models.contract import TrainingSequence  # noqa: E402
from m3diff.models.device import Device  # noqa: E402
from m3diff.models.generation import QUESTION, Captioner  # noqa: E402
from m3diff.models.settings import Lora  # noqa: E402
from m3diff.records.sample import Turn  # noqa: E402
from m3diff.stages.train.packing_check import compare_with_separate_passes  # noqa: E402
from tests.auto_cases import adapted_model, auto_settings, load_processor, training_sequence  # noqa: E402
from tests.tiny_vlm import BASES, minichange_pairs, tiny_vlm  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "vlm.json"
CPU = Device(gpu=False, precision="fp32")
STEPS = 70
RATE = 6e-3
WARMUP_STEPS = 10
ADAPTERS = Lora(rank=16, alpha=32)
REFERENCES = (1, 3, 6)
LARGE_BASE = "qwen3_vl"  # its steps are also timed on images of LARGE_SIDE pixels
LARGE_SIDE = 640
ROUNDS = 7
MAX_NEW_TOKENS = 24


def loss_of(model: Any, processor: Any, batch: CachedBatch) -> torch.Tensor:
    """Return the mean loss of a micro-batch."""
    return cross_entropy(CachedPrompts().logits(model, batch, processor, CPU), batch.labels)


def rows_of(sequence: TrainingSequence, processor: Any) -> CachedBatch:
    """Return a micro-batch in which each branch is a row with its own copy of the images."""
    rows = [sequence._replace(branches=[branch]) for branch in sequence.branches]
    unit = make_unit(UnitKind.BRANCHES_WITH_IMAGES, rows, 0, processor)
    return CachedBatch([unit], unit.labels, unit.weights)


def train_on_pairs(base: str, folder: Path, steps: int = STEPS) -> dict[str, Any]:
    """Train a base on eight pairs in both orders, and return how many of the sixteen captions it then gives."""
    processor = load_processor(base, folder)
    model = adapted_model(base, folder, random_adapters=False, lora=ADAPTERS)
    sequences = []
    captions = []
    for pair in minichange_pairs():
        orders = ((pair.images, pair.captions[0]), (pair.images[::-1], pair.inverse_captions[0]))
        for images, caption in orders:
            sequences.append(training_sequence(processor, images, [[Turn(QUESTION, caption)]]))
            captions.append(caption)
    batch = CachedPrompts().batch(sequences, processor, CPU)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / WARMUP_STEPS) * (1 - 0.9 * step / steps)
        loss = loss_of(model, processor, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    captioner = Captioner(model.get_base_model(), processor, FAMILIES["auto"], MAX_NEW_TOKENS)
    prepared = [sequence.prepared for sequence in sequences]
    dialogues = [(Turn(QUESTION),)] * len(prepared)
    answers, _ = captioner.answer(prepared, dialogues)
    single_answers = [captioner.answer([images], dialogues[:1])[0][0] for images in prepared]
    return {
        "first_loss": round(losses[0], 3),
        "last_loss": round(losses[-1], 3),
        "right": sum(answer == caption for answer, caption in zip(answers, captions, strict=True)),
        "captions": len(captions),
        "batch_equals_single": answers == single_answers,
        "tied": bool(model.get_base_model().config.get_text_config().tie_word_embeddings),
    }


def time_steps(base: str, folder: Path, side: int | None = None) -> dict[str, Any]:
    """Return the seconds of packed steps and of steps with separate rows, by number of references, and their ratio.

    Args:
        side: side of the images in pixels. By default, they keep their 96 pixels.
    """
    processor = load_processor(base, folder)
    model = adapted_model(base, folder)
    pair = minichange_pairs()[0]
    if side:
        images = tuple(image.resize((side, side)) for image in pair.images)
        pair = pair._replace(images=images)
        settings = auto_settings(base, processor={"size": {"shortest_edge": side * side, "longest_edge": side * side}})
        processor = FAMILIES["auto"].load_processor(folder, None, settings)
    texts = [*pair.captions, *pair.inverse_captions]
    prompt = processor.encode_prompt((Turn(QUESTION),), processor.prepare(pair.images).marks)
    figures: dict[str, Any] = {"prompt_tokens": len(prompt)}
    for references in REFERENCES:
        dialogues = [[Turn(QUESTION, text)] for text in texts[:references]]
        sequence = training_sequence(processor, pair.images, dialogues)
        batches = {"packed": CachedPrompts().batch([sequence], processor, CPU), "rows": rows_of(sequence, processor)}
        seconds = time_turns(lambda batch: loss_of(model, processor, batch).backward(), batches)
        seconds["ratio"] = round(seconds["rows"] / seconds["packed"], 2)
        figures[str(references)] = seconds
    comparison = compare_with_separate_passes(
        model, [sequence], CachedPrompts(), processor, FAMILIES["auto"], CPU
    ).packing
    figures["loss_difference"] = comparison.loss
    figures["gradient_difference"] = max(comparison.gradients.values())
    return figures


def time_turns(step: Callable[[CachedBatch], object], batches: dict[str, CachedBatch]) -> dict[str, float]:
    """Return the median seconds of a step with each batch. The batches take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for batch in batches.values():
        step(batch)
    for number in range(ROUNDS):
        names = list(batches) if number % 2 else list(reversed(batches))
        for name in names:
            start = time.perf_counter()
            step(batches[name])
            seconds[name].append(time.perf_counter() - start)
    return {name: round(statistics.median(values), 4) for name, values in seconds.items()}


def format_table(results: dict[str, dict[str, Any]]) -> str:
    """Return the results as a table in Markdown."""
    columns = ("base", "right of 16", "batch = single", "prompt tokens", "loss", "gradients")
    header = [*columns, *(f"rows / packed, {count}" for count in REFERENCES)]
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    for base, figures in results.items():
        speed = figures["speed"]
        learned = figures["learned"]
        cells = [base, "", "", str(speed["prompt_tokens"])]
        if learned:
            cells[1:3] = [str(learned["right"]), "yes" if learned["batch_equals_single"] else "no"]
        cells += [f"{speed['loss_difference']:.0e}", f"{speed['gradient_difference']:.0e}"]
        cells += [f"{speed[str(count)]['ratio']:.2f}" for count in REFERENCES]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bases", nargs="*", choices=[[], *BASES], default=[], metavar="BASE", help="default: all bases")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps on the pairs")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.name} for all bases, none for some")
    args = parser.parse_args(arguments)
    bases = args.bases
    torch.set_num_threads(1)
    if not is_num2words_available():  # names the frames of videos
        processing_smolvlm.num2words = str  # type: ignore[attr-defined]
    machine = describe_machine()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for base in bases or BASES:
            folder = tiny_vlm(base, Path(scratch) / base)
            results[base] = {"learned": train_on_pairs(base, folder, args.steps), "speed": time_steps(base, folder)}
            if base == LARGE_BASE:
                name = f"{base}, {LARGE_SIDE} pixels"
                results[name] = {"learned": {}, "speed": time_steps(base, folder, LARGE_SIDE)}
            print(format_table({base: results[base]}).splitlines()[-1], flush=True)
    print(format_table(results))
    out = args.out or (None if bases else RESULTS)
    if out is not None:
        write_results({"machine": machine, "bases": results}, out)


if __name__ == "__main__":
    main()
