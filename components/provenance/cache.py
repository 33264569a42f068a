"""Recognize links into DVC's cache.

With `cache.type symlink`, DVC moves each tracked file into its cache, where the file is called an object, and leaves a
link in its place. The cache may be in any folder. A file behind such a link belongs to the dataset that contains the
link.
"""

import os
import re
import subprocess
import sys
from functools import cache

# Path of an object in a cache. Its last two parts are the object's MD5. A cache of DVC 2 has no folder files/md5
OBJECT = re.compile(r"(.+?)(?:/files/md5)?/[0-9a-f]{2}/[0-9a-f]{30}")


def is_cached_object(path: str) -> bool:
    """Return whether a path is, or links to, an object in the DVC cache of the current directory's repository."""
    target = OBJECT.fullmatch(os.path.realpath(path))
    # Calling DVC takes a second, so call it only if the path looks like an object in a cache
    return target is not None and target[1] == _cache_of_repository(os.getcwd())


@cache
def _cache_of_repository(folder: str) -> str | None:
    """Return the real path of a repository's DVC cache.

    Return None if DVC is not installed or `folder` is not in a DVC repository. This module does not import
    `provenance.dvc`, because every change to that module would then count as a change to the code of a stage.
    """
    command = [sys.executable, "-m", "dvc", "cache", "dir"]
    result = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", errors="surrogateescape")
    if result.returncode != 0:
        return None
    return os.path.realpath(os.path.join(folder, result.stdout.strip()))
