"""Compare the speed of `m3diff score` with stock pycocoevalcap: `make bench-score` -> benchmarks/results/score.json.

    python benchmarks/score.py                       this checkout and pycocoevalcap
    python benchmarks/score.py --against FOLDER      also another checkout with its own .venv (`make install`)

A side is one of the compared programs. Every side scores the same files (8,000 images with 5 references each) in a
fresh process. The time includes starting the interpreter and Java, and the imports. The side `stock` calls
pycocoevalcap as its users do, one scorer after another: tokenizer, BLEU, METEOR, ROUGE-L and CIDEr. `m3diff score`
computes the same scores and their 95 % intervals, without SPICE. After one run that is not timed, the sides take turns,
and the order changes from turn to turn. The results are medians.

On machines that have COCO's validation captions, the captions are written by people. After the first 1,000 images, each
reference is joined from halves of two captions. A prediction is joined from half a caption of the same image and half a
caption of a different image. On other machines, the captions follow templates like those of CLEVR-Change, with similar
words, lengths and repetitions. For half of the images, the references say that nothing changed.

All corpus and image scores are compared with the stock scores. BLEU and ROUGE-L must be bit-for-bit equal. METEOR and
CIDEr must agree to a relative tolerance of 1e-12, because pycocoevalcap adds numbers in a different order. The scores
of two checkouts must be bit-for-bit equal."""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.data import ratio_of_turns  # noqa: E402
from benchmarks.machine import describe_machine, write_results  # noqa: E402
from m3diff.runtime import prepare  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "score.json"
COCO = ROOT.parent / "shared" / "real" / "coco_caption" / "en_captions_val2014.json"
IMAGES = 8_000
REFERENCES = 5
TURNS = 6
LIMIT_S = 600  # time limit for a Java program
TARGET_RATIO = 3.0  # minimum ratio of pycocoevalcap's time to this checkout's time
EXACT = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L")  # scores that must be bit-for-bit equal
TOLERANCE = 1e-12  # relative tolerance for scores that are not in EXACT
IMAGE_SCORES = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr")  # scores that are also compared for each image

SIZES = ("small", "tiny", "large", "big")
COLORS = ("gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow")
MATERIALS = ("rubber", "matte", "metal", "metallic", "shiny")
SHAPES = ("cube", "block", "sphere", "ball", "cylinder")
RELATIONS = ("on the left side of", "to the right of", "in front of", "behind")
CHANGES = (
    ("is no longer there", "has disappeared", "is missing", "was removed"),
    ("has been added", "has appeared", "is newly placed", "was added"),
    ("is in a different location", "has been moved", "changed its location", "has moved"),
    ("turned {}", "became {}", "changed to {}", "is now {}"),
)
NO_CHANGE = (
    "there is no change",
    "nothing has changed",
    "the two scenes seem identical",
    "the scene is the same as before",
    "the scene remains the same",
    "nothing was modified",
    "no change was made",
)


@dataclass(frozen=True)
class Captions:
    """Predictions and references by image name, and the source of the captions."""

    source: str
    predictions: dict[str, str]
    references: dict[str, list[str]]


@dataclass(frozen=True)
class Scores:
    """Corpus scores, and the scores of each image in the order of the captions."""

    corpus: dict[str, float]
    images: dict[str, list[float]]


@dataclass(frozen=True)
class Scene:
    """A random scene with two objects, their spatial relation, a change and a colour."""

    first_object: tuple[str, ...]
    second_object: tuple[str, ...]
    relation: str
    change: tuple[str, ...]
    color: str


