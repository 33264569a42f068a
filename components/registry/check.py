"""One line of a lineage: what is named, where it is, its hash, and whether all that bear this hash agree."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

Outcome = Literal["ok", "missing", "differs"]


class Check(BaseModel):
    model_config = ConfigDict(frozen=True)

    what: str  # a part of the chain, as `raw data` or `checkpoint`
    where: str
    hash: str
    outcome: Outcome
    note: str  # where it is kept, or what is wrong and the remedy

    def __str__(self) -> str:
        return f"{self.outcome:8} {self.what:12} {self.where:38} {self.hash:<12.12}  {self.note}".rstrip()


def sound(checks: Iterable[Check]) -> bool:
    return all(check.outcome == "ok" for check in checks)


def compared(what: str, where: Path | str, named: str | None, found: str | None, note: str = "") -> Check:
    """A hash that one place names and another has; None where it has none."""
    if named is None:
        return Check(
            what=what, where=str(where), hash=found or "", outcome="missing", note="the version does not name it"
        )
    if found is None:
        return Check(what=what, where=str(where), hash=named, outcome="missing", note=note or "not there")
    if named != found:
        return Check(
            what=what, where=str(where), hash=named, outcome="differs", note=f"{note or 'there'} is {found:.12}"
        )
    return Check(what=what, where=str(where), hash=named, outcome="ok", note=note)
