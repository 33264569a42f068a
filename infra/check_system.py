"""Check that this machine meets the requirements: `python3 infra/check_system.py`.

If all requirements are met, the script also repairs a .venv that was copied or moved with its checkout. The script uses
old syntax and only the standard library, so that any Python version can run it and report which version is required.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig

OLDEST = (3, 11)
NEWEST = (3, 13)
PYTHON = "Python {}.{} to {}.{}".format(*OLDEST, *NEWEST)
VERSION = "{}.{}".format(*sys.version_info)

# The first lines of a Python script, in the form that pip uses if the interpreter's path contains a space
SCRIPT_HEAD = "#!/bin/sh\n'''exec' {} \"$0\" \"$@\"\n' '''\n"
PYTHON_HEAD = re.compile(rb"\A#!(/bin/sh\n'''exec' .*python.*\n' '''\n|.*python.*\n)")

USABLE_PATH = "a path without : and $"

# Requirements, each with its remedy and, if it is not obvious, its reason
REMEDIES = {
    USABLE_PATH: "move the checkout to another folder: an entry of PATH ends at a colon, and setuptools reads a "
    "variable after a dollar sign",
    PYTHON: "Debian/Ubuntu: sudo apt install python3 python3-venv; macOS: brew install python@3.11; "
    "or choose one: make PYTHON=/path/to/python3.11",
    "Python's venv": f"Debian/Ubuntu: sudo apt install python{VERSION}-venv",
    "Python's headers": f"for DeepSpeed's CPU communication; Debian/Ubuntu: sudo apt install python{VERSION}-dev",
    "Java 17": "for METEOR and the PTB tokenizer; Debian/Ubuntu: sudo apt install openjdk-17-jre-headless; "
    "macOS: brew install openjdk@17; then check that `java -version` works",
    "git": "for DVC and the lineage of a model; Debian/Ubuntu: sudo apt install git; macOS: xcode-select --install",
    "a C++ compiler": "for DeepSpeed's CPU communication; Debian/Ubuntu: sudo apt install g++; "
    "macOS: xcode-select --install; or choose one: export CXX=...",
    "symbolic links": "Python imports components/ through m3diff: git config core.symlinks true, then git checkout -- "
    "m3diff",
}


def find_java_version():
    """Return the major version reported by `java -version`, or 0 if Java is missing or does not work."""
    try:
        java = subprocess.run(["java", "-version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    version = re.search(r'version "(?:1\.)?(\d+)', java.stdout.decode("utf-8", "replace"))
    return int(version.group(1)) if version and java.returncode == 0 else 0


def find_missing_requirements():
    """Return the requirements that are not met, as a list of pairs: the name and what was found instead."""
    major = find_java_version()
    compiler = os.environ.get("CXX", "g++")
    checks = [
        (USABLE_PATH, not re.search("[:$]", os.getcwd()), "found " + os.getcwd()),
        (PYTHON, OLDEST <= sys.version_info[:2] <= NEWEST, "found " + sys.version.split()[0] + " at " + sys.executable),
        ("Python's venv", importlib.util.find_spec("ensurepip") is not None, "no ensurepip in " + sys.executable),
        ("Python's headers", os.path.isfile(sysconfig.get_path("include") + "/Python.h"), "no Python.h"),
        ("Java 17", major >= 17, "found Java " + str(major) if major else "`java -version` does not work"),
        ("git", shutil.which("git") is not None, "not on PATH"),
        ("a C++ compiler", shutil.which(compiler.split()[0]) is not None, "no " + compiler + " on PATH"),
        ("symbolic links", not os.path.isfile("m3diff"), "m3diff is a file"),
    ]
    return [(name, finding) for name, is_met, finding in checks if not is_met]


def repair_moved_environment(venv):
    """Repair a virtual environment that was created in another folder: make its scripts run this environment's Python.

    The marker file `.ready` is removed, so that `make` installs the project again.

    Returns:
        The folder in which the environment was created, or None if nothing had to be repaired.
    """
    if not os.path.isfile(venv + "/pyvenv.cfg"):
        return None
    with open(venv + "/pyvenv.cfg", encoding="utf-8") as file:
        command = re.search("^command = .* -m venv (?:--[a-z-]+ )*(.+)$", file.read(), re.MULTILINE)
    if command is None or command.group(1) == venv:
        return None
    head = SCRIPT_HEAD.format(shlex.quote(venv + "/bin/python")).encode()
    scripts = [entry for entry in os.scandir(venv + "/bin") if entry.is_file(follow_symlinks=False)]
    for entry in scripts:
        with open(entry.path, "rb") as file:
            text = file.read()
        if PYTHON_HEAD.match(text):
            with open(entry.path + ".new", "wb") as file:
                file.write(PYTHON_HEAD.sub(lambda old_head: head, text))
            shutil.copymode(entry.path, entry.path + ".new")
            os.replace(entry.path + ".new", entry.path)
    if os.path.exists(venv + "/.ready"):
        os.remove(venv + "/.ready")
    return command.group(1)


def main():
    """Print each missing requirement with its remedy. If nothing is missing, repair a .venv that was moved.

    Returns:
        The exit status: 1 if a requirement is missing, otherwise 0.
    """
    missing_requirements = find_missing_requirements()
    for name, finding in missing_requirements:
        print("check_system: needs " + name + ": " + finding + "\n    " + REMEDIES[name], file=sys.stderr)
    if missing_requirements:
        return 1
    origin = repair_moved_environment(os.path.join(os.getcwd(), ".venv"))
    if origin:
        print("check_system: .venv was created in " + origin + " and has been repaired for this folder")
    return 0


if __name__ == "__main__":
    sys.exit(main())
