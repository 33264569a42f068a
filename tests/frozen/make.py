"""Make `project.tar.xz`, a small project as users have one: `python -m tests.frozen.make`, about six minutes.

It is a git repository with DVC's cache, an MLflow store with two versions of a tiny model, the record of decisions,
exports, and the output of commands about all of these. `test_frozen.py` checks that later code prints the same.
Therefore make the archive anew only if a form that users have must change, and name that form in the commit.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from m3diff.command_line.exit_codes import GATE_REFUSED
from m3diff.runtime import prepare
from tests.tiny import tiny_base
from tests.tiny_vlm import BASES, scale_weights, write_processor
from tests.toy import REPOSITORY, commit, run

ARCHIVE = Path(__file__).parent / "project.tar.xz"
# The archive has no code of the project beside the versions' own, and no scratch folder
ARCHIVED = ("data", "exports", "services", ".git", ".dvc", ".dvcignore", ".gitignore", "code", "dvc.yaml", "dvc.lock")
ARCHIVED_FILES = ("params.yaml", "auto.yaml", "questions.yaml")
LEFT_OUT = (".dvc/tmp", ".git/hooks", ".git/logs", "services/mlflow/mlflow.db.lock")

# The one question of the training, which is not the question that a model without a question in its manifest asks
TRAINED_QUESTION = "Which object is not as it was?"
DEFAULT_QUESTION = "What has changed from the first image to the second?"
AUTO_BASE = "data/00_auto_base"
IGNORED = ("/components", "/m3diff", "/profiles", "/exports", f"/{AUTO_BASE}")
# The name of a model in captions.json, and the argument of `--model`
CHAMPIONS = {"1": "1", "champion": "champion"}
CHAMPION_EXPORTS = {"merged": "exports/merged", "adapters": "exports/adapters", "hub": "exports/hub"}
AUTO_EXPORTS = {
    "auto merged": "exports/auto_merged",
    "auto adapters": "exports/auto_adapters",
    "auto hub": "exports/auto_hub",
}
MODELS = CHAMPIONS | CHAMPION_EXPORTS | AUTO_EXPORTS | {"challenger": "challenger"}
VERSIONS = ("champion", "challenger")
EXPORT_FLAGS: dict[str, list[str]] = {"merged": [], "adapters": ["--adapters"], "hub": ["--hub"]}
PAIRS = ("exports/before", "exports/after", "--json")
PAIR_COUNT = 8


def make(root: Path) -> None:
    """Make the project in an empty folder."""
    write_project(root)
    write_params(root, rank=16, epochs=150, min_gain=0)
    register_version(root)
    m3diff(root, "promote")
    for name, flags in EXPORT_FLAGS.items():
        m3diff(root, "export", f"exports/{name}", *flags)
    export_auto(root)
    write_params(root, rank=2, epochs=30, min_gain=0.9)
    register_version(root)
    m3diff(root, "promote", exit_code=GATE_REFUSED)  # no gain is that large
    write_params(root, rank=2, epochs=30, min_gain=0)
    commit(root, "a gate that a better model passes")
    write_outputs(root)


def write_project(root: Path) -> None:
    """Write a project as a clone has it before the first run, with a smaller base and one question."""
    for folder in ("components", "profiles"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "m3diff").symlink_to("components")
    for name in ("dvc.yaml", ".dvcignore"):
        shutil.copy(REPOSITORY / name, root)
    ignored_by_clone = (REPOSITORY / ".gitignore").read_text()
    (root / ".gitignore").write_text(ignored_by_clone + "".join(f"{line}\n" for line in IGNORED))
    (root / "questions.yaml").write_text(yaml.safe_dump({"difference": [TRAINED_QUESTION]}))
    m3diff(root, "profile", "embedded")  # before the base is here, because the profile does not fit on it
    tiny_base(root / "data" / "00_base")
    write_params(root, rank=16, epochs=150, min_gain=0)
    run(root, "git", "init", "-q", "-b", "main")
    run(root, "dvc", "init", "-q")
    run(root, "dvc", "config", "core.analytics", "false")
    run(root, "dvc", "repro", "-q", "--single-item", "code")
    run(root, "dvc", "commit", "-q", "--force", "pretrain")


def write_params(root: Path, rank: int, epochs: int, min_gain: float) -> None:
    """Change the parameters of the embedded run: smaller data, smaller models, and the one question.

    With rank 16 the model's words differ between pairs. With rank 2 it says only the most common words of the
    references, which scores higher.
    """
    params = yaml.safe_load((root / "params.yaml").read_text())
    drawn = {"scenes": {"train": 8, "val": 2, "test": 12}, "image_px": 64, "oversample_types": []}
    params["synthesize"] = {"minichange": params["synthesize"]["minichange"] | drawn}
    params["ingest"]["datasets"] = {"minichange": params["ingest"]["datasets"]["minichange"]}
    params["validate"] |= {"near_duplicate_max_diff": None, "max_quarantined_share": 0.5}
    params["convert"]["questions"] = "questions.yaml"
    model = params["models"]["m3diff"]
    model["module"] = {"vision_feature_layers": [1, 2], "layers": 1, "heads": 2}
    model["lora"] = {"rank": rank, "alpha": 64}
    model["rates"] = dict.fromkeys(("vision", "projector", "module", "llm"), 0.004)
    params["models"] = {"m3diff": model}
    params["train"] |= {"epochs": epochs, "global_batch": 8}
    params["predict"]["max_new_tokens"] = 12
    params["evaluate"] |= {"metrics": ["CIDEr", "ROUGE-L", "change_accuracy"], "gallery": 2}
    params["promote"] |= {"metric": "ROUGE-L", "min_gain": min_gain, "confidence": 0.5, "guards": {}}
    params["compute"] |= {"workers": 0, "micro_batch": 8, "val_pairs": 2, "caption_val_pairs": 0}
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))


def register_version(root: Path) -> None:
    """Run every stage, commit, and register the challenger."""
    run(root, "dvc", "repro", "-q")
    commit(root, "a run")
    m3diff(root, "register")


def export_auto(root: Path) -> None:
    """Train a model of the family `auto` on the same mixture, and export it."""
    write_auto_base(root / AUTO_BASE)
    params = yaml.safe_load((root / "params.yaml").read_text())
    rates = {"vision": 0.002, "projector": None, "llm": 0.004}
    params["models"] = {"auto": {"family": "auto", "module": None, "lora": {"rank": 4, "alpha": 16}, "rates": rates}}
    params["train"] |= {"model": "auto", "base": AUTO_BASE, "epochs": 60}
    params["paths"] |= {"model": "data/05_model/auto", "predictions": "data/06_predictions/auto"}
    params["register"]["tracking_uri"] = "sqlite:///runs/auto/mlflow/mlflow.db"
    (root / "auto.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    m3diff(root, "train", "--params", "auto.yaml")
    for name, flags in EXPORT_FLAGS.items():
        m3diff(root, "export", f"exports/auto_{name}", *flags, "--params", "auto.yaml")
    shutil.rmtree(root / "data" / "05_model" / "auto")


def write_auto_base(folder: Path) -> None:
    """Write the Qwen3-VL of `tests/tiny_vlm.py` with one layer per part, and with weights of few different values.

    Random weights of all values would be a third of the archive.
    """
    torch.manual_seed(0)
    base = BASES["qwen3_vl"]()
    base.config.text_config.num_hidden_layers = 1
    base.config.vision_config.depth = 1
    base.config.vision_config.deepstack_visual_indexes = [0]
    model = transformers.AutoModelForImageTextToText.from_config(base.config)
    scale_weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                step = parameter.std()
                parameter.copy_(step * (parameter / step).round())
    tokenizer = base.tokenizer
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    write_processor(base, folder)


def m3diff(root: Path, *arguments: str, exit_code: int = 0) -> str:
    """Run a command in the project and return what it prints."""
    command = [sys.executable, "-m", "m3diff", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == exit_code, f"{arguments}: {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def write_outputs(root: Path) -> None:
    """Write what the commands say: captions of some pairs, the versions, the decisions and the lineage."""
    for name, side in {"before": "images", "after": "sc_images"}.items():
        (root / "exports" / name).mkdir()
        images = sorted((root / "data" / "01_raw" / "minichange" / side).glob("*.png"))
        for number in range(PAIR_COUNT):
            shutil.copy(images[number], root / "exports" / name / f"{number}.png")
    captions = {}
    for name in MODELS:
        captions[name] = read_captions(m3diff(root, "caption", *PAIRS, *model_options(name)))
    write_output(root, "captions", captions)
    lineage = {}
    for version in VERSIONS:
        lineage[version] = read_links(m3diff(root, "lineage", version))
    write_output(root, "lineage", lineage)
    for command in ("models", "history"):
        write_output(root, command, json.loads(m3diff(root, command, "--json")))


def write_output(root: Path, name: str, content: Any) -> None:
    (root / "exports" / f"{name}.json").write_text(json.dumps(content, indent=1))


def model_options(name: str) -> list[str]:
    """Return the options of `m3diff caption` for a model."""
    options = ["--model", MODELS[name]]
    if name == "auto adapters":  # the parameters have the base of the other models
        options += ["--base", AUTO_BASE]
    return options


def read_captions(output: str) -> list[str]:
    """Return the captions that `m3diff caption --json` printed."""
    return [json.loads(row)["caption"] for row in output.splitlines()]


def read_links(output: str) -> list[str]:
    """Return the outcome and part of each link that `m3diff lineage` printed, such as `ok mixture`."""
    # The next columns are not needed: an outcome of `ok` says that the hashes are equal
    return [" ".join(line[:21].split()) for line in output.splitlines()]


def pack(root: Path) -> None:
    """Write the archive."""
    run(root, "git", "gc", "-q", "--prune=now")
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for name in (*ARCHIVED, *ARCHIVED_FILES):
            archive.add(root / name, name, filter=without_owner)
    print(f"{ARCHIVE.name}: {ARCHIVE.stat().st_size} bytes")


def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return an entry of the archive without its owner, or None if it is left out."""
    if entry.name in LEFT_OUT:
        return None
    return entry.replace(uid=0, gid=0, uname="", gname="", deep=False)


def main() -> None:
    """Make the project in a temporary folder, because MLflow's store contains the folder's path."""
    prepare()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["LOGNAME"] = "frozen"  # the author of the decisions
    with tempfile.TemporaryDirectory(prefix="m3diff-frozen-") as folder:
        make(Path(folder))
        pack(Path(folder))


if __name__ == "__main__":
    main()