def read_captions(annotations: Path, images: int) -> Captions:
    """Return captions of COCO images that were written by people.

    The file has 1,000 images. For more images, several rounds go through the file. The first round uses the captions as
    references. Round r after it joins the first half of each caption with the second half of the r-th following caption
    of the same image. A prediction is joined from half a caption of the same image and half a caption of a different
    image.
    """
    captions: dict[int, list[str]] = {}
    for row in json.loads(annotations.read_text("utf-8"))["annotations"]:
        captions.setdefault(row["image_id"], []).append(row["caption"])
    caption_sets = [captions[image] for image in sorted(captions) if len(captions[image]) >= REFERENCES]
    predictions = {}
    references = {}
    for number in range(images):
        round_number, set_number = divmod(number, len(caption_sets))
        texts = caption_sets[set_number]
        other_texts = caption_sets[(set_number + 1 + round_number) % len(caption_sets)]
        name = f"{number:06}"
        references[name] = []
        for index in range(REFERENCES):
            partner = texts[(index + round_number) % len(texts)]
            references[name].append(join_halves(texts[index], partner))
        predictions[name] = join_halves(texts[round_number % len(texts)], other_texts[0])
    return Captions("people's, of COCO", predictions, references)


def join_halves(head_text: str, tail_text: str) -> str:
    """Return the first half of one text followed by the second half of another. Equal texts are returned unchanged."""
    head = head_text.split()
    tail = tail_text.split()
    return " ".join(head[: len(head) // 2] + tail[len(tail) // 2 :])


def draw_captions(images: int, seed: int = 0) -> Captions:
    """Return captions of random scenes. Some predictions describe a different scene than the references."""
    rng = random.Random(seed)
    predictions = {}
    references = {}
    for number in range(images):
        scene = None if number % 2 else make_scene(rng)
        predicted_scene = scene if rng.random() < 0.7 else make_scene(rng)
        name = f"{number:06}.png"
        predictions[name] = describe(predicted_scene, rng)
        references[name] = [describe(scene, rng) for _ in range(REFERENCES)]
    return Captions("made", predictions, references)


def make_scene(rng: random.Random) -> Scene:
    """Return a random scene."""

    def make_object() -> tuple[str, ...]:
        return tuple(rng.choice(words) for words in (SIZES, COLORS, MATERIALS, SHAPES))

    return Scene(
        first_object=make_object(),
        second_object=make_object(),
        relation=rng.choice(RELATIONS),
        change=rng.choice(CHANGES),
        color=rng.choice(COLORS),
    )


def describe(scene: Scene | None, rng: random.Random) -> str:
    """Return a caption of the scene's change, or a caption without a change if `scene` is None.

    The caption uses a random selection of the objects' words.
    """
    if scene is None:
        return rng.choice(NO_CHANGE)

    def name_object(words: tuple[str, ...]) -> str:
        return " ".join(word for word in words if rng.random() < 0.7) or "thing"

    first_object = name_object(scene.first_object)
    second_object = name_object(scene.second_object)
    relation = f" that is {scene.relation} the {second_object}" if rng.random() < 0.6 else ""
    return f"The {first_object}{relation} {rng.choice(scene.change).format(scene.color)}."


def write_files(captions: Captions, folder: Path) -> tuple[Path, Path]:
    """Write predictions and references in the format of `m3diff score` and return the two paths."""
    predictions = folder / "predictions.json"
    references = folder / "references.json"
    annotations = [{"image_id": name, "caption": text} for name, texts in captions.references.items() for text in texts]
    coco = {"images": [{"id": name} for name in captions.references], "annotations": annotations}
    predictions.write_text(json.dumps(captions.predictions), "utf-8")
    references.write_text(json.dumps(coco), "utf-8")
    return predictions, references


def stock_scores(captions: Captions) -> Scores:
    """Return the scores computed by pycocoevalcap, one scorer after another."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.meteor.meteor import Meteor
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    tokenizer = PTBTokenizer()
    references = tokenizer.tokenize(
        {name: [{"caption": text} for text in texts] for name, texts in captions.references.items()}
    )
    predictions = tokenizer.tokenize({name: [{"caption": text}] for name, text in captions.predictions.items()})
    bleu, image_bleu = Bleu(4).compute_score(references, predictions)
    corpus = {f"BLEU-{order + 1}": float(bleu[order]) for order in range(4)}
    images = {"BLEU-4": [float(value) for value in image_bleu[3]]}
    for name, scorer in {"METEOR": Meteor(), "ROUGE-L": Rouge(), "CIDEr": Cider()}.items():
        score, image_scores = scorer.compute_score(references, predictions)
        corpus[name] = float(score)
        images[name] = [float(value) for value in image_scores]
    return Scores(corpus, images)


def own_scores(captions: Captions) -> Scores:
    """Return the scores computed by this checkout."""
    from m3diff.datasets.spec import Protocol
    from m3diff.scoring.metrics import choose_metrics
    from m3diff.scoring.pairs import ALL_PAIRS, EvalPair
    from m3diff.scoring.protocols import ProtocolPairs
    from m3diff.scoring.run import compute_metrics

    pairs = [
        EvalPair(
            id=name,
            dataset="captions",
            images=(),
            references=captions.references[name],
            change_types=[],
            prediction=prediction,
        )
        for name, prediction in captions.predictions.items()
    ]
    metrics = choose_metrics(["CIDEr", "METEOR", "ROUGE-L", "BLEU"])
    protocol = ProtocolPairs("captions", Protocol("test", None), pairs)
    scores = compute_metrics(metrics, [protocol], {}, None, LIMIT_S)[protocol.name]
    assert set(scores.absent) == {"CIDEr_shuffled"}, scores.absent
    corpus: dict[str, Any] = {
        name: value for name, value in scores.groups[ALL_PAIRS].items() if name != "CIDEr_shuffled"
    }
    images: dict[str, Any] = {name: [scores.pairs[pair.id][name] for pair in pairs] for name in IMAGE_SCORES}
    return Scores(corpus, images)


def largest_differences(scores: Scores, stock: Scores) -> dict[str, float]:
    """Return the largest relative difference between a score and the stock score, by name of the score.

    The corpus score and the scores of all images are compared.
    """
    largest = {}
    for name, stock_score in stock.corpus.items():
        stock_values = [stock_score, *stock.images.get(name, [])]
        values = [scores.corpus[name], *scores.images.get(name, [])]
        pairs = zip(values, stock_values, strict=True)
        largest[name] = max(abs(value - stock_value) / max(abs(stock_value), 1e-12) for value, stock_value in pairs)
    return largest


def are_equal(differences: dict[str, float]) -> bool:
    """Return whether the largest relative difference of every score is within its tolerance."""
    return all(value <= (0.0 if name in EXACT else TOLERANCE) for name, value in differences.items())


@dataclass
class Side:
    """A compared command, its wall-clock seconds and CPU seconds in each turn, and the scores that it prints."""

    name: str
    command: list[str]
    folder: Path
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)

    def run(self) -> tuple[float, float]:
        """Run the command once in a fresh process.

        Returns:
            The wall-clock seconds, and the CPU seconds of the process and its children.

        Raises:
            RuntimeError: the command failed.
        """
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        process = subprocess.run(self.command, cwd=self.folder, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if process.returncode:
            raise RuntimeError(f"{self.name}: {self.command} failed:\n{process.stderr[-4000:]}")
        scores = json.loads(process.stdout)["scores"]
        assert self.scores in ({}, scores), f"{self.name}: the same captions have other scores"
        self.scores = scores
        return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def make_sides(captions: Path, predictions: Path, references: Path, against: Path | None) -> list[Side]:
    """Return the sides in order: this checkout, the other checkout if `against` is set, and pycocoevalcap."""
    arguments = ["score", str(predictions), "--references", str(references), "--json"]
    commands = {"this": [str(Path(sys.executable).with_name("m3diff")), *arguments]}
    folders = {"this": ROOT, "stock": ROOT}
    if against is not None:
        folders["other"] = against
        commands["other"] = [str(against / ".venv/bin/m3diff"), *arguments]
    commands["stock"] = [sys.executable, __file__, "--stock", str(captions)]
    return [Side(name, command, folders[name]) for name, command in commands.items()]


def take_turns(sides: Sequence[Side], turns: int) -> None:
    """Measure every side once per turn, after one run that is not timed. The order is reversed in every second turn."""
    for side in sides:
        side.run()
    for turn in range(turns):
        for side in sides if turn % 2 == 0 else reversed(sides):
            seconds, processor_seconds = side.run()
            side.seconds.append(seconds)
            side.processor_seconds.append(processor_seconds)
            print(f"turn {turn + 1}: {side.name:>6} {seconds:7.2f} s, processor {processor_seconds:7.2f} s", flush=True)


def summarize(sides: Sequence[Side]) -> dict[str, Any]:
    """Return the median times of each side and, except for this checkout, the ratio to this checkout's time."""
    own_side = sides[0]
    rows = {}
    for side in sides:
        row: dict[str, Any] = {
            "seconds": round(statistics.median(side.seconds), 2),
            "processor_seconds": round(statistics.median(side.processor_seconds), 2),
            "turns": [round(seconds, 2) for seconds in side.seconds],
        }
        if side is not own_side:
            row["ratio"] = round(statistics.median(side.seconds) / statistics.median(own_side.seconds), 3)
            if len(side.seconds) > 1:
                interval = ratio_of_turns(side.seconds, own_side.seconds)
                row["ratio_interval"] = [round(interval.low, 3), round(interval.high, 3)]
        rows[side.name] = row
    return rows


def measure(captions: Captions, against: Path | None, turns: int) -> dict[str, Any]:
    """Measure all sides on these captions, compare their scores, and return the results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        predictions, references = write_files(captions, folder)
        captions_file = folder / "captions.json"
        captions_file.write_text(json.dumps(captions.__dict__), "utf-8")
        sides = make_sides(captions_file, predictions, references, against)
        take_turns(sides, turns)
        stock = stock_scores_without_output(captions)
    differences = largest_differences(own_scores(captions), stock)
    rows = summarize(sides)
    printed_scores = {side.name: side.scores for side in sides}
    corpus = Scores(printed_scores["this"], {})
    equal_to_other = against is None or printed_scores["other"] == printed_scores["this"]
    return {
        "images": len(captions.predictions),
        "references": REFERENCES,
        "captions": captions.source,
        "sides": rows,
        "target_ratio": TARGET_RATIO,
        "equal": are_equal(differences) and are_equal(largest_differences(corpus, Scores(stock.corpus, {}))),
        "equal_to_other": equal_to_other,
        "differences": differences,
        "scores": printed_scores["this"],
    }


def stock_scores_without_output(captions: Captions) -> Scores:
    """Return pycocoevalcap's scores. Its output is redirected to stderr, because stdout may contain the result."""
    with redirect_stdout(sys.stderr):
        return stock_scores(captions)


def main() -> None:
    """Measure all sides, then print and write the results. Fail if the scores differ."""
    prepare()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of every side")
    parser.add_argument("--against", type=Path, help="folder of another checkout, where `make install` ran")
    parser.add_argument("--made", action="store_true", help="use made captions even if COCO's are available")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--stock", type=Path, help=argparse.SUPPRESS)  # captions to score with pycocoevalcap
    args = parser.parse_args()
    if args.stock:
        scores = stock_scores_without_output(Captions(**json.loads(args.stock.read_text("utf-8"))))
        print(json.dumps({"scores": scores.corpus}))
        return
    against = args.against and args.against.resolve()
    if against and not (against / ".venv/bin/m3diff").exists():
        parser.error(f"--against: {against} has no .venv; run `make install` there")
    is_made = args.made or not COCO.is_file()
    captions = draw_captions(args.images) if is_made else read_captions(COCO, args.images)
    facts = describe_machine()
    print(f"{facts['device']}; load before the start {os.getloadavg()[0]:.1f}; captions: {captions.source}", flush=True)
    result = measure(captions, against, args.turns)
    for name, row in result["sides"].items():
        times = f"{row['ratio']:6.2f} x this" if "ratio" in row else ""
        print(f"{name:>6} {row['seconds']:7.2f} s, processor {row['processor_seconds']:7.2f} s {times}")
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    write_results({"date": date, **facts, "pycocoevalcap": version("pycocoevalcap"), **result}, args.out)
    assert result["equal"], f"scores differ from stock's: {result['differences']}"
    assert result["equal_to_other"], "the two checkouts give different scores"


if __name__ == "__main__":
    main()
