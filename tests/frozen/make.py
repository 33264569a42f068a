"""Makes `project.tar.xz`, a small project as users have one: `python -m tests.frozen.make`, about four minutes.

It was made once and stays: what it holds must go on working. It is a git repository with DVC's cache, an MLflow store
with two versions of a tiny model, the record of decisions, exports, and what `m3diff caption` said of each.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import yaml

from tests.tiny import tiny_base
from tests.toy import REPOSITORY, commit, run

ARCHIVE = Path(__file__).parent / "project.tar.xz"
FROZEN = ("data/00_base", "exports", "services", ".git", ".dvc", ".gitignore", "params.yaml", "dvc.yaml", "dvc.lock")
LEFT_OUT = (".dvc/tmp", ".git/hooks", "services/mlflow/mlflow.db.lock")
MODELS = {"1": "1", "champion": "champion", "merged": "exports/merged", "adapters": "exports/adapters"}
MODELS |= {"hub": "exports/hub", "challenger": "challenger"}


def make(root: Path) -> None:
    for folder in ("components", "profiles"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "m3diff").symlink_to("components")
    shutil.copy(REPOSITORY / "dvc.yaml", root)
    ignored = (
        "components/*",
        "!/components/models",
        "profiles",
        "m3diff",
        "data/*",
        "!/data/00_base",
        "exports",
        "services",
        "runs",
    )
    (root / ".gitignore").write_text("".join(f"{line if line[0] == '!' else f'/{line}'}\n" for line in ignored))
    tiny_base(root / "data" / "00_base")
    write_params(root, rank=16, epochs=150, min_gain=0)
    run(root, "git", "init", "-q", "-b", "main")
    run(root, "dvc", "init", "-q")
    run(root, "dvc", "config", "core.analytics", "false")
    run(root, "dvc", "commit", "-q", "--force", "pretrain")
    version(root)
    m3diff(root, "promote")
    for name, how in {"merged": [], "adapters": ["--adapters"], "hub": ["--hub"]}.items():
        m3diff(root, "export", f"exports/{name}", *how)
    write_params(root, rank=2, epochs=30, min_gain=0.9)
    version(root)
    m3diff(root, "promote", expect=4)  # refused: no gain is so large
    write_params(root, rank=2, epochs=30, min_gain=0)
    commit(root, "a gate that a better model passes")
    freeze(root)


def write_params(root: Path, rank: int, epochs: int, min_gain: float) -> None:
    """The embedded run in small. Of rank 16 the model says words that differ with the pair; of rank 2 only the
    references' commonest, which scores higher."""
    params = yaml.safe_load((REPOSITORY / "profiles" / "embedded.yaml").read_text())
    drawn = params["synthesize"]["minichange"] | {"scenes": {"train": 8, "val": 2, "test": 12}, "image_px": 64}
    params["synthesize"] = {"minichange": drawn | {"oversample_types": []}}
    params["ingest"]["datasets"] = {"minichange": params["ingest"]["datasets"]["minichange"]}
    params["validate"] |= {"near_duplicate_max_diff": None, "max_quarantined_share": 0.5}
    params["models"]["m3diff"]["module"] = {"vision_feature_layers": [1, 2], "layers": 1, "heads": 2}
    params["models"]["m3diff"]["lora"] = {"rank": rank, "alpha": 64}
    params["models"]["m3diff"]["rates"] = dict.fromkeys(("vision", "projector", "module", "llm"), 0.004)
    params["train"] |= {"epochs": epochs, "global_batch": 8}
    params["predict"] |= {"max_new_tokens": 12, "control_pairs": 0}
    params["evaluate"] |= {"metrics": ["CIDEr", "ROUGE-L", "change_accuracy"]}
    params["promote"] |= {"metric": "ROUGE-L", "min_gain": min_gain, "confidence": 0.6, "guards": {}}
    params["compute"] |= {"workers": 0, "micro_batch": 8, "val_pairs": 2, "caption_val_pairs": 0}
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))


def version(root: Path) -> None:
    """Run every stage, commit, and register the challenger."""
    run(root, "dvc", "repro", "-q")
    commit(root, "a run")
    m3diff(root, "register")


def m3diff(root: Path, *arguments: str, expect: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "m3diff", *arguments], cwd=root, capture_output=True, text=True)
    assert done.returncode == expect, f"{arguments}: {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def freeze(root: Path) -> None:
    """What the command line says today: captions of eight pairs, the versions, the decisions."""
    for name, side in {"before": "images", "after": "sc_images"}.items():
        (root / "exports" / name).mkdir()
        images = sorted((root / "data" / "01_raw" / "minichange" / side).glob("*.png"))
        for number in range(8):
            shutil.copy(images[number], root / "exports" / name / f"{number}.png")
    pairs = ("exports/before", "exports/after", "--json")
    said = {name: m3diff(root, "caption", *pairs, "--model", model) for name, model in MODELS.items()}
    captions = {name: [json.loads(row)["caption"] for row in rows.splitlines()] for name, rows in said.items()}
    (root / "exports" / "captions.json").write_text(json.dumps(captions, indent=1))
    for command in ("models", "history"):
        (root / "exports" / f"{command}.json").write_text(m3diff(root, command, "--json"))


def pack(root: Path) -> None:
    """Write the frozen part of the project: no code but the commit's components/models, no data outside the cache."""
    run(root, "git", "gc", "-q", "--prune=now")
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for name in FROZEN:
            archive.add(root / name, name, filter=lambda entry: None if entry.name in LEFT_OUT else entry)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size} bytes")


def main() -> None:
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    root = REPOSITORY / "runs" / "frozen"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    make(root)
    pack(root)


if __name__ == "__main__":
    main()
