"""Check a dataset by running ingest and validate on it, with outputs in a temporary folder."""

import io
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from m3diff.commands.inspect.lines import list_examples, list_problems
from m3diff.records.errors import DataError
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import ingest
from m3diff.stages.validate.params import Validate
from m3diff.stages.validate.rules import LEAK_RULE
from m3diff.stages.validate.stage import check_records, find_rejection_faults
from m3diff.stages.validate.twins import LOOKS_THE_SAME

# Names of validate's rules that a row can violate because of a row in another split
RULES_BETWEEN_SPLITS = (LEAK_RULE, "id_unique", "scene_in_one_split")
MIN_PAIRS = 8  # a folder with fewer pairs is only an example of a layout, and cannot be used for training


@dataclass(frozen=True)
class StageLimits:
    """The settings that ingest and validate would use in the run for which a dataset is checked.

    image_cache: cache of facts about images. If it is None, a temporary cache is used.
    protocol: the protocol with which `m3diff promote` compares models. Its test pairs are required.
    """

    limits: Validate
    image_cache: Path | None = None
    protocol: str | None = None


# The limits of profiles/embedded.yaml, for callers that have not loaded any parameters
EMBEDDED_LIMITS = StageLimits(Validate(compare_px=100))


def judge_dataset(name: str, entry: DatasetEntry, stage_limits: StageLimits) -> tuple[list[str], bool]:
    """Run ingest and validate on a dataset, as if it were the only dataset in a run.

    Returns:
        Lines to print, and whether ingest and validate accept the dataset.
    """
    limits = stage_limits.limits
    protocol = stage_limits.protocol
    with tempfile.TemporaryDirectory() as folder:
        cache = stage_limits.image_cache or Path(folder) / "image_cache.parquet"
        records = Path(folder) / "records"
        # These paths are temporary, so messages show "embedded image" instead
        unpacked_images = f"{records / name / 'images'}/"
        try:
            # Ingest prints the rows that it skips, but `read_folder` has already listed them
            with redirect_stdout(io.StringIO()):
                ingest(name, entry, cache, records)
            check_results = check_records(limits, {name: entry}, cache, records)
        except DataError as error:
            return [f"  CANNOT BE USED {error}".replace(unpacked_images, "embedded image ")], False

        excused = _single_row_between_splits(check_results.quarantined_rows, check_results.records.height)
        bad_rows = check_results.quarantined_rows.join(excused, on="row", how="anti", maintain_order="left")
        results_without_excused = replace(check_results, quarantined_rows=bad_rows)
        refusals = find_rejection_faults(limits, {name: entry}, results_without_excused, protocol)
        # validate always allows a few invalid rows, even if their share is too large. The user should still fix them
        strict_refusals = find_rejection_faults(
            limits, {name: entry}, results_without_excused, protocol, rows_always_allowed=0
        )

    lines = []
    for finding in check_results.findings:
        lines += list_examples(finding.sentence, finding.first, finding.count)
    for reason in excused["reason"]:
        lines.append(f"  1 pair is left out, and validate stops if the share of such pairs is larger: {reason}")
    for refusal in refusals:
        rows_below = str(refusal).replace("\n", "\n  ")  # the refusal is indented itself
        lines.append(f"  NOT ACCEPTED {rows_below}")
    if not refusals:
        sources = check_results.records.select("source").with_row_index("row")
        lines += _quarantine_lines(bad_rows.join(sources, on="row"))
    return [line.replace(unpacked_images, "embedded image ") for line in lines], not strict_refusals


def _quarantine_lines(bad_rows: pl.DataFrame) -> list[str]:
    """Return lines about the invalid rows that validate allows.

    Args:
        bad_rows: rows with the columns `row`, `source` and `reason`.
    """
    reasons = bad_rows.sort("row").select("source", "reason").iter_rows()
    rows = [f"{source}: {reason}" for source, reason in reasons]
    return list_problems("rows that validate leaves out without stopping; correct or delete them", rows)


def _single_row_between_splits(bad_rows: pl.DataFrame, pair_count: int) -> pl.DataFrame:
    """Return the invalid row of a small example dataset, if there is only one and it conflicts with another split.

    Otherwise, return no rows. One row of so few pairs is a larger share than validate allows, but it proves nothing
    about the whole dataset.
    """
    breaks_other_rules = pl.col("rules").list.set_difference(list(RULES_BETWEEN_SPLITS)).list.len() > 0
    only_looks_the_same = pl.col("reason").str.contains(LOOKS_THE_SAME, literal=True)
    rows = bad_rows.filter(~breaks_other_rules, ~only_looks_the_same)
    is_excused = rows.height == bad_rows.height == 1 and pair_count < MIN_PAIRS
    return rows if is_excused else rows.clear()
