"""Test the wheel that pip builds from the project, installed with one extra into an empty environment."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from m3diff.models.generation import load_captioner
from tests.servers import free_port
from tests.serving.toy import Running, form, png
from tests.tiny import noise_image, tiny_base, tiny_checkpoint
from tests.toy import REPOSITORY

SOURCES = ("components", "profiles", "infra/wheel_backend.py", "pyproject.toml", "README.md", "LICENSE")


def tracked_files(*paths: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *paths]
    lines = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\n")
    return [path for path in lines if path and (REPOSITORY / path).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wheel")
    for path in tracked_files(*SOURCES):
        (root / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, root / "source" / path)
    (root / "source" / "m3diff").symlink_to("components")
    (root / "source" / "components" / "_profiles").symlink_to("../profiles")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(root)]
    subprocess.run([*build, str(root / "source")], check=True)
    (wheel_file,) = root.glob("*.whl")
    return wheel_file


Install = Callable[[str], Path]


@pytest.fixture
def install(wheel: Path, tmp_path: Path) -> Install:
    """Return a function that installs the wheel and an extra in the tested versions, and returns the path of m3diff."""

    def make_environment(extra: str) -> Path:
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
        pip = [str(tmp_path / "venv/bin/pip"), "install", "-q", "-c", str(REPOSITORY / "constraints.txt")]
        subprocess.run([*pip, f"{wheel}[{extra}]"], check=True, env=environment())
        return tmp_path / "venv/bin/m3diff"

    return make_environment


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(program: Path, folder: Path, *arguments: object) -> subprocess.CompletedProcess:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)


def test_the_wheel_contains_every_file_of_the_package_and_the_profiles(wheel):
    """Flows, dvc.yaml and services are only in a checkout."""
    wheel_files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {path.replace("components/", "m3diff/", 1) for path in tracked_files("components")}
    profiles = {path.replace("profiles/", "m3diff/_profiles/") for path in tracked_files("profiles")}
    assert wheel_files == package | profiles


def test_a_build_leaves_no_folder_in_the_source(wheel):
    """Only setuptools' metadata stays, which git ignores."""
    names = {path.name for path in (wheel.parent / "source").iterdir()}
    assert names - {Path(source).parts[0] for source in SOURCES} == {"m3diff", "m3diff.egg-info"}


@pytest.mark.slow(95)
def test_the_extra_serve_captions_a_pair_on_the_command_line_and_over_http(install, tmp_path):
    m3diff = install("serve")
    checkpoint = tiny_checkpoint(tiny_base(tmp_path / "base"), tmp_path / "checkpoint")
    images = [noise_image(number, (60, 44)) for number in (1, 2)]
    for name, image in zip("ab", images, strict=True):
        image.save(tmp_path / f"{name}.png")
    limit = 12
    (caption,) = load_captioner(checkpoint, limit).caption([(images[0], images[1])])
    (tmp_path / "extended.yaml").write_text(f"extends: embedded\npredict:\n  max_new_tokens: {limit}\n")
    shutil.copy(REPOSITORY / "profiles/embedded.yaml", tmp_path)
    options = ("--params", "extended.yaml")
    result = run(m3diff, tmp_path, *options, "caption", "a.png", "b.png", "--model", checkpoint, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["caption"] == caption
    assert run(m3diff, tmp_path, "caption", "a.png", "b.png", "--model", checkpoint).returncode == 0
    port = free_port()
    log = tmp_path / "serve.log"
    line = [str(m3diff), *options, "serve", "--model", str(checkpoint), "--port", str(port)]
    with log.open("w") as out:
        pipes = {"stdout": out, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(line, cwd=tmp_path, env=environment(), start_new_session=True, **pipes)
    server = Running(process, port, log, tmp_path)
    try:
        server.wait_for(" answers with ")
        answer = httpx.post(f"{server.address}/caption", **form(png(images[0]), png(images[1])), timeout=60)
        assert answer.status_code == 200
        assert answer.json()["caption"] == caption
        assert "before" in httpx.get(server.address).text, "the page is in the wheel"
    finally:
        server.stop()
