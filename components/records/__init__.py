"""The lowest layer: what flows between the stages, files, errors, progress; and lists of what lies in one module each
(datasets, model families, metrics)."""

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


class Lazy(UserDict[str, T]):
    """Objects by name, each imported from its module when it is first asked for.

    Whoever imports the list imports none of them, so that the code of a stage is its own and that of the names which
    the parameters give.
    """

    def __init__(self, attribute: str, modules: Mapping[str, str]) -> None:
        """
        Args:
            attribute: the name that the object has in its module.
            modules: dotted names of the modules, by the name of the object.
        """
        self.attribute, self.data = attribute, dict[str, Any](modules)

    def __getitem__(self, name: str) -> T:
        found: Any = self.data[name]
        return getattr(import_module(found), self.attribute) if isinstance(found, str) else found

    @property
    def modules(self) -> dict[str, str]:
        return {name: of if isinstance(of, str) else type(of).__module__ for name, of in self.data.items()}
