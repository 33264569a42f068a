"""One Java scorer in a process of its own: `worker.py NAME SECONDS FOLDER`, the job as JSON on standard input.

Writes FOLDER/result.json: {"value": ...} or {"error": reason}. The package's wrappers work in the folder of their own
file; `__file__` is pointed at FOLDER, with links to the jars, so that a read-only installation serves as well.
Run by `scorer.Scorer`; imports nothing of the project.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

SENTINEL = "endofcaptions"
Job = dict[str, Any]


def move_to(folder: Path, module: ModuleType) -> None:
    """Let a wrapper find its jars, and write its temporary files, in `folder`."""
    home = Path(str(module.__file__)).parent
    for entry in home.iterdir():
        if entry.suffix == ".jar" or entry.name in ("data", "lib"):
            link_tree(entry, folder / entry.name)
    module.__file__ = str(folder / "wrapper.py")


def link_tree(source: Path, target: Path) -> None:
    """The same files under `target` as links, in folders that can be written."""
    shutil.copytree(source, target, copy_function=os.symlink) if source.is_dir() else target.symlink_to(source)


def ptb(folder: Path) -> Callable[[Job], list[str]]:
    """Job {"captions": [str]} -> their tokens, joined by spaces. A sentinel at the end proves that no line slipped."""
    from pycocoevalcap.tokenizer import ptbtokenizer

    move_to(folder, ptbtokenizer)

    def tokenise(job: Job) -> list[str]:
        lines = {i: [{"caption": caption}] for i, caption in enumerate([*job["captions"], SENTINEL])}
        tokens = [token[0] for token in ptbtokenizer.PTBTokenizer().tokenize(lines).values()]
        if len(tokens) != len(lines) or tokens[-1] != SENTINEL:
            raise RuntimeError(f"the tokenizer gave {len(tokens)} lines for {len(lines)} captions")
        return tokens[:-1]

    return tokenise


def meteor(folder: Path) -> Callable[[Job], Job]:
    """Job {references, predictions, groups} -> the score of each group, and of each pair in the group "all".

    A pair's statistics are computed once; each group then aggregates its own, as METEOR does.
    """
    from pycocoevalcap.meteor import meteor as module

    move_to(folder, module)

    class CachingMeteor(module.Meteor):  # type: ignore[misc]
        cached: dict[tuple[str, ...], str] = {}

        def _stat(self, hypothesis: str, references: list[str]) -> str:
            key = (hypothesis, *references)
            if key not in self.cached:
                self.cached[key] = super()._stat(hypothesis, references)
            return self.cached[key]

    scorer = CachingMeteor()

    def compute(job: Job) -> Job:
        try:
            return by_group(job, scorer.compute_score)
        except (ValueError, OSError) as error:
            scorer.meteor_p.kill()
            words = scorer.meteor_p.stderr.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(f"METEOR gave up ({error}); its last words: {words[-1] if words else 'none'}") from error

    return compute


def by_group(job: Job, compute: Callable[[Job, Job], tuple[float, list[float]]]) -> Job:
    """The score of every group that has pairs; METEOR gives up when asked for the score of none."""
    answer: Job = {"groups": {}}
    for group, ids in job["groups"].items():
        if not ids:
            continue
        references = {i: job["references"][i] for i in ids}
        score, pairs = compute(references, {i: [job["predictions"][i]] for i in ids})
        answer["groups"][group] = score
        if group == "all":
            answer["pairs"] = dict(zip(ids, pairs, strict=True))
    return answer


def spice(folder: Path) -> Callable[[Job], Job]:
    """The same job as METEOR's, plus "jars": the CoreNLP files. A group's score is the mean F of its pairs.

    A pair without a single tuple on either side has no F (NaN in the package) and is left out of the mean.
    """
    from pycocoevalcap.spice import spice as module

    move_to(folder, module)
    module.get_stanford_models = lambda: None  # it would download 384 MB

    def compute(job: Job) -> Job:
        for jar in job["jars"]:
            (folder / "lib" / Path(jar).name).symlink_to(jar)
        ids = sorted(job["groups"]["all"])  # the package sorts them
        _, found = module.Spice().compute_score(
            {i: job["references"][i] for i in ids}, {i: [job["predictions"][i]] for i in ids}
        )
        pairs = {i: score["All"]["f"] for i, score in zip(ids, found, strict=True)}
        pairs = {i: f for i, f in pairs.items() if f == f}
        groups = {name: [pairs[i] for i in members if i in pairs] for name, members in job["groups"].items()}
        return {"pairs": pairs, "groups": {name: sum(f) / len(f) for name, f in groups.items() if f}}

    return compute


def main() -> None:
    name, seconds, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    run = {"PTB": ptb, "METEOR": meteor, "SPICE": spice}[name](
        folder
    )  # METEOR's JVM starts here, before its job is known
    job = json.load(sys.stdin)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.alarm(seconds)  # the parent kills the group earlier; this is for a parent that was itself killed
    try:
        answer = {"value": run(job)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    (folder / "result.part").write_text(json.dumps(answer), encoding="utf-8")
    (folder / "result.part").rename(folder / "result.json")
    os._exit(0)  # no destructors: Meteor.__del__ waits for a lock that a failed call never gave back


if __name__ == "__main__":
    main()
