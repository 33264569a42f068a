"""Lists of what lies in one module each: datasets, model families, metrics."""

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import TypeVar

T = TypeVar("T")


class Lazy(MutableMapping[str, T]):
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
        self.attribute, self.modules = attribute, dict(modules)
        self._given: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name in self._given:
            return self._given[name]
        found: T = getattr(import_module(self.modules[name]), self.attribute)
        return found

    def __setitem__(self, name: str, value: T) -> None:
        self.modules.setdefault(name, type(value).__module__)
        self._given[name] = value

    def __delitem__(self, name: str) -> None:
        del self.modules[name]
        self._given.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)

    def __contains__(self, name: object) -> bool:
        return name in self.modules
