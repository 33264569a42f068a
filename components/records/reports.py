"""What a stage did, in counts, for DVC's metrics and for people."""

import json
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from m3diff.records.files import write_atomic


class StageReport(BaseModel):
    """Counts of a stage. No clock time in it: equal inputs must give equal bytes (DVC's run cache)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    rows_in: int
    rows_out: int

    def write(self, path: Path) -> Self:
        """Write as indented JSON, whole or not at all."""
        write_atomic(path, json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n")
        return self
