"""Digests of what the code of a checkout makes, to show that a rewrite changes no output.

    python benchmarks/digests.py             this checkout's digests
    python benchmarks/digests.py COMMIT      COMMIT's next to this checkout's, made on this machine in one go

The exit code is 1 where a digest differs. COMMIT is checked out below runs/ and runs its own copy of this script, so
module paths and parameter names may change between the two. Everything is made by the command line, with one thread a
process. Digests are of contents: the bytes of data files, each tensor of weights, the pixels of images, the values of
JSON without places and versions. Pages, model cards and code files are left out, since their words may change. Training
is repeatable to the bit on one machine only: compare digests, do not store them.
"""

import argparse
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

# Runs commands of the command line in one process, until one fails
COMMANDS = """
import json, sys
from m3diff.__main__ import main
sys.exit(next(filter(None, map(main, json.loads(sys.argv[1]))), 0))
"""

ROOT = Path(__file__).resolve().parents[1]
WORK, THERE = ROOT / "runs" / "digests", ROOT / "runs" / "digests_there"

# The embedded run with a few drawn scenes, synthetic data of each kind that needs no network, and few steps
PARAMS = """
extends: profiles/embedded
paths: {base: bases/blip2, records: data/records, clean: data/clean, mixture: data/mixture}
pretrain:
  {scenes: 64, held_out: 16, images_per_batch: 8, vision_px: 80, patch_px: 20, segmentation_steps: 3, steps: 5,
   first_task_steps: 2, warmup_steps: 1,
   tasks: [image, asked for, two images, sentence],
   blip2: {start: data/00_base, queries: 4, qformer_layers: 2, stacked: true}, threads: 1}
synthesize:
  minichange: &drawn
    {root: raw/minichange, seed: 2503, scenes: {train: 24, val: 4, test: 8}, image_px: 128, references: 5,
     multi_change_share: 0.15, oversample_types: [substitution, size, color, viewpoint], domain: standard}
  minichange_free:
    {<<: *drawn, root: raw/minichange_free, seed: 2521, level: free, scenes: {train: 12, val: 4, test: 6}}
  minichange_shifted:
    {<<: *drawn, root: raw/minichange_shifted, seed: 2511, domain: shifted, scenes: {train: 0, val: 0, test: 4}}
augment:
  edits:
    {kind: edits, source: &grid {reader: minichange, root: raw/minichange}, root: raw/edits, seed: 4211,
     editor: {kind: drawn}, writer: {kind: grammar}, edits: 2, paraphrases: {train: 1, val: 4, test: 4}}
  neighbours:
    {kind: neighbours, source: *grid, root: raw/neighbours, seed: 4217, candidates: 4, band: [0.6, 0.985],
     features: {kind: encoder, model: data/00_base}, writer: {kind: grammar}, max_text_similarity: 0.99, references: 5}
  coupled: {kind: coupled_samples, source: *grid, root: raw/coupled, seed: 4219, separator: "; "}
ingest:
  datasets:
    minichange: {reader: minichange, root: raw/minichange}
    minichange_free: {reader: minichange, root: raw/minichange_free}
    minichange_shifted: {reader: minichange, root: raw/minichange_shifted}
    edits: {reader: pairs, root: raw/edits, options: {manifest: pairs.jsonl}}
    neighbours: {reader: pairs, root: raw/neighbours, options: {manifest: pairs.jsonl}}
    coupled: {reader: pairs, root: raw/coupled, options: {manifest: pairs.jsonl, separator: ""}}
    own: {reader: pairs, root: raw/own, options: {manifest: pairs.jsonl}}
validate: {max_quarantined_share: 1.0, max_leaked_share: 1.0, allow_lost_test_pairs: true}
convert:
  questions: profiles/questions.yaml
  sources:
    {coupled: {task: describe}, minichange_free: {weight: 0.5}, edits: {max_pairs: 12}, neighbours: {max_pairs: 12}}
train: {base: data/00_base, global_batch: 8, epochs: 0.5}
predict: {max_new_tokens: 48, batch_pairs: 8}
evaluate: {metrics: [CIDEr, METEOR, ROUGE-L, BLEU, change_accuracy, pixel_threshold]}
compute: {workers: 0, micro_batch: 4, val_pairs: 4, caption_val_pairs: 0}
"""

RUNS = {
    "m3diff": "{extends: small, compute: {workers: 2, zero_stage: 1}}",
    "difference": """
      {extends: small, compute: {activation_checkpointing: full},
       train: {model: difference, schedule: constant, precision: bf16}}""",
    "onediff": """
      {extends: small, train: {model: onediff, max_captions_per_sequence: 1, export: best},
       models: {onediff: {align: {datasets: [coupled], epochs: 0.5, global_batch: 8,
         rates: {vision: null, projector: 0.001, module: 0.0003, llm: null}}}},
       compute: {caption_val_pairs: 2, checkpoint_every_steps: 4}}""",
    "blip2idc": """
      {extends: small, train: {model: blip2idc, base: bases/blip2},
       compute: {activation_checkpointing: selective}}""",
}
"""Small trainings of all families that between them take the branches which need no GPU: Ray with ZeRO, an alignment,
packed captions and single ones, both exports, both schedules, each kind of activation checkpointing, bf16."""

