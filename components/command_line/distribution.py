"""Handle the differences between a checkout and an installed wheel: version, profiles, default parameters, remedies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from m3diff.command_line.command import Command
from m3diff.records import installation
from m3diff.records.errors import Fault

if TYPE_CHECKING:
    from m3diff.settings.tree import Params

PARAMS_FILE = Path("params.yaml")


def describe_version() -> str:
    """Return the version. For a checkout, also include the commit and whether tracked files were changed."""
    text = f"m3diff {installation.version_number()}"
    if not installation.is_checkout():
        return text
    from m3diff.provenance.git import GitError, git

    try:
        commit = git("rev-parse", "--short=12", "HEAD", cwd=installation.root())
        changes = git("status", "--porcelain", "--untracked-files=no", cwd=installation.root())
    except GitError:  # the repository is missing, or git is not installed
        return text
    return f"{text}, commit {commit}{' with uncommitted changes' if changes else ''}"


def fault_of_missing_package(module: str, extra: str) -> Fault:
    """Return the fault for a package that a command requires but that is not installed. It names the install command.

    Args:
        module: the module that could not be imported, such as `pycocoevalcap.cider.cider`.
        extra: the extra of this package that installs the module.
    """
    package = module.partition(".")[0]
    command = installation.install_command(extra)
    return Fault("command.missing_package", package=package, command=command, python=sys.executable)


def find_profiles_folder() -> Path:
    """Return the folder with the profiles: `profiles` in the working directory, or else the folder in the wheel."""
    folder = Path("profiles")
    return folder if folder.is_dir() or installation.is_checkout() else installation.PROFILES


def load_parameters(path: Path, command: Command) -> Params:
    """Load the parameters in `path`.

    If `path` is the default and does not exist, a command with optional parameters uses the profile `embedded`, which
    every installation contains.

    Raises:
        ParamsError: the file is missing or invalid.
    """
    from m3diff.settings.load import load_params

    if command.parameters == "optional" and path == PARAMS_FILE and not path.is_file():
        path = installation.PROFILES / "embedded.yaml"
    return load_params(path)
