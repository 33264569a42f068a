"""Scoring speed against stock pycocoevalcap: `make bench-score` -> benchmarks/results/score.json.

CLEVR-Change's test set in size: 7,970 pairs of 5 references, made from templates (half without a change), with words,
lengths and repetitions like its own. Two fresh processes score the same captions, imports and Java's start included:
pycocoevalcap as its users call it (tokenizer, BLEU, METEOR, ROUGE-L and CIDEr, one after another), and ours. Every
score of the corpus and of each pair is compared: BLEU and ROUGE-L to the bit, METEOR and CIDEr to 1e-9 of their value.
Seconds are the medians of the runs, in turn.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

RESULTS = Path(__file__).parent / "results" / "score.json"
PAIRS, REFERENCES, RUNS = 7_970, 5, 3
SIZES = ("small", "tiny", "large", "big")
COLORS = ("gray", "red", "blue", "green", "brown", "purple", "cyan", "yellow")
MATERIALS = ("rubber", "matte", "metal", "metallic", "shiny")
SHAPES = ("cube", "block", "sphere", "ball", "cylinder")
PLACES = ("on the left side of", "to the right of", "in front of", "behind")
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
EXACT = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L")

Captions = dict[str, dict[str, Any]]
Scores = dict[str, Any]


def make_captions(pairs: int, seed: int = 0) -> Captions:
    """Predictions {pair: text} and references {pair: [text]}; a prediction is of its scene or, often, of a like one."""
    rng = random.Random(seed)
    captions: Captions = {"predictions": {}, "references": {}}
    for number in range(pairs):
        scene = None if number % 2 else make_scene(rng)
        seen = scene if rng.random() < 0.7 else make_scene(rng)
        captions["predictions"][f"{number:06}.png"] = describe(seen, rng)
        captions["references"][f"{number:06}.png"] = [describe(scene, rng) for _ in range(REFERENCES)]
    return captions


def make_scene(rng: random.Random) -> tuple[Any, ...]:
    """Two objects, their places, a change and a colour."""
    thing, other = ((rng.choice(SIZES), rng.choice(COLORS), rng.choice(MATERIALS), rng.choice(SHAPES)) for _ in "12")
    return thing, other, rng.choice(PLACES), rng.choice(CHANGES), rng.choice(COLORS)


def describe(scene: tuple[Any, ...] | None, rng: random.Random) -> str:
    if scene is None:
        return rng.choice(NO_CHANGE)
    thing, other, place, change, color = scene
    first, second = (" ".join(word for word in words if rng.random() < 0.7) or "thing" for words in (thing, other))
    where = f" that is {place} the {second}" if rng.random() < 0.6 else ""
    return f"The {first}{where} {rng.choice(change).format(color)}."


def stock(captions: Captions) -> Scores:
    """All scores by pycocoevalcap, one scorer after another."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.meteor.meteor import Meteor
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    tokenizer = PTBTokenizer()
    references = tokenizer.tokenize(
        {i: [{"caption": text} for text in texts] for i, texts in captions["references"].items()}
    )
    results = tokenizer.tokenize({i: [{"caption": text}] for i, text in captions["predictions"].items()})
    corpus, each = Bleu(4).compute_score(references, results)
    groups = {f"BLEU-{n + 1}": corpus[n] for n in range(4)}
    pairs = {"BLEU-4": each[3]}
    for name, scorer in {"METEOR": Meteor(), "ROUGE-L": Rouge(), "CIDEr": Cider()}.items():
        corpus, each = scorer.compute_score(references, results)
        groups[name], pairs[name] = float(corpus), [float(value) for value in each]
    return {"groups": groups, "pairs": pairs}


def ours(captions: Captions) -> Scores:
    from m3diff.datasets.spec import Protocol
    from m3diff.scoring.metrics import ALL, choose_metrics
    from m3diff.scoring.pairs import EvalPair
    from m3diff.scoring.protocols import ProtocolPairs
    from m3diff.scoring.run import compute_metrics

    pairs = [
        EvalPair(i, "made", Path(), Path(), b"", b"", captions["references"][i], [], prediction, None)
        for i, prediction in captions["predictions"].items()
    ]
    metrics = choose_metrics(["CIDEr", "METEOR", "ROUGE-L", "BLEU"])
    protocol = ProtocolPairs("made", Protocol("test", n=None), pairs)
    found = compute_metrics(metrics, [protocol], {}, None, 600)["made/test"]
    assert set(found.absent) == {"CIDEr_shuffled"}, found.absent
    groups = {name: value for name, value in found.groups[ALL].items() if name != "CIDEr_shuffled"}
    names = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr")
    return {"groups": groups, "pairs": {name: [found.pairs[pair.id][name] for pair in pairs] for name in names}}


def differences(one: Scores, other: Scores) -> dict[str, float]:
    """The greatest difference of each score, over the corpus and all pairs, in parts of the value."""
    found = {}
    for name, value in one["groups"].items():
        theirs = [value, *one["pairs"].get(name, [])]
        ours = [other["groups"][name], *other["pairs"].get(name, [])]
        found[name] = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(theirs, ours, strict=True))
    return found


def are_equal(found: dict[str, float]) -> bool:
    return all(value <= (0.0 if name in EXACT else 1e-9) for name, value in found.items())


def timed(task: str, captions: Path, result: Path) -> tuple[float, float]:
    """Seconds that a fresh process takes for `task`, and the seconds of processor time of it and what it starts."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, __file__, "--task", task, "--captions", str(captions), "--out", str(result)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(pairs: int, repeats: int) -> dict[str, Any]:
    captions, scores = make_captions(pairs), {}
    runs: dict[str, list[tuple[float, float]]] = {"ours": [], "stock": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "captions.json"
        path.write_text(json.dumps(captions), encoding="utf-8")
        for task in [*runs] * repeats:
            seconds, busy = timed(task, path, Path(folder) / task)
            runs[task].append((seconds, busy))
            scores[task] = json.loads((Path(folder) / task).read_text(encoding="utf-8"))
            print(f"{task:>6} {seconds:8.1f} s, {busy:8.1f} s of processor time", flush=True)
    medians = {task: [round(median(values), 2) for values in zip(*found, strict=True)] for task, found in runs.items()}
    found = differences(scores["stock"], scores["ours"])
    return {
        "pairs": pairs,
        "references": REFERENCES,
        "stock_s": medians["stock"][0],
        "ours_s": medians["ours"][0],
        "stock_cpu_s": medians["stock"][1],
        "ours_cpu_s": medians["ours"][1],
        "ratio": round(medians["stock"][0] / medians["ours"][0], 2),
        "equal": are_equal(found),
        "differences": found,
        "scores": scores["ours"]["groups"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--runs", type=int, default=RUNS, help="of each side")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--task", choices=["stock", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--captions", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        with redirect_stdout(sys.stderr):
            scores = {"stock": stock, "ours": ours}[args.task](json.loads(args.captions.read_text(encoding="utf-8")))
        args.out.write_text(json.dumps(scores), encoding="utf-8")
        return
    from benchmarks.machine import machine, write

    facts = machine()
    result = measure(args.pairs, args.runs)
    print(f"{result['ratio']} times as fast; every score equal: {result['equal']}")
    versions = {"pycocoevalcap": version("pycocoevalcap"), "numpy": version("numpy")}
    write({**result, **versions, **facts}, args.out)
    assert result["equal"], f"scores differ: {result['differences']}"


if __name__ == "__main__":
    main()
