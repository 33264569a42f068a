"""Build a toy of the project: the real `dvc.yaml` and `params.yaml`, and stages that write their outputs at once.

`build(root)` builds it. The toy contains this file as `toy.py`, and `python toy.py <stage> [<dataset>]` runs a stage.
"""

import csv
import hashlib
import json
import math
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
SPLITS = ("train", "val", "test", "test")
TOTAL = "minichange/total"
SIDES = {"before": "images", "after": "sc_images"}

MODEL = '''
from m3diff.records.sample import Turn


class Captioner:
    """Answers with its word, the colour of the middle of each image and the question, cut to `length` characters."""

    def __init__(self, word, length):
        self.word, self.length = word, length
        self.processor = self

    def caption(self, image_sets):
        prepared = [self.prepare(images) for images in image_sets]
        return self.answer_in_parts(prepared, [(self.ask(None),)] * len(prepared))

    def ask(self, question):
        return Turn(question or "What changed?")

    def fault_of_sample(self, images, question, earlier_turns=0):
        return None

    def marks(self, images):
        return ["<image>"] * images

    def encode_prompt(self, turns, marks):
        return (0,) * len(marks)

    def prepare(self, images):
        return [self.colour(image) for image in images]

    def answer_in_parts(self, prepared, dialogues):
        return [self.say(colours, turns[-1].question) for colours, turns in zip(prepared, dialogues)]

    def say(self, colours, question):
        return f"{self.word} {' became '.join(colours)}. {question}"[: self.length]

    def colour(self, image):
        return "%d/%d/%d" % image.getpixel((image.width // 2, image.height // 2))


def load_captioner(checkpoint, max_new_tokens=64, device=None, base=None):
    return Captioner((checkpoint / "word.txt").read_text(), max_new_tokens)
'''

FRESH = """
import json, sys
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/m3diff@challenger")
import m3diff.models
print(json.dumps([m3diff.models.__file__, model.predict(json.loads(sys.argv[2]))]))
"""

FILES = ("params.yaml", "prefect.yaml", "prefect.toml", ".gitignore", ".dvcignore")


def build(root: Path) -> Path:
    """Write the toy project like a fresh clone: with git, DVC and the base, and before any stage has run."""
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("components", "flows", "profiles"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=ignore)
    (root / "m3diff").symlink_to("components")
    (root / "components" / "models" / "generation.py").write_text(MODEL)
    for name in FILES:
        shutil.copy(REPOSITORY / name, root / name)
    shutil.copy(__file__, root / "toy.py")
    graph = (REPOSITORY / "dvc.yaml").read_text().replace("exec python -m m3diff", f"exec {sys.executable} toy.py")
    (root / "dvc.yaml").write_text(graph)
    (root / "data" / "00_base").mkdir(parents=True)
    (root / "data" / "00_base" / "config.json").write_text("{}")
    run(root, "git", "init", "-q")
    run(root, "dvc", "init", "-q")
    (root / ".dvc" / "config").write_text("[core]\n    analytics = false\n")
    run(root, "dvc", "repro", "-q", "--single-item", "code", "pretrain")
    commit(root, "toy")
    run(root, "git", "gc", "-q")  # many tests copy the project, and a pack is one file instead of hundreds
    return root


def store(root: Path) -> Any:
    """Return a client of the project's MLflow store."""
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{root}/services/mlflow/mlflow.db"
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def change(root: Path, section: str, **values: object) -> None:
    """Set parameters of the project."""
    import yaml

    params = yaml.safe_load((root / "params.yaml").read_text())
    params[section] |= values
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))


