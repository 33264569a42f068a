"""Report what the import of a module changes in its process, apart from the changes by its libraries.

`python -m tests.import_effects libraries MODULE...` prints the names of the modules of other projects that the imports
load. `python -m tests.import_effects effects MODULE...`, with those names on stdin, loads them first. It then imports
the modules one after another and prints what each changed in the process, and what all of them changed in libraries.
Both print JSON.
"""

import importlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from typing import Any

OWN_PACKAGES = {"m3diff", "components", "flows", "tests"}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGPIPE)
# Attributes of a module in which Python and libraries keep count of what was used
BOOKKEEPING = ("__warningregistry__", "__builtins__", "__spec__", "__loader__")

State = dict[tuple[str, ...], Any]


def top_level(module: str) -> str:
    return module.partition(".")[0]


def is_library(module: str) -> bool:
    """Return whether a module belongs to another project, and not to Python."""
    package = top_level(module)
    return package not in OWN_PACKAGES and package not in sys.stdlib_module_names and not package.startswith("_")


def process_state() -> State:
    """Return environment, paths, open files, signal handlers and warning filters of this process."""
    state: State = {("os.environ", name): value for name, value in os.environ.items()}
    state["sys.path",] = tuple(sys.path)
    state["sys.executable",] = sys.executable
    state["sys.excepthook",] = sys.excepthook
    state["sys.stdout",] = sys.stdout
    state["warnings.filters",] = tuple(warnings.filters)
    for number in SIGNALS:
        state["signal", number.name] = signal.getsignal(number)
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            state["file descriptor", descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
    return state


def library_state() -> State:
    """Return the attributes of every loaded library: of its modules, their classes and their dictionaries."""
    state: State = {}
    for module_name, module in list(sys.modules.items()):
        if not is_library(module_name):
            continue
        for name, value in list(vars(module).items()):
            if name in BOOKKEEPING:
                continue
            state[module_name, name] = value
            if getattr(value, "__module__", None) == module_name:
                state |= {(module_name, name, *key): inner for key, inner in contents(value)}
    return state


def contents(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the attributes of a class, and the entries of the dictionaries among them."""
    if not isinstance(value, type):
        return
    for name, attribute in list(vars(value).items()):
        if name.startswith("__pydantic_") or name == "__signature__":  # pydantic completes a model at its first use
            continue
        yield (name,), attribute
        if type(attribute) is dict:
            for key, entry in attribute.items():
                yield (name, repr(key)), entry


def process_changes(before: State, after: State) -> list[str]:
    """Return the names of values that differ, or that only one of the states has."""
    return sorted(".".join(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def library_changes(before: State, after: State) -> list[str]:
    """Return the names of attributes that differ. New ones are no change, since libraries add them as they are used."""
    return sorted(".".join(name) for name in before if before[name] is not after.get(name))


def effects(libraries: list[str], modules: list[str]) -> dict[str, list[str]]:
    """Import the libraries, then the modules one after another.

    Returns:
        The changes of the process by module. The key `libraries` has the changes of all modules in the libraries.
        Modules and libraries without changes are left out.
    """
    for name in libraries:
        with suppress(ImportError):  # some parts of a library can only be imported after others
            importlib.import_module(name)
    libraries_before = library_state()
    changes_by_module: dict[str, list[str]] = {}
    for module in modules:
        process_before = process_state()
        importlib.import_module(module)
        changes_by_module[module] = process_changes(process_before, process_state())
    # Once for all modules, since it takes about a second
    changes_by_module["libraries"] = library_changes(libraries_before, library_state())
    return {name: changes for name, changes in changes_by_module.items() if changes}


def main(question: str, *modules: str) -> None:
    OWN_PACKAGES.update(map(top_level, modules))
    with redirect_stdout(sys.stderr):  # a library may print
        if question == "libraries":
            for module in modules:
                importlib.import_module(module)
            answer: Any = [name for name in list(sys.modules) if is_library(name)]
        else:
            answer = effects(json.load(sys.stdin), list(modules))
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
