"""Which versions: `make upgrade` resolves pyproject.toml anew, `make audit` asks for known vulnerabilities of the lock.

constraints.txt is the tested set: names and versions, for every extra, installed from whatever index a machine has.
infra/lock.txt is what an image or a team's machine installs, Linux on x86-64: the same versions with the hashes of
PyPI's files, torch's build for CUDA and what it needs included. Another index's build of torch has another hash: where
it is installed first, pip takes it as given and checks the rest.

    pip install --require-hashes --no-deps -r infra/lock.txt
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "infra" / "lock.txt"
UV, PIP_AUDIT = "uv==0.13.9", "pip-audit==2.10.1"
TESTED, TEAM = ("dev", "team", "cluster", "team-test"), ("team", "cluster")
OF_CUDA = ("nvidia-", "cuda-", "triton==")  # torch's own, where its build is for CUDA
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
"""Where the tested versions must resolve; the first of both is what the lock is for."""
MACOS = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
"""The oldest that torch has a build for."""
HEAD = "# The tested versions and the hashes of PyPI's files, extras `team` and `cluster`; written by infra/lock.py.\n"


class LockError(RuntimeError):
    """The tested set or the lock cannot be made or looked up; the text says why."""


def upgrade(tools: Path) -> None:
    """Take the newest versions that pyproject.toml allows; both files change or neither does."""
    constraints = pins(resolve(tools, TESTED))
    for python in PYTHONS[1:]:  # a newer one may need packages besides
        constraints = union(constraints, pins(resolve_with(tools, constraints, python)))
    with as_file(constraints) as tested:
        locked = lock(tools, tested)
    old = {canonical(line) for line in CONSTRAINTS.read_text().split()}
    CONSTRAINTS.write_text(constraints)
    LOCK.write_text(locked)
    new = [line for line in constraints.split() if canonical(line) not in old]
    print(f"{len(new)} version(s) changed: {' '.join(new) or 'none'}\nnext: make install test, then commit both files")


def resolve_with(tools: Path, constraints: str, python: str) -> str:
    with as_file(constraints) as tested:
        return resolve(tools, TESTED, "--constraints", str(tested), python=python)


@contextmanager
def as_file(text: str) -> Iterator[Path]:
    """A file that holds this while the block runs."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        yield Path(file.name)


def union(first: str, second: str) -> str:
    return "".join(f"{line}\n" for line in sorted({*first.split(), *second.split()}, key=str.lower))


def lock_tested(tools: Path) -> None:
    """The lock anew for the versions of constraints.txt, which stay."""
    LOCK.write_text(lock(tools, CONSTRAINTS))
    print(f"{LOCK.relative_to(ROOT)} is written for the versions of constraints.txt")


def lock(tools: Path, constraints: Path) -> str:
    return HEAD + resolve(tools, TEAM, "--generate-hashes", "--constraints", str(constraints))


def resolve(
    tools: Path, extras: tuple[str, ...], *options: str, python: str = PYTHONS[0], platform: str = PLATFORMS[0]
) -> str:
    """A requirements file of everything that the project needs with these extras.

    Args:
        platform: as uv writes it: CPU and C library, or system.

    Raises:
        LockError: no set of versions fits, or the index does not answer.
    """
    command = [
        install(tools, UV) / "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--no-config",
        "--system-certs",
    ]
    for extra in extras:
        command += ["--extra", extra]
    command += ["--python-version", python, "--python-platform", platform, *options, "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | MACOS)
    if done.returncode:
        raise LockError(f"the versions could not be resolved, nothing is changed:\n{done.stderr.strip()}")
    return done.stdout


def pins(requirements: str) -> str:
    """Names and versions alone, without what only a build of torch for CUDA brings."""
    lines = [line.strip() for line in requirements.splitlines() if "==" in line]
    return "".join(f"{line}\n" for line in sorted(lines, key=str.lower) if not line.startswith(OF_CUDA))


def canonical(line: str) -> str:
    """One spelling for a line of constraints.txt: pip takes Flask_WTF for flask-wtf."""
    name, equals, version = line.partition("==")
    return re.sub(r"[-_.]+", "-", name).lower() + equals + version


def audit(tools: Path) -> None:
    """Ask PyPI for known vulnerabilities of each locked version.

    Raises:
        LockError: there are some, or a package could not be looked up: what was not asked for is not safe.
    """
    command = [install(tools, PIP_AUDIT) / "pip-audit", "--disable-pip", "--no-deps", "--format", "json"]
    done = subprocess.run([*command, "-r", str(LOCK)], capture_output=True, text=True)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (json.JSONDecodeError, KeyError) as error:
        raise LockError(f"pip-audit had no answer, so nothing is known; is PyPI reachable?\n{done.stderr}") from error
    print(judge(packages))


def judge(packages: list[dict]) -> str:
    """What pip-audit found, in a line.

    Raises:
        LockError: a vulnerability, or a package that was not looked up.
    """
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if skipped or not packages:
        raise LockError(
            f"{len(skipped)} of {len(packages)} packages could not be looked up ({', '.join(skipped[:5])} ...), so "
            "nothing is known of them; is https://pypi.org reachable from here?"
        )
    found = [
        f"{package['name']} {package['version']}: {fault['id']}, fixed in {', '.join(fault['fix_versions']) or 'none'}"
        for package in packages
        for fault in package["vulns"]
    ]
    if found:
        raise LockError("\n  ".join([f"{len(found)} known vulnerabilities; `make upgrade` where one is fixed", *found]))
    return f"no known vulnerability in {len(packages)} packages"


def install(tools: Path, requirement: str) -> Path:
    """A tool in an environment of its own, so that no version of the project changes; where its programs lie."""
    if not (tools / "bin" / "pip").exists():
        venv.create(tools, with_pip=True)
    pip = [str(tools / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", requirement]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        raise LockError(f"{requirement} could not be installed:\n{done.stderr.strip()}")
    return tools / "bin"


def main(what: str) -> int:
    with tempfile.TemporaryDirectory() as tools:
        try:
            {"upgrade": upgrade, "lock": lock_tested, "audit": audit}[what](Path(tools))
        except LockError as error:
            print(f"make {what}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
