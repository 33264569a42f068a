"""Run `m3diff` commands of a checkout in this process, first cold and then warm, and print the durations as JSON.

    FOLDER/.venv/bin/python -P run_stages.py '{"params": ..., "commands": [["validate"]], "outputs": [], "warm_runs": 0,
                                               "started": SECONDS}'

benchmarks/data.py starts this script in the folder of a checkout with the checkout's interpreter. `-P` keeps this
script's folder off the import path, so that `m3diff` is the package of that checkout.
"""

import hashlib
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

UNIT_OF_MAXRSS = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss in bytes: macOS reports bytes, Linux KiB


def run_commands_in_turn(order: dict[str, Any]) -> dict[str, Any]:
    """Run all commands once cold and then `warm_runs` times warm, in the given order.

    Args:
        order: a dictionary with the keys `params` (the parameter file), `commands` (argument lists), `outputs` (folders
            whose contents are hashed after each run), `warm_runs`, and `started` (when the caller started this process,
            in seconds since the epoch).

    Returns:
        A dictionary with the keys `cold_s` (seconds from the start of the process to the end of the cold run), `warm_s`
        (seconds of each warm run), `first_command_s` (seconds of the first command in each warm run), `digests` (a
        digest of the outputs for each run), `own_peak_mb` (peak memory of this process) and `package` (the folder of
        m3diff).
    """
    import m3diff
    from m3diff.__main__ import main as m3diff_main

    first_command_ends = []

    def run_commands() -> None:
        for position, command in enumerate(order["commands"]):
            exit_code = m3diff_main(["--params", order["params"], *command])
            assert exit_code == 0, f"m3diff {' '.join(command)}: exit code {exit_code}"
            if position == 0:
                first_command_ends.append(time.time())

    run_commands()
    cold_s = time.time() - order["started"]
    digests = [digest_folders(order["outputs"])]
    warm_s = []
    first_command_s = []
    for _ in range(order["warm_runs"]):
        start = time.time()
        run_commands()
        warm_s.append(time.time() - start)
        first_command_s.append(first_command_ends[-1] - start)
        digests.append(digest_folders(order["outputs"]))
    return {
        "cold_s": cold_s,
        "warm_s": warm_s,
        "first_command_s": first_command_s,
        "digests": digests,
        "own_peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT_OF_MAXRSS / 1e6,
        "package": str(Path(m3diff.__file__).resolve().parent),
    }


def digest_folders(folders: Sequence[str]) -> str:
    """Return the SHA-256 of the names and contents of all files in these folders, including subfolders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(json.dumps(run_commands_in_turn(json.loads(sys.argv[1]))))
