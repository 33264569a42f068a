"""Prepare a process for the libraries and programs that it will use.

`prepare` turns off the telemetry of all tools, keeps a local Ray instance off the network, and changes environment
variables and paths that some tools cannot handle. All entry points call `prepare` before they import any tools: the
command line, flows, services, Ray workers and the loader of a registered model. Child processes inherit the settings.
"""

import getpass
import hashlib
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from m3diff.records.errors import Fault

# Environment variables that turn off telemetry, update checks and advertising. Values set by the user are kept.
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

# Environment variables that would make git use another repository, or make MLflow use another registry than the
# tracking store
MISLEADING = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_IMPLICIT_WORK_TREE",
    "GIT_COMMON_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_PREFIX",
    "GIT_INTERNAL_SUPER_PREFIX",
    "GIT_CONFIG",
    "GIT_SHALLOW_FILE",
    "GIT_GRAFT_FILE",
    "GIT_REPLACE_REF_BASE",
    "GIT_NO_REPLACE_OBJECTS",
    "MLFLOW_REGISTRY_URI",
)

PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
NO_PROXY_VARIABLES = ("no_proxy", "NO_PROXY")
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")

# The paths of Ray's sockets are 68 bytes longer than the folder for temporary files. The system's limit is 107 bytes.
MAX_TEMPORARY_FOLDER_BYTES = 36


def prepare() -> None:
    """Prepare this process and its child processes, which inherit the environment. Further calls have no effect.

    Raises:
        SystemExit: a link or a home folder has to be created in a folder in /tmp, but this folder belongs to another
            user.
    """
    switch_telemetry_off()
    keep_ray_off_network()
    remove_misleading_variables()
    exempt_loopback_from_proxies()
    provide_home()
    provide_user_name()
    link_temporary_folders()
    link_python()


def switch_telemetry_off() -> None:
    """Set the environment variables in PRIVACY, except those that are already set."""
    for name, value in PRIVACY.items():
        os.environ.setdefault(name, value)


def keep_ray_off_network() -> None:
    """Set an environment variable so that a Ray instance started by this process listens only on 127.0.0.1.

    On Linux, Ray 2.60 replaces 127.0.0.1 by the machine's network address unless the variable is 0. On Windows and
    macOS, 0 is the default.
    """
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def remove_misleading_variables() -> None:
    """Remove the environment variables in MISLEADING. Git sets some of them for the processes that a hook starts."""
    for name in MISLEADING:
        os.environ.pop(name, None)


def exempt_loopback_from_proxies() -> None:
    """Exclude this machine from proxies, if any are set, because requests to local servers may contain credentials."""
    has_proxy = any(os.environ.get(name) or os.environ.get(name.upper()) for name in PROXY_VARIABLES)
    if not has_proxy:
        return
    exempt_hosts = []
    for name in NO_PROXY_VARIABLES:
        exempt_hosts += [host.strip() for host in os.environ.get(name, "").split(",") if host.strip()]
    if "*" in exempt_hosts:  # all hosts are already excluded
        return
    value = ",".join(dict.fromkeys([*exempt_hosts, *LOOPBACK_HOSTS]))
    for name in NO_PROXY_VARIABLES:
        os.environ[name] = value


def provide_home() -> None:
    """Make sure that tools have a home folder for their caches. Some tools fail on import without one.

    If the home folder is missing and cannot be created, set HOME to another folder. If the home folder is read-only,
    set the cache folders of the tools.
    """
    try:
        home = Path.home()
    except RuntimeError:  # HOME is not set, and the system does not know the user ID
        os.environ["HOME"] = str(private_folder())
        return
    with suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
    if not home.is_dir():
        os.environ["HOME"] = str(private_folder())
    elif not os.access(home, os.W_OK):  # keep HOME, because tools read settings and keys from it
        os.environ.setdefault("XDG_CACHE_HOME", str(private_folder() / "cache"))
        os.environ.setdefault("PREFECT_HOME", str(private_folder() / "prefect"))


def provide_user_name() -> None:
    """Set USER if the system does not know the user ID. DVC uses the user name in the path of its site cache."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid-{os.getuid()}"


def link_temporary_folders() -> None:
    """Use a short link as the folder for temporary files if its path is too long for a socket or needs quotes."""
    for name in ("TMPDIR", "RAY_TMPDIR"):
        folder = os.environ.get(name, "")
        is_too_long = len(os.fsencode(folder)) > MAX_TEMPORARY_FOLDER_BYTES
        if os.path.isdir(folder) and (is_too_long or needs_quotes(folder)):
            os.environ[name] = str(short_link(folder))


def link_python() -> None:
    """Use a link to Python's folder in `sys.executable` and `sys.path` if the path of the folder needs quotes.

    Ray 2.60 runs Python in a shell and DeepSpeed 0.19 runs a compiler in a shell, and neither quotes the path. This
    function can be removed when both quote paths.
    """
    if not needs_quotes(sys.prefix):
        return
    folder = sys.prefix + os.sep
    link = f"{short_link(sys.prefix)}{os.sep}"
    if sys.executable.startswith(folder):
        sys.executable = link + sys.executable.removeprefix(folder)
    sys.path = [link + path.removeprefix(folder) if path.startswith(folder) else path for path in sys.path]


def needs_quotes(path: str) -> bool:
    """Return whether a path must be quoted in a shell."""
    return shlex.quote(path) != path


def short_link(folder: str) -> Path:
    """Return a symbolic link to a folder, whose path is short and does not need quotes. Create missing links."""
    link = private_folder() / hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    with suppress(FileExistsError):
        link.symlink_to(folder)
    return link


def private_folder() -> Path:
    """Return this user's folder in /tmp, which other users cannot read. Create the folder if it is missing.

    Raises:
        SystemExit: the folder belongs to another user.
    """
    folder = Path("/tmp") / f"m3diff-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        sys.exit(f"m3diff: {Fault('command.folder_of_another_user', path=folder)}")
    return folder
