"""Compare all outputs of the code in two commits, to show that a change does not affect any output.

    python benchmarks/digests.py             print the digests of this checkout
    python benchmarks/digests.py COMMIT      compare them with the digests of COMMIT, computed in the same call

The exit code is 1 if a digest differs. COMMIT is checked out in runs/, and its digests are computed by its copy of this
script, so module paths and parameter names may differ between the two commits. All outputs are produced by the command
line, in processes with one thread. A digest covers the bytes of data files, each weight tensor, the pixels of images,
and JSON values without paths and versions. Pages, model cards and code files are left out, because their wording may
change. Training is bit-for-bit reproducible only on the same machine, so compare digests but do not store them."""

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

# Runs several `m3diff` commands in one process and stops at the first failure
COMMANDS = """
import json, sys
from m3diff.__main__ import main
sys.exit(next(filter(None, map(main, json.loads(sys.argv[1]))), 0))
"""

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "runs" / "digests"
OTHER_CHECKOUT = ROOT / "runs" / "digests_there"

# The embedded run with few drawn scenes, few steps, and every kind of synthetic data that does not need the network
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
"""Small training runs of all model families. Together they cover the code that does not need a GPU: Ray with ZeRO, an
alignment phase, packed and single captions, both exports, both schedules, each kind of activation checkpointing, and
bf16."""

OWN_ROWS: list[dict[str, Any]] = [  # rows of a user's dataset; `validate` puts some of them into quarantine
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
# JSON keys and CSV columns that are ignored: times, paths, module names, and hashes of files that already have a digest
IGNORED_KEYS = {
    "auto_map",
    "auto_mapping",
    "base",
    "base_model_name_or_path",
    "base_sha256",
    "files",
    "path",
    "seconds",
}


def main() -> int:
    """Print the digests of this checkout or compare them with those of another commit. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", nargs="?", help="compare with this commit")
    parser.add_argument("--json", action="store_true", help="print the digest of every file as JSON")
    args = parser.parse_args()
    other_digests = compute_digests_of_commit(args.commit) if args.commit else None
    own_digests = compute_digests()
    if args.json:
        print(json.dumps(own_digests, indent=1))
    elif other_digests is None:
        print("\n".join(f"{digest:.16}  {folder}" for folder, digest in combine_by_folder(own_digests).items()))
    return 0 if other_digests is None else compare(other_digests, own_digests)


def compare(other_digests: dict[str, str], own_digests: dict[str, str]) -> int:
    """Print a line for each folder, followed by its files that differ. Return 1 if any file differs, otherwise 0."""
    names = dict.fromkeys([*other_digests, *own_digests])
    changed_names = [name for name in names if other_digests.get(name) != own_digests.get(name)]
    other_folders = combine_by_folder(other_digests)
    own_folders = combine_by_folder(own_digests)
    print(f"{'there':16}  {'here':16}  equal  name")
    for folder in dict.fromkeys(map(folder_of, names)):
        files = [name for name in changed_names if folder_of(name) == folder]
        other_digest = other_folders.get(folder, "absent")
        own_digest = own_folders.get(folder, "absent")
        print(f"{other_digest:16.16}  {own_digest:16.16}  {'NO' if files else 'yes':5}  {folder}")
        print("".join(f"{'':43}{name}\n" for name in files), end="")
    print(f"{len(names) - len(changed_names)} of {len(names)} files equal")
    return 1 if changed_names else 0


def combine_by_folder(files: dict[str, str]) -> dict[str, str]:
    """Return a combined digest of all files in each folder."""
    folders: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, digest in files.items():
        folders[folder_of(name)].append((name, digest))
    return {folder: sha256(json.dumps(sorted(entries)).encode()) for folder, entries in folders.items()}


def folder_of(name: str) -> str:
    """Return the folder under which the table shows a file, such as `m3diff/model`."""
    parts = name.split("/")[:-1]
    return "/".join(parts[:2])


def compute_digests_of_commit(commit: str) -> dict[str, str]:
    """Check out a commit and return its digests, computed by the commit's copy of this script."""
    git = ("git", "-C", str(ROOT), "worktree")
    remove = [*git, "remove", "--force", str(OTHER_CHECKOUT)]
    if OTHER_CHECKOUT.exists():
        subprocess.run(remove, check=True)
    subprocess.run([*git, "add", "--quiet", "--detach", str(OTHER_CHECKOUT), commit], check=True)
    try:
        script = [sys.executable, str(OTHER_CHECKOUT / "benchmarks" / "digests.py"), "--json"]
        return json.loads(subprocess.run(script, cwd=OTHER_CHECKOUT, stdout=subprocess.PIPE, check=True).stdout)
    finally:
        subprocess.run(remove, check=True)


def compute_digests() -> dict[str, str]:
    """Run the small training runs and return the digest of each output file by name.

    The outputs of the embedded run are included with the digests that dvc.lock records for them.
    """
    shutil.rmtree(WORK, ignore_errors=True)
    shutil.copytree(ROOT / "profiles", WORK / "profiles")
    shutil.copytree(ROOT / "data" / "00_base", WORK / "data" / "00_base")
    (WORK / "small.yaml").write_text(PARAMS)
    package = Path(python("-c", "import m3diff; print(m3diff.__file__)").split()[-1])
    assert package.is_relative_to(ROOT), f"{package} would run for {ROOT}"
    make_data()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make_run, RUNS))
    score()
    files = dict(recorded_outputs())
    for folder in ("raw", "data", "bases", *RUNS, "scores", "llava"):
        files |= dict(digest_files(WORK / folder))
    return files


