"""A toy of the project: the real `dvc.yaml` and `params.yaml` over stages that write in no time what each declares.

`build(root)` makes it; inside it this file is `toy.py`, and `python toy.py <stage>` is the stage.
"""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAIRS = {f"minichange/{number:06d}.png": ("train", "val", "test", "test")[number] for number in range(4)}

MODEL = '''
from PIL import Image


class Captioner:
    """Says its word, what it is asked and the colour of the middle of each image, in so many characters at most."""

    def __init__(self, word, length):
        self.word, self.length = word, length

    def caption(self, pairs, question="What changed?"):
        return [self.say(question, before, after)[: self.length] for before, after in pairs]

    def say(self, question, before, after):
        return f"{self.word} {self.colour(before)} became {self.colour(after)}. {question}"

    def colour(self, image):
        return "%d/%d/%d" % image.getpixel((image.width // 2, image.height // 2))


def load_captioner(checkpoint, max_new_tokens=64):
    return Captioner((checkpoint / "word.txt").read_text(), max_new_tokens)


def load_image(path):
    return Image.open(path).convert("RGB")
'''

FRESH = """
import json, sys
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/m3diff@challenger")
import components.model
print(json.dumps([components.model.__file__, model.predict(json.loads(sys.argv[2]))]))
"""

FOLDERS = {
    "synthesize": "raw",
    "ingest": "records",
    "validate": "clean",
    "convert": "mixture",
    "train": "model",
    "predict": "captions",
    "evaluate": "report",
}


def build(root: Path) -> Path:
    """Write the toy project with git and DVC set up, nothing run yet."""
    ignore = shutil.ignore_patterns("__pycache__", *FOLDERS, "model")
    shutil.copytree(REPOSITORY / "components", root / "components", ignore=ignore)
    shutil.copytree(REPOSITORY / "flows", root / "flows", ignore=ignore)
    for name in ("params.yaml", "prefect.yaml", "prefect.toml", ".gitignore", ".dvcignore"):
        shutil.copy(REPOSITORY / name, root / name)
    shutil.copy(__file__, root / "toy.py")
    graph = (REPOSITORY / "dvc.yaml").read_text().replace("exec python -m components", f"exec {sys.executable} toy.py")
    (root / "dvc.yaml").write_text(graph)
    for stage in FOLDERS:
        (root / "components" / stage).mkdir()
        (root / "components" / stage / "stage.py").write_text(f'"""The toy\'s {stage}."""\n')
    (root / "components" / "model").mkdir()
    (root / "components" / "model" / "__init__.py").write_text(MODEL)
    run(root, "git", "init", "-q")
    run(root, "dvc", "init", "-q")
    run(root, "dvc", "config", "core.analytics", "false")
    commit(root, "toy")
    return root


def run(root: Path, tool: str, *arguments: str) -> str:
    """Run git or this environment's dvc in the project and give what it printed."""
    command = [sys.executable, "-m", "dvc"] if tool == "dvc" else [tool]
    done = subprocess.run([*command, *arguments], cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, f"{tool} {' '.join(arguments)}: {done.stdout}"
    return done.stdout


def commit(root: Path, message: str) -> None:
    run(root, "git", "add", "-A")
    run(
        root,
        "git",
        "-c",
        "user.name=toy",
        "-c",
        "user.email=toy@localhost",
        "commit",
        "-q",
        "--allow-empty",
        "-m",
        message,
    )


def load_and_caption(tracking_uri: str, rows: list[dict[str, str]], cwd: Path) -> tuple[str, list[str]]:
    """Load the challenger in a fresh process: the file that its code comes from, and its captions."""
    command = [sys.executable, "-c", FRESH, tracking_uri, json.dumps(rows)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code, captions = json.loads(done.stdout)
    return code, captions


def synthesize(cfg: dict, paths: dict[str, Path]) -> None:
    from PIL import Image

    for number in range(len(PAIRS)):
        for folder, red in (("images", 10), ("sc_images", 200)):
            (paths["raw"] / folder).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (red, number, cfg["seed"] % 256)).save(paths["raw"] / folder / f"{number}.png")
    (paths["raw"] / "grammar.json").write_text("{}")


def ingest(cfg: dict, paths: dict[str, Path]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "id": record,
            "split": split,
            "before": str(paths["raw"] / "images" / f"{number}.png"),
            "after": str(paths["raw"] / "sc_images" / f"{number}.png"),
            "captions": ["it became red"],
        }
        for number, (record, split) in enumerate(PAIRS.items())
    ]
    pq.write_table(pa.Table.from_pylist(rows), paths["records"] / "records.parquet")


def validate(cfg: dict, paths: dict[str, Path]) -> None:
    shutil.copy(paths["records"] / "records.parquet", paths["clean"])
    shutil.copy(paths["records"] / "records.parquet", paths["clean"] / "quarantine.parquet")
    (paths["clean"] / "docs").mkdir()
    (paths["clean"] / "docs" / "index.html").write_text("clean")


def convert(cfg: dict, paths: dict[str, Path]) -> None:
    (paths["mixture"] / "samples").mkdir()
    (paths["mixture"] / "samples" / "train-0.parquet").write_text(f"samples {cfg['seed']}")


def train(cfg: dict, paths: dict[str, Path]) -> None:
    (paths["model"] / "checkpoint").mkdir()
    (paths["model"] / "checkpoint" / "word.txt").write_text(f"seed {cfg['seed']}:")
    with (paths["model"] / "curves.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, ["step", "loss", "lr", "val_loss"], lineterminator="\n")
        rows.writeheader()
        rows.writerows({"step": s, "loss": 1 / s, "lr": 0.1, "val_loss": 0.5 if s == 3 else ""} for s in (1, 2, 3))


def predict(cfg: dict, paths: dict[str, Path]) -> None:
    from components.models.generation import load_captioner
    from components.models.images import load_image

    captioner = load_captioner(paths["model"] / "checkpoint", cfg["max_new_tokens"])
    rows = []
    for number, (record, split) in enumerate(PAIRS.items()):
        pair = tuple(load_image(paths["raw"] / side / f"{number}.png") for side in ("images", "sc_images"))
        if split == "test":
            rows.append({"image_id": record, "caption": captioner.caption([pair])[0]})
    for file in ("predictions.json", "predictions_shuffled.json"):
        (paths["captions"] / file).write_text(json.dumps(rows))
    (paths["captions"] / "saliency.npz").write_bytes(b"maps")


def evaluate(cfg: dict, paths: dict[str, Path]) -> None:
    (paths["report"] / "report.html").write_text("<p>The toy's report.</p>")
    (paths["report"] / "scores.parquet").write_bytes(b"scores")
    scores = {"CIDEr": 1.0 + cfg["gallery"] / 100, "SPICE": None, "change_types": {"color": {"CIDEr": 2.0}}}
    (paths["report"] / "metrics.json").write_text(json.dumps(scores))


def main(stage: str) -> None:
    """Run one stage: its folder exists, its declared outputs are written, and a report where DVC expects one."""
    import yaml

    from components.__main__ import die_with_parent

    die_with_parent()
    params = yaml.safe_load(Path("params.yaml").read_text())
    paths = {name: Path(path) for name, path in params["paths"].items()}
    folder = paths[FOLDERS[stage]]
    folder.mkdir(parents=True, exist_ok=True)
    print(f"toy {stage}", flush=True)
    globals()[stage](params[stage], paths)
    if stage not in ("synthesize", "evaluate"):
        (folder / "report.json").write_text(json.dumps({"stage": stage}))


if __name__ == "__main__":
    main(sys.argv[1])
