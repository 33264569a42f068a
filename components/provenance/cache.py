"""Links into DVC's cache.

With `cache.type symlink` DVC replaces each file that it tracks by a link to its object in the cache, which may lie
anywhere. What a dataset holds by such links is the dataset's own.
"""

import os
import re
import subprocess
import sys
from functools import cache

# Where an object lies in a cache: by its md5, and in caches of DVC 2 without the two folders
OBJECT = re.compile(r"(.+?)(?:/files/md5)?/[0-9a-f]{2}/[0-9a-f]{30}")


def is_cached_object(path: str) -> bool:
    """Return whether a path leads to an object in the DVC cache of the current directory's repository."""
    target = OBJECT.fullmatch(os.path.realpath(path))
    # DVC is asked, which takes a second, only if the path looks like an object of some cache
    return target is not None and target[1] == _own_cache(os.getcwd())


@cache
def _own_cache(folder: str) -> str | None:
    """The real path of a repository's cache, wherever DVC's settings put it; None without DVC or outside of one.

    `provenance.dvc` is not imported: the code of a stage would change with everything that DVC is used for.
    """
    command = [sys.executable, "-m", "dvc", "cache", "dir"]
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", errors="surrogateescape")
    return os.path.realpath(os.path.join(folder, done.stdout.strip())) if done.returncode == 0 else None