def recorded_outputs() -> Iterator[tuple[str, str]]:
    """Yield the name and digest of every output of the embedded run, as recorded in dvc.lock."""
    for stage, entries in yaml.safe_load((ROOT / "dvc.lock").read_text())["stages"].items():
        for entry in entries["outs"]:
            yield f"dvc.lock {stage}/{entry['path'].removeprefix('data/').replace('/', ' ')}", entry["md5"]


def python(*arguments: str) -> str:
    """Run Python with this checkout's code, even in the environment of another checkout. Return its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, *arguments], cwd=WORK, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, f"{' '.join(arguments)}: {process.stdout[-2000:]}{process.stderr[-4000:]}"
    return process.stdout


def m3diff(run: str, *commands: tuple[str, ...]) -> str:
    """Run `m3diff` commands in one process with the parameters of a run. Return their output."""
    argv = [["--params", f"{run}.yaml", *command] for command in commands]
    return python("-c", COMMANDS, json.dumps(argv))


def make_data() -> None:
    """Create the data that all training runs share, from raw data to the mixture, and pretrain a base for one run."""
    params = yaml.safe_load(PARAMS)
    m3diff("small", *(("synthesize", name) for name in params["synthesize"]))
    write_own_rows()
    with ThreadPoolExecutor(2) as pool:
        base = pool.submit(m3diff, "small", ("pretrain",))
        augment = [("augment", name) for name in params["augment"]]
        m3diff("small", *augment, ("ingest",), ("validate",), ("convert",), ("export-llava", "llava"))
        base.result()


def write_own_rows() -> None:
    """Write a dataset with the rows in OWN_ROWS. Each of its images has a single colour."""
    root = WORK / "raw" / "own"
    root.mkdir()
    for number in range(len(OWN_ROWS)):
        for side, blue in (("before", 0), ("after", 200)):
            Image.new("RGB", (40, 30 + number), (40 * number, 9, blue)).save(root / f"{side}{number}.png")
    rows = [{"before": f"before{n}.png", "after": f"after{n}.png"} | row for n, row in enumerate(OWN_ROWS)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(run: str) -> None:
    """Run the stages train, predict and evaluate for a training run, export its model in every format, and caption."""
    names = {name: f"{run}/{name}" for name in ("model", "predictions", "report")}
    params = yaml.safe_load(RUNS[run]) | {"paths": names}
    params["compute"] |= {"scratch": f"scratch/{run}"}
    (WORK / f"{run}.yaml").write_text(yaml.safe_dump(params))
    export_options = {"merged": (), "adapters": ("--adapters",), "hub": ("--hub",)}
    exports = [("export", f"{run}/{name}", *options) for name, options in export_options.items()]
    m3diff(run, ("train",), ("predict",), ("evaluate",), *exports)
    pair = [str(min((WORK / "raw" / "minichange" / side).glob("*.png"))) for side in ("images", "sc_images")]
    model = ("--model", f"{run}/merged", "--overlay", f"{run}/overlay.png")
    (WORK / run / "caption.out").write_text(m3diff(run, ("caption", *pair, *model)))


def score() -> None:
    """Score captions against references, and score the predictions of a run with a benchmark's protocol."""
    folder = WORK / "scores"
    folder.mkdir()
    texts = [{"image_id": name, "id": 0, "caption": text} for name in REFERENCES for text in REFERENCES[name]]
    coco = {"images": [{"id": name} for name in REFERENCES], "annotations": texts}
    predicted = json.loads((WORK / "m3diff" / "predictions" / "predictions.json").read_text())
    grid = {row["image_id"]: row["caption"] for row in predicted if row["image_id"].startswith("minichange/")}
    for name, content in {"references": coco, "captions": CAPTIONS, "grid": grid}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    score_arguments = {
        "of captions": ("scores/captions.json", "--references", "scores/references.json"),
        "of grid": ("scores/grid.json", "--benchmark", "minichange", "--data", "data/records/minichange"),
    }
    for name, arguments in score_arguments.items():
        (folder / f"{name}.json").write_text(m3diff("small", ("score", *arguments, "--json")))


