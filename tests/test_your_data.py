"""The six steps of docs/your-data.md, each command as it stands there, on sixty pairs of a user's own.

In the place of the real base and its GPU stand the embedded ones; all else is as the page has it.
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
HERE = ("components", "flows", "profiles", "data/00_base", "dvc.yaml", "params.yaml", ".gitignore", "pyproject.toml")


def write_pairs(root: Path) -> None:
    """Sixty pairs as the page shows them: a square that moves or stays, in rooms of which no two look alike."""
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
        for side, left in (("before", 20), ("after", 60 if number % 3 else 20)):
            image = room.copy()
            ImageDraw.Draw(image).rectangle((left, 20, left + 30, 50), fill="red")
            (root / side).mkdir(parents=True, exist_ok=True)
            image.save(root / side / name)
        caption = "the red square moved to the right" if number % 3 else "nothing changed"
        split = "train" if number < 48 else "val" if number < 52 else "test"
        rows.append([f"before/{name}", f"after/{name}", caption, split])
    with (root / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def use_the_embedded_base(params: Path) -> None:
    """Model, training and machine of the embedded profile, two epochs of it; the data stay the user's."""
    values, embedded = (yaml.safe_load(path.read_text()) for path in (params, params.parent / "profiles/embedded.yaml"))
    for section in ("models", "train", "compute"):
        values[section] = embedded[section]
    values["train"]["epochs"] = 2
    params.write_text(yaml.safe_dump(values, sort_keys=False))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in HERE:
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "m3diff").symlink_to("components")
    run(tmp_path, "git init -q -b main && dvc init -q && dvc config core.analytics false")
    run(tmp_path, "git add -A && git commit -qm start")
    write_pairs(tmp_path / "data" / "01_raw" / "my-pairs")
    return tmp_path


def run(project: Path, commands: str) -> str:
    names = {f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(project)}
    shell = ["bash", "-euc", commands]
    environment = os.environ | path | names
    done = subprocess.run(shell, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.mark.slow(170)
def test_the_six_steps_lead_from_a_folder_of_pairs_to_a_caption_and_a_shared_folder(project: Path) -> None:
    assert [kind for kind, _ in BLOCKS] == ["bash", "yaml", *["bash"] * 7]
    (check, profile, read, look, train, caption, share, commit, back) = (text for _, text in BLOCKS)

    said = run(project, check)
    entry = re.search(r"^    (my-pairs: .*)$", said, re.MULTILINE)
    assert entry is not None
    assert entry[1] in profile, "the page has the entry that the check suggests"
    assert re.search(r"train +48 +48\n +val +4 +4\n +test +8 +8\n", said)

    (project / "profiles" / "mine.yaml").write_text(profile)
    said = run(project, read)
    assert "validate: rows in 60, rows out 60" in said
    assert (project / "data/01_raw/my-pairs.dvc").is_file()
    run(project, look)
    assert "my-pairs" in (project / "data/03_clean/statistics.html").read_text()

    use_the_embedded_base(project / "params.yaml")
    said = run(project, train)
    assert "tokens" in said
    assert "val_loss" in said
    assert "the red square moved" in (project / "data/07_report/report.html").read_text()
    said = run(project, caption)
    assert len(said.strip().splitlines()[-1]) > 0
    with Image.open(project / "seen.png") as seen:
        assert seen.width > 2 * 120
    run(project, share)
    shared = {file.name for file in (project / "shared/my-model").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "m3diff_model.py"} <= shared
    run(project, commit)
    assert run(project, "git status --porcelain --untracked-files=no") == ""
    assert "my-pairs" in (project / "params.yaml").read_text()
    run(project, back)
    assert (project / "params.yaml").read_text() == (project / "profiles/embedded.yaml").read_text()
    assert not (project / "profiles/mine.yaml").exists()
