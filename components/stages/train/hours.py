"""What a run has taken so far, over all its attempts: its seconds, and those of its devices."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from m3diff.records.files import write_atomic

HOURS = "hours.json"


@dataclass(frozen=True)
class Spent:
    """Seconds of steps and validation, those of them that waited for data, those of every worker's device, and captions
    seen, again after a resume too. What an attempt took after its last checkpoint is in none of them."""

    seconds: float = 0.0
    waited: float = 0.0
    device_seconds: float = 0.0
    captions: int = 0

    def plus(self, seconds: float, waited: float, devices: int, captions: int) -> "Spent":
        """With what another attempt took on so many devices."""
        return Spent(
            self.seconds + seconds,
            self.waited + waited,
            self.device_seconds + seconds * devices,
            self.captions + captions,
        )


def read_spent(run_dir: Path) -> Spent:
    """What earlier attempts took."""
    file = run_dir / HOURS
    return Spent(**json.loads(file.read_text())) if file.is_file() else Spent()


def write_spent(run_dir: Path, spent: Spent) -> None:
    write_atomic(run_dir / HOURS, json.dumps(asdict(spent)) + "\n")