def digest_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and digest of each file in a folder and its subfolders. Images in a folder share one digest."""
    images: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        if file.suffix in IMAGES:
            pixels = np.asarray(Image.open(file, formats=("PNG", "JPEG", "WEBP")))
            images[file.parent].append((file.name, sha256(pixels.tobytes())))
        elif (content := content_of(file)) is not None:
            yield str(file.relative_to(WORK)), sha256(content)
    for parent, digests_by_name in images.items():
        name = f"{parent.relative_to(WORK)}/{len(digests_by_name)} images"
        yield name, sha256(json.dumps(digests_by_name).encode())


def content_of(file: Path) -> bytes | None:
    """Return the part of a file that its digest covers.

    The result is None for pages, model cards, code and parameters, which do not have a digest.
    """
    if file.suffix in BYTES:
        return file.read_bytes()
    if file.suffix == ".csv":
        rows = csv.DictReader(file.read_text().splitlines())
        return json.dumps([remove_ignored_keys(row) for row in rows]).encode()
    if file.suffix == ".json" and file.name != "recipe.json":
        return json.dumps(remove_ignored_keys(json.loads(file.read_text())), sort_keys=True).encode()
    if file.suffix == ".safetensors":
        return json.dumps(describe_tensors(file.read_bytes()), sort_keys=True).encode()
    return None


def describe_tensors(content: bytes) -> dict[str, Any]:
    """Return the type, shape and digest of each tensor in a safetensors file, by name."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    descriptions = {}
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        descriptions[name] = (tensor["dtype"], tensor["shape"], sha256(content[start + begin : start + end]))
    return descriptions


def remove_ignored_keys(tree: Any) -> Any:
    """Return a JSON value without the keys in IGNORED_KEYS, at any depth."""
    if isinstance(tree, dict):
        return {key: remove_ignored_keys(value) for key, value in tree.items() if key not in IGNORED_KEYS}
    return [remove_ignored_keys(value) for value in tree] if isinstance(tree, list) else tree


def sha256(content: bytes) -> str:
    """Return the SHA-256 of the content as a hexadecimal string."""
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
