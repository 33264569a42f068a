"""A Python that finds torch, transformers, safetensors, pillow, what they require, and no other package.

    python -P bare.py SCRIPT ARGUMENTS...

As an environment of these packages alone, out of one that has more: `importlib.metadata` says what they require, and
what belongs to another distribution, or is imported by path as this project may be, is not found.
"""

import importlib.metadata as metadata
import runpy
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ASKED = ("torch", "transformers", "safetensors", "pillow")


def required(asked: tuple[str, ...]) -> set[str]:
    """Distributions that are asked for and what they require, without extras, as far as it is installed."""
    found: set[str] = set()
    left = [canonicalize_name(name) for name in asked]
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        needs = [Requirement(line) for line in lines]
        left += [canonicalize_name(one.name) for one in needs if not one.marker or one.marker.evaluate({"extra": ""})]
    return found


def hidden(allowed: set[str]) -> set[str]:
    """Top-level modules of every other distribution."""
    owners = metadata.packages_distributions().items()
    return {top for top, names in owners if not {canonicalize_name(name) for name in names} & allowed}


class Finder:
    """What `PathFinder` finds, but for other distributions, their modules and modules of this project."""

    def __init__(self, allowed: set[str]) -> None:
        self.allowed = allowed
        self.hidden = hidden(allowed) | {"m3diff", "flows", "tests"}

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.hidden else PathFinder.find_spec(name, path, target)

    def find_distributions(self, context):
        for found in metadata.MetadataPathFinder.find_distributions(context):
            if canonicalize_name(found.metadata["Name"]) in self.allowed:
                yield found


if __name__ == "__main__":
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Finder(required(ASKED))]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
