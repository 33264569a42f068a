"""How well a threshold on pixels finds the changes of MiniChange, by level: the areas under its ROC curve.

Scenes are drawn anew with the sizes and shares of `params.yaml`; a scene gives a pair with a change and one without.

    python -m benchmarks.pixel_threshold --scenes 1000
"""

import argparse
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from components.datasets.minichange.change import sample_types
from components.datasets.minichange.levels import LEVELS
from components.datasets.minichange.render import render
from components.evaluate.metrics.pixel_threshold import DIFFERENCES, roc_auc

MULTI_CHANGE_SHARE = 0.15

Scores = dict[str, tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenes", type=int, default=1000, help="of each level")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--seed", type=int, default=99)
    parser.add_argument("--image-px", type=int, default=128)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    for level in args.levels:
        with ProcessPoolExecutor(args.processes) as pool:
            scored = list(pool.map(partial(score, level, args.image_px, args.seed), range(args.scenes), chunksize=50))
        print(f"{level}: {args.scenes} pairs with a change, as many without, of {args.image_px} pixels")
        for kind in DIFFERENCES:
            print(f"  {kind:8} area under the ROC curve {area(scored, kind):.3f}")
            for change_type, own in by_type(scored).items():
                unchanged = [scores[kind][1] for _, scores in scored]
                print(f"    {change_type:14} {roc_auc([scores[kind][0] for scores in own], unchanged):.3f}")


def score(level: str, image_px: int, seed: int, number: int) -> tuple[tuple[str, ...], Scores]:
    """Change types of a scene; and of each way to compare, how much the change and the distractor differ."""
    rng = np.random.default_rng([seed, number])
    types = sample_types(rng, number, MULTI_CHANGE_SHARE)
    *scenes, _ = LEVELS[level].sample_pair(rng, types)
    before, after, distractor = (render(scene, image_px, rng) for scene in scenes)
    return types, {kind: (differ(before, after), differ(before, distractor)) for kind, differ in DIFFERENCES.items()}


def area(scored: list[tuple[tuple[str, ...], Scores]], kind: str) -> float:
    """Over all pairs."""
    changed, unchanged = zip(*(scores[kind] for _, scores in scored), strict=True)
    return roc_auc(list(changed), list(unchanged))


def by_type(scored: list[tuple[tuple[str, ...], Scores]]) -> dict[str, list[Scores]]:
    """Pairs with one change, by its type."""
    grouped: dict[str, list[Scores]] = defaultdict(list)
    for types, scores in scored:
        if len(types) == 1:
            grouped[types[0]].append(scores)
    return grouped


if __name__ == "__main__":
    main()
