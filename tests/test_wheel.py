"""The wheel that pip builds of the project, installed with one extra into an environment that has nothing else."""

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

BUILT_OF = ("components", "profiles", "infra/wheel_backend.py", "pyproject.toml", "README.md", "LICENSE")


def tracked(*places: str) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *places]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\n")
    return [path for path in listed if path and (REPOSITORY / path).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wheel")
    for path in tracked(*BUILT_OF):
        (root / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, root / "source" / path)
    (root / "source" / "m3diff").symlink_to("components")
    (root / "source" / "components" / "_profiles").symlink_to("../profiles")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(root)]
    subprocess.run([*build, str(root / "source")], check=True)
    (made,) = root.glob("*.whl")
    return made


Install = Callable[[str], Path]


@pytest.fixture
def install(wheel: Path, tmp_path: Path) -> Install:
    """Makes an environment with the wheel and an extra, in the tested versions; gives its `m3diff`."""

    def make(extra: str) -> Path:
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
        pip = [str(tmp_path / "venv/bin/pip"), "install", "-q", "-c", str(REPOSITORY / "constraints.txt")]
        subprocess.run([*pip, f"{wheel}[{extra}]"], check=True, env=environment())
        return tmp_path / "venv/bin/m3diff"

    return make


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(program: Path, folder: Path, *arguments: object) -> subprocess.CompletedProcess:
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)


def test_the_wheel_holds_every_file_of_the_package_and_the_profiles(wheel):
    """Flows, dvc.yaml and services are a checkout's."""
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {path.replace("components/", "m3diff/", 1) for path in tracked("components")}
    profiles = {path.replace("profiles/", "m3diff/_profiles/") for path in tracked("profiles")}
    assert inside == package | profiles


def test_a_build_leaves_no_folder_in_the_source(wheel):
    """setuptools' metadata stays, which git ignores."""
    left = {path.name for path in (wheel.parent / "source").iterdir()}
    assert left - {Path(place).parts[0] for place in BUILT_OF} == {"m3diff", "m3diff.egg-info"}


@pytest.mark.slow(180)
def test_with_the_extra_serve_a_pair_is_captioned_by_the_shell_and_over_http(install, tmp_path):
    m3diff = install("serve")
    checkpoint = tiny_checkpoint(tiny_base(tmp_path / "base"), tmp_path / "checkpoint")
    images = [noise_image(number, (60, 44)) for number in (1, 2)]
    for name, image in zip("ab", images, strict=True):
        image.save(tmp_path / f"{name}.png")
    limit = 12
    (want,) = load_captioner(checkpoint, limit).caption([(images[0], images[1])])
    (tmp_path / "extended.yaml").write_text(f"extends: embedded\npredict:\n  max_new_tokens: {limit}\n")
    shutil.copy(REPOSITORY / "profiles/embedded.yaml", tmp_path)
    options = ("--params", "extended.yaml")
    told = run(m3diff, tmp_path, *options, "caption", "a.png", "b.png", "--model", checkpoint, "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["caption"] == want
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
        assert answer.json()["caption"] == want
        assert "before" in httpx.get(server.address).text, "the page is in the wheel"
    finally:
        server.stop()
