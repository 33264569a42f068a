"""Test the six steps of docs/your-data.md with the commands of the page, on sixty pairs of a user.

The real base and its GPU are replaced by the embedded base and the CPU. Everything else is as on the page.
"""

import csv
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image, ImageDraw

from tests.toy import REPOSITORY

PAGE = (REPOSITORY / "docs" / "your-data.md").read_text()
BLOCKS = re.findall(r"^```(bash|yaml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FOLDERS = ("components", "flows", "profiles", "data/00_base")
FILES = ("dvc.yaml", "params.yaml", ".gitignore", "pyproject.toml")


def write_pairs(root: Path) -> None:
    """Write sixty pairs like those of the page: a square that moves or stays, in rooms that all look different."""
    rows = [["before", "after", "caption", "split"]]
    for number in range(60):
        draw = random.Random(number)
        room = Image.new("RGB", (120, 90), "white")
        name = f"{number:04}.png"
        for _ in range(12):
            x = draw.randrange(120)
            y = draw.randrange(90)
            color = tuple(draw.randrange(256) for _ in range(3))
            ImageDraw.Draw(room).rectangle((x - 25, y - 25, x + 25, y + 25), fill=color)
        shift = 10 + number if number % 3 else 0
        for side, x in (("before", 20), ("after", 20 + shift)):
            image = room.copy()
            ImageDraw.Draw(image).rectangle((x, 20, x + 30, 50), fill="red")
            (root / side).mkdir(parents=True, exist_ok=True)
            image.save(root / side / name)
        caption = f"the red square moved right by {shift} pixels" if number % 3 else "nothing changed"
        split = "train" if number < 48 else "val" if number < 52 else "test"
        rows.append([f"before/{name}", f"after/{name}", caption, split])
    with (root / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def use_the_embedded_base(params: Path) -> None:
    """Set the model, training and machine of the embedded profile, with two epochs. The data stay the user's."""
    values = yaml.safe_load(params.read_text())
    embedded = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    for section in ("models", "train", "compute"):
        values[section] = embedded[section]
    values["train"]["epochs"] = 2
    params.write_text(yaml.safe_dump(values, sort_keys=False))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in FOLDERS:
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    for name in FILES:
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "m3diff").symlink_to("components")
    run(tmp_path, "git init -q -b main && dvc init -q && dvc config core.analytics false")
    run(tmp_path, "git add -A && git commit -qm start")
    write_pairs(tmp_path / "data" / "01_raw" / "my-pairs")
    return tmp_path


def run(project: Path, commands: str) -> str:
    names = {}
    for person in ("AUTHOR", "COMMITTER"):
        names |= {f"GIT_{person}_NAME": "a@b.example", f"GIT_{person}_EMAIL": "a@b.example"}
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(project)}
    shell = ["bash", "-euc", commands]
    environment = os.environ | path | names
    done = subprocess.run(shell, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.mark.slow(170)
def test_the_six_steps_lead_from_a_folder_of_pairs_to_a_caption_and_a_shared_folder(project: Path) -> None:
    assert [kind for kind, _ in BLOCKS] == ["bash", "yaml", *["bash"] * 8]
    (check, profile, read, look, train, caption, score, share, commit, back) = (text for _, text in BLOCKS)

    output = run(project, check)
    entry = re.search(r"^    (my-pairs: .*)$", output, re.MULTILINE)
    assert entry is not None
    assert entry[1] in profile, "the page has the entry that the check suggests"
    assert re.search(r"train +48 +48\n +val +4 +4\n +test +8 +8\n", output)

    (project / "profiles" / "mine.yaml").write_text(profile)
    output = run(project, read)
    assert "validate: rows in 60, rows out 60" in output
    assert (project / "data/01_raw/my-pairs.dvc").is_file()
    run(project, look)
    assert "my-pairs" in (project / "data/03_clean/statistics.html").read_text()

    use_the_embedded_base(project / "params.yaml")
    output = run(project, train)
    assert "tokens" in output
    assert "val_loss" in output
    assert "the red square moved" in (project / "data/07_report/report.html").read_text()
    output = run(project, caption)
    assert len(output.strip().splitlines()[-1]) > 0
    with Image.open(project / "seen.png") as overlay:
        assert overlay.width > 2 * 120
    output = run(project, score)
    assert "CIDEr" in output
    run(project, share)
    shared = {file.name for file in (project / "shared/my-model").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "m3diff_model.py"} <= shared
    run(project, commit)
    assert run(project, "git status --porcelain --untracked-files=no") == ""
    assert "my-pairs" in (project / "params.yaml").read_text()
    run(project, back)
    assert (project / "params.yaml").read_text() == (REPOSITORY / "params.yaml").read_text()
    assert not (project / "profiles/mine.yaml").exists()
