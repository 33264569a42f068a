import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.commands.compare import as_text, compare
from m3diff.records.errors import DataError
from tests.scoring import bench
from tests.scoring.bench import evidence, gallery_of, table, write_scores


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: the second says of every pair that nothing changed."""
    root = tmp_path_factory.mktemp("compare")
    bench.write(root)
    pairs = bench.pairs(root)
    write_scores(evidence(root, pairs), root / "first")
    write_scores(evidence(root, [replace(pair, prediction="nothing changed") for pair in pairs]), root / "second")
    return root


def run(root: Path, out: Path, first: str = "first", second: str = "second"):
    return compare(root / first, root / second, root / "records", root / "clean", out / "compare.html")


def test_each_score_of_both_runs_stands_beside_the_gain_of_the_second(root: Path, tmp_path: Path):
    found = run(root, tmp_path)
    assert list(found) == ["toy/test"]
    rows = {row.name: [cell.text for cell in row.cells] for row in found["toy/test"].rows}
    assert rows["change_type_accuracy"] == ["66.7", "0.0", "-66.7"]
    assert rows["no_change_recall"] == ["50.0", "100.0", "+50.0"]
    assert found["toy/test"].columns == ("Score", "first", "second", "difference")
    page = (tmp_path / "compare.html").read_text()
    assert ["no_change_recall", "50.0", "100.0", "+50.0"] in table(page, "toy-test")
    data = gallery_of(page)
    assert data["runs"] == ["first", "second"]
    said = {pair["id"]: [caption["clauses"][0][0] for caption in pair["captions"]] for pair in data["pairs"]}
    assert said["toy/2"] == ["nothing changed", "nothing changed"]
    assert said["toy/5"] == ["the red cube at the left turned blue", "nothing changed"]
    assert all(image.startswith("data:") for pair in data["pairs"] for image in pair["images"] if image)
    assert [path.name for path in tmp_path.iterdir()] == ["compare.html"]
    lines = as_text("toy/test", found["toy/test"]).splitlines()  # columns of a terminal
    assert lines[0] == "toy/test"
    assert lines[1].split() == ["Score", "first", "second", "difference"]
    places = {line.index(re.search(r"(?<=  )[\d.]+", line)[0]) for line in lines[2:]}  # type: ignore[index]
    assert places == {lines[1].index("first")}
    back = {row.name: row.cells[2].text for row in run(root, tmp_path, "second", "first")["toy/test"].rows}
    assert (back["change_type_accuracy"], back["no_change_recall"]) == ("+66.7", "-50.0")


def test_what_cannot_be_compared_is_named(root: Path, tmp_path: Path):
    def refused(first: Path, second: Path, message: str) -> None:
        with pytest.raises(DataError, match=message):
            compare(first, second, root / "records", root / "clean", tmp_path / "x.html")

    first, other, pairs = root / "first", tmp_path / "other", bench.pairs(root)
    refused(first, root / "nowhere", r"nowhere: no such file; name the folder")
    some = write_scores(evidence(root, pairs[1:]), tmp_path / "some")
    refused(first, some, r"toy/test has 6 and 5 pairs, 1 of them in one run alone, such as toy/0")
    unknown = [replace(pair, id=pair.id.replace("toy/", "toy/9")) for pair in pairs]
    runs = [write_scores(evidence(root, unknown), tmp_path / name) for name in ("a", "b")]
    refused(*runs, r"records.parquet: no test pair toy/90, which both runs captioned")
    other.mkdir()
    scores = pq.read_table(first / "scores.parquet")
    for damaged, message in (
        (scores.set_column(0, "protocol", pa.array(["other/test"] * 6)), r"has toy/test: none is in both"),
        (pa.table({"id": ["toy/0"]}), r"no column protocol, prediction: an earlier version wrote it; run `m3diff eval"),
    ):
        pq.write_table(damaged, other / "scores.parquet")
        refused(first, other, message)


def test_runs_of_equal_names_are_called_by_their_paths(root: Path, tmp_path: Path):
    for name in ("one/report", "two/report"):
        write_scores(evidence(root, bench.pairs(root)), tmp_path / name)
    first, second = tmp_path / "one/report/scores.parquet", tmp_path / "two/report"
    found = compare(first, second, root / "records", root / "clean", tmp_path / "compare.html")
    assert found["toy/test"].columns[1:3] == (str(first.parent), str(second))