OWN: list[dict[str, Any]] = [  # rows of a dataset of one's own, so that validate has something to quarantine
    {"captions": ["the lamp is out", "It is dark!"], "split": "train"},
    {"captions": ["a lamp"], "split": "train", "after": "none.png"},
    {"captions": [], "split": "train"},
    {"captions": ["word " * 500], "split": "test"},
    {"captions": ["nothing changed"], "split": "test", "change_types": ["none"]},
]

CAPTIONS = {
    "a": "The red car, parked left, is gone!",
    "b": "a man   appeared",
    "c": "no change",
    "d": "l'été isn't over",
}
REFERENCES = {
    "a": ["the red car is gone", "a car has left the parking lot"],
    "b": ["two people appeared on the left"],
    "c": ["there is no change", "nothing has changed"],
    "d": ["it is not summer"],
}

BYTES = (".parquet", ".jsonl", ".npz", ".jinja", ".txt", ".model", ".out")
IMAGES = (".png", ".jpg", ".webp")
# Keys of JSON, or columns of CSV, whose values are times, places, modules, or hashes of files that are here anyway
SKIPPED = {"auto_map", "auto_mapping", "base", "base_model_name_or_path", "base_sha256", "files", "path", "seconds"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", nargs="?", help="compare with this commit")
    parser.add_argument("--json", action="store_true", help="print the digest of every file as JSON")
    args = parser.parse_args()
    there = digests_of(args.commit) if args.commit else None
    here = digests()
    if args.json:
        print(json.dumps(here, indent=1))
    elif there is None:
        print("\n".join(f"{digest:.16}  {folder}" for folder, digest in by_folder(here).items()))
    return 0 if there is None else compare(there, here)


def compare(there: dict[str, str], here: dict[str, str]) -> int:
    """Print a line for each folder, and below one that differs its files that do; 0 where nothing differs."""
    names = dict.fromkeys([*there, *here])
    different = [name for name in names if there.get(name) != here.get(name)]
    folders = by_folder(there), by_folder(here)
    print(f"{'there':16}  {'here':16}  equal  name")
    for folder in dict.fromkeys(map(folder_of, names)):
        files = [name for name in different if folder_of(name) == folder]
        found = [digests.get(folder, "absent") for digests in folders]
        print(f"{found[0]:16.16}  {found[1]:16.16}  {'NO' if files else 'yes':5}  {folder}")
        print("".join(f"{'':43}{name}\n" for name in files), end="")
    print(f"{len(names) - len(different)} of {len(names)} files equal")
    return 1 if different else 0


def by_folder(files: dict[str, str]) -> dict[str, str]:
    """A digest for all files of each folder."""
    folders: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for file in files.items():
        folders[folder_of(file[0])].append(file)
    return {folder: sha256(json.dumps(sorted(named)).encode()) for folder, named in folders.items()}


def folder_of(name: str) -> str:
    """The name of a line of the table, such as `m3diff/model`."""
    parts = name.split("/")[:-1]
    return "/".join(parts[:2])


def digests_of(commit: str) -> dict[str, str]:
    """The digests that a commit's own script makes of the commit's code."""
    git = ("git", "-C", str(ROOT), "worktree")
    remove = [*git, "remove", "--force", str(THERE)]
    if THERE.exists():
        subprocess.run(remove, check=True)
    subprocess.run([*git, "add", "--quiet", "--detach", str(THERE), commit], check=True)
    try:
        script = [sys.executable, str(THERE / "benchmarks" / "digests.py"), "--json"]
        return json.loads(subprocess.run(script, cwd=THERE, stdout=subprocess.PIPE, check=True).stdout)
    finally:
        subprocess.run(remove, check=True)


def digests() -> dict[str, str]:
    """Name -> digest: of the recorded embedded run, then of small runs that are made now."""
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.copytree(ROOT / "profiles", WORK / "profiles")
    shutil.copytree(ROOT / "data" / "00_base", WORK / "data" / "00_base")
    (WORK / "small.yaml").write_text(PARAMS)
    found = Path(python("-c", "import m3diff; print(m3diff.__file__)").split()[-1])
    assert found.is_relative_to(ROOT), f"{found} would run for {ROOT}"
    make_data()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make_run, RUNS))
    score()
    places = ("raw", "data", "bases", *RUNS, "scores", "llava")
    return dict(recorded()) | {name: digest for place in places for name, digest in contents(WORK / place)}


def recorded() -> Iterator[tuple[str, str]]:
    """Every output of the embedded run as dvc.lock has it."""
    for stage, entries in yaml.safe_load((ROOT / "dvc.lock").read_text())["stages"].items():
        for entry in entries["outs"]:
            yield f"dvc.lock {stage}/{entry['path'].removeprefix('data/').replace('/', ' ')}", entry["md5"]


