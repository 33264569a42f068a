"""Check what a run needs of the machine before a minute is spent: `python3 infra/check_system.py`. A .venv that came
here with a copied or moved checkout is made this folder's own.

Standard library only and old syntax: it runs with whatever Python there is, to say which one is missing.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig

OLDEST, NEWEST = (3, 11), (3, 13)
PYTHON = "Python {}.{} to {}.{}".format(*OLDEST, *NEWEST)
VERSION = "{}.{}".format(*sys.version_info)

HEAD = "#!/bin/sh\n'''exec' {} \"$0\" \"$@\"\n' '''\n"
"""The first lines of a Python script, as pip writes them where a path has a space."""
OF_PYTHON = re.compile(rb"\A#!(/bin/sh\n'''exec' .*python.*\n' '''\n|.*python.*\n)")

PLACE = "a path without : and $"

NEEDS = {  # what a run needs, with why and the remedy
    PLACE: "move the checkout to another folder: PATH ends at the one, and setuptools reads a variable at the other",
    PYTHON: "Debian/Ubuntu: sudo apt install python3 python3-venv; macOS: brew install python@3.11; "
    "or name one: make PYTHON=/path/to/python3.11",
    "Python's venv": f"Debian/Ubuntu: sudo apt install python{VERSION}-venv",
    "Python's headers": f"for DeepSpeed's CPU communication; Debian/Ubuntu: sudo apt install python{VERSION}-dev",
    "Java 17": "for METEOR and the PTB tokenizer; Debian/Ubuntu: sudo apt install openjdk-17-jre-headless; "
    "macOS: brew install openjdk@17; then see that `java -version` answers",
    "git": "for DVC and the lineage of a model; Debian/Ubuntu: sudo apt install git; macOS: xcode-select --install",
    "a C++ compiler": "for DeepSpeed's CPU communication; Debian/Ubuntu: sudo apt install g++; "
    "macOS: xcode-select --install; or name one: export CXX=...",
    "symbolic links": "Python imports components/ through m3diff: git config core.symlinks true, then git checkout -- "
    "m3diff",
}


def java_major():
    """Major version that `java -version` reports; 0 where there is none or it does not answer."""
    try:
        answer = subprocess.run(["java", "-version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stdout.decode("utf-8", "replace"))
    return int(found.group(1)) if found and answer.returncode == 0 else 0


def missing():
    """Return what is missing: a list of (name, what was found instead)."""
    major, compiler = java_major(), os.environ.get("CXX", "g++")
    checks = [
        (PLACE, not re.search("[:$]", os.getcwd()), "found " + os.getcwd()),
        (PYTHON, OLDEST <= sys.version_info[:2] <= NEWEST, "found " + sys.version.split()[0] + " at " + sys.executable),
        ("Python's venv", importlib.util.find_spec("ensurepip") is not None, "no ensurepip in " + sys.executable),
        ("Python's headers", os.path.isfile(sysconfig.get_path("include") + "/Python.h"), "no Python.h"),
        ("Java 17", major >= 17, "found Java " + str(major) if major else "`java -version` does not answer"),
        ("git", shutil.which("git") is not None, "not on PATH"),
        ("a C++ compiler", shutil.which(compiler.split()[0]) is not None, "no " + compiler + " on PATH"),
        ("symbolic links", not os.path.isfile("m3diff"), "m3diff is a file"),
    ]
    return [(name, found) for name, fine, found in checks if not fine]


def adopt(venv):
    """Let the programs of a virtual environment that was made in another folder start the Python of this one, and have
    it installed again. Returns the other folder; None where it was made here."""
    if not os.path.isfile(venv + "/pyvenv.cfg"):
        return None
    with open(venv + "/pyvenv.cfg", encoding="utf-8") as file:
        made = re.search("^command = .* -m venv (?:--[a-z-]+ )*(.+)$", file.read(), re.MULTILINE)
    if made is None or made.group(1) == venv:
        return None
    head = HEAD.format(shlex.quote(venv + "/bin/python")).encode()
    for entry in [entry for entry in os.scandir(venv + "/bin") if entry.is_file(follow_symlinks=False)]:
        with open(entry.path, "rb") as file:
            text = file.read()
        if OF_PYTHON.match(text):
            with open(entry.path + ".new", "wb") as file:
                file.write(OF_PYTHON.sub(lambda old: head, text))
            shutil.copymode(entry.path, entry.path + ".new")
            os.replace(entry.path + ".new", entry.path)
    if os.path.exists(venv + "/.ready"):
        os.remove(venv + "/.ready")
    return made.group(1)


def main():
    faults = missing()
    for name, found in faults:
        print("check_system: needs " + name + ": " + found + "\n    " + NEEDS[name], file=sys.stderr)
    if faults:
        return 1
    other = adopt(os.path.join(os.getcwd(), ".venv"))
    if other:
        print("check_system: .venv was made in " + other + "; it is this folder's own now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
