"""m3diff's stages. Importing this package switches every tool's telemetry off, keeps a Ray of this machine's own off
the network, and sees to it that every tool can take the paths and the environment that it is given, before any tool is
imported. What this process starts inherits all of it.
"""

import getpass
import hashlib
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path

PRIVACY = {
    "DO_NOT_TRACK": "true",
    "DVC_NO_ANALYTICS": "1",
    "DVC_STUDIO_OFFLINE": "true",
    "ITERATIVE_DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "GX_ANALYTICS_ENABLED": "false",
}

# Variables that lead git to another repository than the project's, and MLflow to another registry than its store
ELSEWHERE = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_IMPLICIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"),
    *("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_INTERNAL_SUPER_PREFIX", "GIT_CONFIG"),
    *("GIT_SHALLOW_FILE", "GIT_GRAFT_FILE", "GIT_REPLACE_REF_BASE", "GIT_NO_REPLACE_OBJECTS", "MLFLOW_REGISTRY_URI"),
)

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Bytes of a folder for temporary files: Ray's sockets are 68 deeper, and the path of a socket has 107 at most
LONGEST = 36


def settle() -> None:
    """Drop what leads elsewhere, keep loopback off proxies, give a user without a home or a name one, and reach folders
    whose paths a tool cannot take by links that it can."""
    for name in ELSEWHERE:
        os.environ.pop(name, None)
    _pass_proxies_by()
    _have_home_and_name()
    for name in ("TMPDIR", "RAY_TMPDIR"):
        folder = os.environ.get(name, "")
        if os.path.isdir(folder) and (len(os.fsencode(folder)) > LONGEST or shlex.quote(folder) != folder):
            os.environ[name] = str(linked(folder))
    if shlex.quote(sys.prefix) != sys.prefix:  # Ray starts Python by a shell, and DeepSpeed a compiler, without quotes
        link = str(linked(sys.prefix))
        sys.executable, *sys.path = (
            link + path.removeprefix(sys.prefix) if path.startswith(sys.prefix + os.sep) else path
            for path in (sys.executable, *sys.path)
        )


def _pass_proxies_by() -> None:
    """Proxies stay for other machines; what is asked of this one, with a login perhaps, is no proxy's business."""
    if not any(os.environ.get(name) or os.environ.get(name.upper()) for name in PROXIES):
        return
    both = ("no_proxy", "NO_PROXY")
    given = [host.strip() for name in both for host in os.environ.get(name, "").split(",") if host.strip()]
    if "*" not in given:
        os.environ.update(dict.fromkeys(both, ",".join(dict.fromkeys([*given, *LOOPBACK]))))


def _have_home_and_name() -> None:
    """Tools keep caches in the home and fail as they are imported without one; DVC names a folder by the user."""
    try:
        home = Path.home()
        with suppress(OSError):
            home.mkdir(parents=True, exist_ok=True)
        if not home.is_dir():
            os.environ["HOME"] = str(own_folder())
        elif not os.access(home, os.W_OK):  # its settings and keys are read still
            os.environ.setdefault("XDG_CACHE_HOME", str(own_folder() / "cache"))
            os.environ.setdefault("PREFECT_HOME", str(own_folder() / "prefect"))
    except RuntimeError:  # no HOME, and a number that the system has no name for
        os.environ["HOME"] = str(own_folder())
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid-{os.getuid()}"


def linked(folder: str) -> Path:
    """A link to a folder, short and of letters that no shell reads as its own."""
    link = own_folder() / hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    with suppress(FileExistsError):
        link.symlink_to(folder)
    return link


def own_folder() -> Path:
    """A folder below /tmp that is this user's alone."""
    folder = Path("/tmp") / f"m3diff-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        sys.exit(f"m3diff: {folder} belongs to another user; have it removed")
    return folder


for _name, _value in PRIVACY.items():
    os.environ.setdefault(_name, _value)

if not os.environ.get("RAY_ADDRESS"):  # as on those systems: Ray then keeps to 127.0.0.1, where it is asked to
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

settle()