def python(*arguments: str) -> str:
    """The output of Python with the code of this checkout, whichever checkout its environment was made for."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=WORK, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def m3diff(run: str, *commands: tuple[str, ...]) -> str:
    """The output of commands of the command line, one after the other in one process, with the parameters of a run."""
    argv = [["--params", f"{run}.yaml", *command] for command in commands]
    return python("-c", COMMANDS, json.dumps(argv))


def make_data() -> None:
    """Raw data, records, clean records and mixture, which all trainings share, and the base that one of them needs."""
    params = yaml.safe_load(PARAMS)
    m3diff("small", *(("synthesize", name) for name in params["synthesize"]))
    write_own()
    with ThreadPoolExecutor(2) as pool:
        base = pool.submit(m3diff, "small", ("pretrain",))
        augment = [("augment", name) for name in params["augment"]]
        m3diff("small", *augment, ("ingest",), ("validate",), ("convert",), ("export-llava", "llava"))
        base.result()


def write_own() -> None:
    """A dataset of the rows OWN, each pair with images of one colour."""
    root = WORK / "raw" / "own"
    root.mkdir()
    for number in range(len(OWN)):
        for side, blue in (("before", 0), ("after", 200)):
            Image.new("RGB", (40, 30 + number), (40 * number, 9, blue)).save(root / f"{side}{number}.png")
    rows = [{"before": f"before{n}.png", "after": f"after{n}.png"} | row for n, row in enumerate(OWN)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(run: str) -> None:
    """Train, predict, evaluate, export in each form, and caption a pair."""
    names = {name: f"{run}/{name}" for name in ("model", "predictions", "report")}
    own = yaml.safe_load(RUNS[run]) | {"paths": names}
    own["compute"] |= {"scratch": f"scratch/{run}"}
    (WORK / f"{run}.yaml").write_text(yaml.safe_dump(own))
    forms = {"merged": (), "adapters": ("--adapters",), "hub": ("--hub",)}
    exports = [("export", f"{run}/{name}", *how) for name, how in forms.items()]
    m3diff(run, ("train",), ("predict",), ("evaluate",), *exports)
    pair = (str(min((WORK / "raw" / "minichange" / side).glob("*.png"))) for side in ("images", "sc_images"))
    model = ("--model", f"{run}/merged", "--overlay", f"{run}/overlay.png")
    (WORK / run / "caption.out").write_text(m3diff(run, ("caption", *pair, *model)))


def score() -> None:
    """Captions against references, and a run's by the protocol of a benchmark; every metric that runs here."""
    folder = WORK / "scores"
    folder.mkdir()
    texts = [{"image_id": name, "id": 0, "caption": text} for name in REFERENCES for text in REFERENCES[name]]
    coco = {"images": [{"id": name} for name in REFERENCES], "annotations": texts}
    predicted = json.loads((WORK / "m3diff" / "predictions" / "predictions.json").read_text())
    grid = {row["image_id"]: row["caption"] for row in predicted if row["image_id"].startswith("minichange/")}
    for name, content in {"references": coco, "captions": CAPTIONS, "grid": grid}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    asked = {
        "of captions": ("scores/captions.json", "--references", "scores/references.json"),
        "of grid": ("scores/grid.json", "--benchmark", "minichange", "--data", "data/records/minichange"),
    }
    for name, arguments in asked.items():
        (folder / f"{name}.json").write_text(m3diff("small", ("score", *arguments, "--json")))


def contents(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and digest of each file below a folder; of images that lie side by side, of all of them."""
    images: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        if file.suffix in IMAGES:
            images[file.parent].append(
                (file.name, sha256(np.asarray(Image.open(file, formats=("PNG", "JPEG", "WEBP"))).tobytes()))
            )
        elif (content := content_of(file)) is not None:
            yield str(file.relative_to(WORK)), sha256(content)
    for parent, pixels in images.items():
        yield f"{parent.relative_to(WORK)}/{len(pixels)} images", sha256(json.dumps(pixels).encode())


def content_of(file: Path) -> bytes | None:
    """The digested content of a file; None for a page, a card, code or parameters."""
    if file.suffix in BYTES:
        return file.read_bytes()
    if file.suffix == ".csv":
        rows = csv.DictReader(file.read_text().splitlines())
        return json.dumps([without(row) for row in rows]).encode()
    if file.suffix == ".json" and file.name != "recipe.json":
        return json.dumps(without(json.loads(file.read_text())), sort_keys=True).encode()
    if file.suffix == ".safetensors":
        return json.dumps(tensors(file.read_bytes()), sort_keys=True).encode()
    return None


def tensors(content: bytes) -> dict[str, Any]:
    """Name -> type, shape and digest of each tensor of a safetensors file."""
    start = 8 + int.from_bytes(content[:8], "little")
    found = json.loads(content[8:start])
    found.pop("__metadata__", None)
    places = {name: tuple(start + at for at in tensor["data_offsets"]) for name, tensor in found.items()}
    return {name: (found[name]["dtype"], found[name]["shape"], sha256(content[a:b])) for name, (a, b) in places.items()}


def without(tree: Any) -> Any:
    """A JSON value without SKIPPED."""
    if isinstance(tree, dict):
        return {key: without(value) for key, value in tree.items() if key not in SKIPPED}
    return [without(value) for value in tree] if isinstance(tree, list) else tree


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