def run(root: Path, tool: str, *arguments: str) -> str:
    """Run git or this environment's dvc in the project and return its output."""
    command = [sys.executable, "-m", "dvc"] if tool == "dvc" else [tool]
    done = subprocess.run([*command, *arguments], cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, f"{tool} {' '.join(arguments)}: {done.stdout}"
    return done.stdout


def status(root: Path) -> dict[str, Any]:
    """Return the changes that `dvc status` lists, by stage."""
    command = [sys.executable, "-m", "dvc", "status", "--json"]
    return json.loads(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)


def commit(root: Path, message: str) -> None:
    person = ("-c", "user.name=toy", "-c", "user.email=toy@localhost")
    run(root, "git", "add", "-A")
    run(root, "git", *person, "commit", "-q", "--allow-empty", "-m", message)


WAITS = """def evaluate(params, paths):
    import os, time
    folder = Path(os.environ["TOY_MARKS"])
    (folder / "began").touch()
    while not (folder / "go").exists():
        time.sleep(0.1)
    old(params, paths)
    with (folder / "ended").open("a") as file:
        file.write("once ")
"""
"""A stage that waits until the file `go` exists."""


def replace_stage(root: Path, stage: str, body: str) -> str:
    """Replace the function of a stage. The new one may call the `old` one. Return the original text of toy.py."""
    text = (root / "toy.py").read_text()
    assert f"\ndef {stage}(" in text
    (root / "toy.py").write_text(text.replace(f"\ndef {stage}(", f"\n{body}\n\ndef old(", 1))
    return text


def load_and_caption(tracking_uri: str, rows: list[dict[str, str]], cwd: Path) -> tuple[str, list[str]]:
    """Load the challenger in a fresh process. Return the file that its code comes from, and its captions."""
    command = [sys.executable, "-c", FRESH, tracking_uri, json.dumps(rows)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code, captions = json.loads(done.stdout)
    return code, captions


def write_dataset(root: Path, splits: tuple[str, ...], seed: int = 0) -> None:
    """Write a dataset in the toy's layout: `pairs.json`, `images/` and `sc_images/`, one pair per entry of `splits`."""
    from PIL import Image

    for number in range(len(splits)):
        for folder, red in (("images", 10), ("sc_images", 200)):
            (root / folder).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (red, number, seed % 256)).save(root / folder / f"{number}.png")
    (root / "pairs.json").write_text(json.dumps(splits))


def code(params: dict[str, Any], paths: dict[str, Path]) -> None:
    from m3diff.settings.load import load_params
    from m3diff.stages.code import code as run

    run(load_params(Path("params.yaml")))


def synthesize(params: dict[str, Any], paths: dict[str, Path], name: str) -> None:
    settings = params["synthesize"][name]
    write_dataset(Path(settings["root"]), SPLITS, settings["seed"])
    (Path(settings["root"]) / "grammar.json").write_text(json.dumps({"clause_separator": ", and "}))


def augment(params: dict[str, Any], paths: dict[str, Path], name: str) -> None:
    entry = params["augment"][name]
    source = json.loads((Path(entry["source"]["root"]) / "pairs.json").read_text())
    splits = [split for split in source if split in entry["source"].get("splits", SPLITS)]
    write_dataset(Path(entry["root"]), tuple(splits), entry["seed"])
    Path(f"{entry['root']}.json").write_text(json.dumps({"rows": len(splits)}))


def ingest(params: dict[str, Any], paths: dict[str, Path], name: str) -> None:
    root = Path(params["ingest"]["datasets"][name]["root"])
    out = paths["records"] / name
    out.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for number, split in enumerate(json.loads((root / "pairs.json").read_text())):
        images = []
        for folder in SIDES.values():
            path = root / folder / f"{number}.png"
            images.append({"uri": str(path), "sha256": hashlib.sha256(path.read_bytes()).digest()})
        row = {"id": f"{name}/{number:06d}.png", "dataset": name, "split": split, "references": ["it became red"]}
        rows.append(row | {"image_set": row["id"], "images": images, "history": [], "question": None})
    write_rows(out / "records" / "00000.parquet", rows)
    if (root / "grammar.json").is_file():
        shutil.copy(root / "grammar.json", out)
    (paths["records"] / f"{name}.json").write_text(json.dumps({"rows": len(rows)}))


def write_rows(path: Path, rows: list[dict[str, Any]], schema: Any = None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()


def validate(params: dict[str, Any], paths: dict[str, Path]) -> None:
    datasets = params["ingest"]["datasets"]
    rows = [row for name in datasets for row in read_rows(paths["records"] / name / "records" / "00000.parquet")]
    write_rows(paths["clean"] / "records" / "00000.parquet", rows)
    limit = params["validate"]["max_caption_chars"]
    write_rows(paths["clean"] / "quarantine" / "00000.parquet", [{"id": "", "limit": limit}])
    (paths["clean"] / "docs").mkdir()
    (paths["clean"] / "docs" / "index.html").write_text("clean")


def convert(params: dict[str, Any], paths: dict[str, Path]) -> dict[str, Any]:
    from m3diff.records.schemas import SAMPLE_SCHEMA

    questions = Path(params["convert"]["questions"]).read_text()
    columns = ("id", "image_set", "dataset", "split", "images", "history")
    rows = read_rows(paths["clean"] / "records" / "00000.parquet")
    texts = {"question": questions, "answer": f"sampled with {params['convert']['seed']}"}
    samples_by_folder: dict[str, list[dict[str, Any]]] = {"train": [], "val": [], "test": [], "retention": []}
    for row in rows:
        is_retention = params["ingest"]["datasets"][row["dataset"]].get("role") == "retention"
        folder = "retention" if is_retention and row["split"] == "test" else row["split"]
        samples_by_folder[folder].append({name: row[name] for name in columns} | {"record": row["id"]} | texts)
    for folder, samples in samples_by_folder.items():
        (paths["mixture"] / folder).mkdir()
        write_rows(paths["mixture"] / folder / "00000.parquet", samples, SAMPLE_SCHEMA)
    train = Counter(row["dataset"] for row in rows if row["split"] == "train")
    return {"datasets": {name: {"pairs": {"train": train[name]}} for name in params["ingest"]["datasets"]}}


def train(params: dict[str, Any], paths: dict[str, Path]) -> dict[str, Any]:
    from m3diff.records.files import sha256_of_folder

    cfg = params["train"]
    base = Path(params["train"]["base"])
    checkpoint = paths["model"] / "checkpoint"
    inputs = (paths["mixture"] / "train", paths["mixture"] / "val", base)
    digests = [sha256_of_folder(folder) for folder in inputs]
    settings = json.dumps([cfg, params["models"][cfg["model"]], digests])
    word = hashlib.sha256(settings.encode()).hexdigest()[:8]
    checkpoint.mkdir()
    (checkpoint / "word.txt").write_text(word)
    (checkpoint / "model.safetensors").write_text(word)
    files = {name: hashlib.sha256(word.encode()).hexdigest() for name in ("model.safetensors", "word.txt")}
    manifest = {"family": "m3diff", "base": str(base), "base_sha256": digests[2], "files": files}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with (paths["model"] / "curves.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["step", "epoch", "loss", "lr_llm", "grad_norm", "val_loss", "val_loss_minichange", "val_cider"])
        for step in (1, 2, 3):
            validation = (0.5, 0.6, 1.7) if step == 3 else ("", "", "")
            rows.writerow([step, step / 2, 1 / step, 0.1, step * 2, *validation])
    per_epoch = math.ceil(len(read_rows(paths["mixture"] / "train" / "00000.parquet")) / cfg["global_batch"])
    steps = math.ceil(cfg["epochs"] * per_epoch)
    return {"steps": steps, "rows_out": steps * cfg["global_batch"], "alignment": {}}


def predict(params: dict[str, Any], paths: dict[str, Path]) -> None:
    from m3diff.images.open import load_image
    from m3diff.models import generation

    captioner = generation.load_captioner(paths["model"] / "checkpoint", params["predict"]["max_new_tokens"])
    rows = []
    for sample in read_rows(paths["mixture"] / "test" / "00000.parquet"):
        pair = tuple(load_image(image["uri"]) for image in sample["images"])
        rows.append({"image_id": sample["id"], "caption": captioner.caption([pair])[0]})
    for file in ("predictions.json", "predictions_shuffled.json", "predictions_reversed.json"):
        (paths["predictions"] / file).write_text(json.dumps(rows))
    for file in ("predictions_retention.json", "predictions_base.json"):
        (paths["predictions"] / file).write_text("[]")
    (paths["predictions"] / "saliency.npz").write_bytes(b"maps")


def evaluate(params: dict[str, Any], paths: dict[str, Path]) -> None:
    (paths["report"] / "report.html").write_text("<p>The toy's report.</p>")
    (paths["report"] / "images").mkdir(exist_ok=True)
    (paths["report"] / "images" / "0.webp").write_bytes(b"image")
    cider = 1.0 + params["evaluate"]["gallery"] / 100
    rows = json.loads((paths["predictions"] / "predictions.json").read_text())
    pairs = [{"protocol": TOTAL, "id": row["image_id"], "CIDEr": cider} for row in rows]
    write_rows(paths["report"] / "scores.parquet", pairs)
    scores = {"CIDEr": cider, "SPICE": None, "intervals": {"CIDEr": {"low": 0.5, "high": 1.5}}}
    protocol = {"pairs": len(pairs), **scores, "by_type": {"color": {"CIDEr": 2.0}}}
    (paths["report"] / "metrics.json").write_text(json.dumps({"rows_out": len(pairs), "protocols": {TOTAL: protocol}}))
    (paths["report"] / "headline.json").write_text(json.dumps({TOTAL: {"CIDEr": round(100 * cider, 2)}}))


REPORT_FOLDERS = {"validate": "clean", "convert": "mixture", "train": "model", "predict": "predictions"}
"""Stages that write a `report.json`, and the name of its folder in `paths`."""


def main(stage: str, *dataset: str) -> None:
    """Run a stage: create the folders, write the declared outputs, and write a report if DVC expects one."""
    import yaml

    from m3diff.runtime import prepare

    prepare()
    if stage == "synthesize":  # only tests of this stage need it, and the import takes longer than a stage
        from m3diff.__main__ import die_with_parent

        die_with_parent()
    params = yaml.safe_load(Path("params.yaml").read_text())
    paths = {name: Path(path) for name, path in params["paths"].items()}
    for folder in paths.values():
        folder.mkdir(parents=True, exist_ok=True)
    print(f"toy {stage}", flush=True)
    from m3diff.provenance.dvc import require_unchanged_inputs

    with require_unchanged_inputs():
        facts = globals()[stage](params, paths, *dataset) or {}
        if stage in REPORT_FOLDERS:
            report = paths[REPORT_FOLDERS[stage]] / "report.json"
            report.write_text(json.dumps({"stage": stage} | facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
