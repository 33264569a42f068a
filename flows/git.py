"""git, as a flow calls it: with an identity of its own, no hooks and no signing, and errors that say what git said."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from m3diff.records.errors import DataError, redacted

AS_FLOW = (
    *("-c", "user.name=m3diff", "-c", "user.email=m3diff@localhost"),
    *("-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=off"),
)


class GitError(DataError):
    """git refused; the text is its own."""


def git(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """What git prints, without the last line's end.

    Raises:
        GitError: it ended with another code than 0.
    """
    done = subprocess.run(
        ["git", *AS_FLOW, *arguments], cwd=cwd, env=os.environ | (env or {}), capture_output=True, text=True
    )
    if done.returncode:
        raise GitError(redacted(f"git {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}"))
    return done.stdout.rstrip("\n")


def has_branch(name: str) -> bool:
    return bool(git("for-each-ref", "--format=%(refname)", f"refs/heads/{name}"))
