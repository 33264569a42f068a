"""The lowest layer of the package: records and samples, files, errors and progress.

It also contains `LazyMapping`, which looks up datasets, model families and metrics by name. Each of these objects is
defined in a separate module.
"""

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


class LazyMapping(UserDict[str, T]):
    """A mapping from names to objects. The module of an object is imported when the object is looked up.

    Importing the mapping does not import the modules of the objects. The digests of a stage's code therefore cover only
    the objects that the parameters name.
    """

    def __init__(self, attribute: str, modules: Mapping[str, str]) -> None:
        """Create a mapping.

        Args:
            attribute: name of the object in its module. All modules use the same name.
            modules: dotted name of each object's module, by name of the object.
        """
        self.attribute = attribute
        self.data = dict[str, Any](modules)

    def __getitem__(self, name: str) -> T:
        entry: Any = self.data[name]
        if isinstance(entry, str):
            return getattr(import_module(entry), self.attribute)
        return entry

    @property
    def modules(self) -> dict[str, str]:
        """Dotted name of each object's module, by name of the object."""
        return {name: entry if isinstance(entry, str) else type(entry).__module__ for name, entry in self.data.items()}
