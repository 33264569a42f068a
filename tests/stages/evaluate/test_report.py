"""Tables, LaTeX, CSV, gallery and the page of evaluate."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.commands.compare import as_text, compare
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Licence, Permission, Protocol
from m3diff.images.saliency import outlined
from m3diff.records.errors import DataError
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.metrics import METRICS
from m3diff.scoring.pairs import published_rows
from m3diff.scoring.run import ProtocolScores
from m3diff.stages.evaluate import report
from m3diff.stages.evaluate.report import (
    Cell,
    Evidence,
    ImageRights,
    Row,
    Table,
    as_webp,
    caption_of,
    draw_images,
    link_images,
    load_small,
    read_saliency,
    write_report,
)
from tests.scoring import bench
from tests.scoring.bench import draw, evidence, gallery_of, table, text_of, write_scores


def scores(pairs: int = 4, of: int | None = None, groups: dict | None = None, **values: float | None) -> ProtocolScores:
    interval = {"CIDEr": Interval(low=0.25, high=0.75)}
    named = {name.replace("_", "-"): value for name, value in values.items()}
    return ProtocolScores(
        pairs=pairs, published_pairs=of, scores=named, intervals=interval, groups=groups or {}, absent={}
    )


def texts(table: Table) -> list[list[str]]:
    return [[row.name, *row.labels, *(cell.text for cell in row.cells), "".join(row.marks)] for row in table.rows]


def test_a_score_is_shown_times_100_with_its_interval_and_a_difference_with_its_sign():
    shown = report.in_papers_units
    cells = [shown(0.4567, Interval(low=0.4, high=0.5049)), shown(None, Interval(low=0, high=1))]
    cells.append(shown(0.0123, Interval(low=-0.004, high=0.03), signed=True))
    wanted = [("45.7", "40.0–50.5"), ("–", ""), ("+1.2", "-0.4 to +3.0")]
    assert [(cell.text, cell.bounds) for cell in cells] == wanted
    assert [shown(value, signed=True).text for value in (-0.1, 0.0, -0.0001)] == ["-10.0", "0.0", "0.0"]


def test_a_partial_protocol_is_marked_and_a_full_one_is_not():
    protocols = {"a/x": scores(1270, 7970, CIDEr=0.5), "b/y": scores(4, 4, CIDEr=0.25), "c/z": scores()}
    found = report.overview(protocols, ["CIDEr", "SPICE"])
    assert found.columns == ("Protocol", "n", "CIDEr", "SPICE")
    rows = [["a/x", "1,270 of 7,970", "50.0", "–", "*"], ["b/y", "4 of 4", "25.0", "–", ""], ["c/z", "4", "–", "–", ""]]
    assert texts(found) == rows
    assert found.notes == ["* Fewer pairs than papers score: not comparable with published figures."]
    assert found.rows[0].cells[0].interval == Interval(low=25, high=75)
    assert report.overview({"b/y": scores(4, 4)}, []).notes == []


def test_groups_that_have_pairs_have_a_row_and_types_a_table_of_their_own():
    groups = {
        name: {"pairs": n, "CIDEr": 0.1 * n} for name, n in (("distractors", 2), ("change", 3), ("multi_change", 0))
    }
    groups["by_type/color"] = {"pairs": 3, "CIDEr": 0.3, "type_accuracy": 0.5, "exact_accuracy": 0.25}
    known = scores(5, CIDEr=0.5, groups=groups)
    rows = [["all", "5", "50.0", ""], ["with a change", "3", "30.0", ""], ["distractors", "2", "20.0", ""]]
    assert texts(report.group_table("toy/all", known, ["CIDEr"])) == rows
    found = report.type_table("toy/all", known, ["color"], ["CIDEr"])
    assert found.columns == ("Type", "n", "type right", "all right", "CIDEr")
    assert texts(found) == [["color", "3", "50.0", "25.0", "30.0", ""]]


def row(name: str, *values: float | None, marks: tuple[str, ...] = ()) -> Row:
    return Row(name, (), tuple(Cell(value) for value in values), marks)


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([row("a", 1, 9), row("b", 3, None), row("c", 2, 8)], ["01", "10", "00"]),
        ([row("a", 10.04), row("b", 10.01), row("c", 9.0)], ["1", "1", "0"]),
        ([row("a", 1), row("b", 1)], ["0", "0"]),
        ([row("a", 1), row("b", None)], ["0", "0"]),
        ([row("a", 100.0), row("b", 9.0)], ["1", "0"]),
        ([row("a", 5, marks=("*",)), row("b", 4), row("c", 3)], ["0", "1", "0"]),
        ([row("a", 5, marks=("*",))], ["0"]),
        ([row("a", 5, marks=("†",)), row("b", 4)], ["1", "0"]),
    ],
    ids=["each column", "printed equal", "all equal", "one alone", "numbers, not texts", "partial", "alone", "chosen"],
)
def test_the_best_of_those_that_compare_is_marked(rows: list[Row], best: list[str]):
    assert ["".join(str(int(cell.best)) for cell in row.cells) for row in report.mark_best(rows)] == best


def test_this_run_stands_among_the_published_rows_by_its_cider():
    found = report.published_table(
        "iedit/test", scores(495, 495, CIDEr=0.6, BLEU_4=0.99), published_rows("iedit"), "CIDEr"
    )
    assert found is not None
    ours = [row.ours for row in found.rows].index(True)
    values = [row.cells[3].value or 0 for row in found.rows]
    assert values == sorted(values, reverse=True)
    assert (found.rows[ours].name, values[ours], found.rows[ours].cells[0].best) == ("this run", 60, True)
    assert (found.rows[ours].labels, found.rows[0].labels[1]) == (("", "495"), "495")
    assert [row.cells[3].best for row in found.rows].index(True) == 0
    assert not any("chosen" in note for note in found.notes)
    assert report.published_table("unknown/test", scores(), published_rows("unknown"), "CIDEr") is None
    found = report.published_table("iedit/test", scores(300, 495, CIDEr=9.0), published_rows("iedit"), "CIDEr")
    assert found is not None
    assert (found.rows[0].name, found.rows[0].marks, found.rows[0].cells[3].best) == ("this run", ("*",), False)
    assert (found.rows[1].cells[3].best, found.notes[0][:13]) == (True, "* Fewer pairs")
    found = report.published_table("spot_the_diff/test", scores(CIDEr=0.3), published_rows("spot_the_diff"), "CIDEr")
    assert found is not None
    assert [row.name for row in found.rows if row.marks == ("†",)] == ["CLIP4IDC"]
    assert found.notes[0].startswith("† Epoch chosen on the test split. CLIP4IDC: ")


TABLE = Table(
    "x",
    ("Method", "venue", "CIDEr", "BLEU-4"),
    [
        Row("A_b & 50%", ("ICCV'23",), (Cell(51.26, Interval(low=49.0, high=53.3), True), Cell(None)), ("†",)),
        Row("this run", ("",), (Cell(40.0), Cell(3.0)), ("*",)),
    ],
    ["† why."],
)


def test_latex_marks_the_best_and_escapes_what_is_special_and_csv_has_the_bounds_in_columns():
    assert report.as_latex(TABLE).splitlines() == [
        r"\begin{tabular}{llrr}",
        r"\toprule",
        r"Method & venue & CIDEr & BLEU-4 \\",
        r"\midrule",
        r"A\_b \& 50\%$^\dagger$ & ICCV'23 & \textbf{51.3} {\scriptsize [49.0, 53.3]} & -- \\",
        r"this run$^*$ &  & 40.0 & 3.0 \\",
        r"\bottomrule",
        r"\end{tabular}",
        "% † why.",
    ]
    escaped = report.as_latex(Table("x", ("a",), [Row("a\\b {x} a~b^c #$", (), ())])).splitlines()[4]
    assert escaped == r"a\textbackslash{}b \{x\} a\textasciitilde{}b\textasciicircum{}c \#\$ \\"
    assert list(csv.reader(io.StringIO(report.as_csv(TABLE)))) == [
        ["Method", "venue", "marks", "CIDEr", "CIDEr low", "CIDEr high", "BLEU-4"],
        ["A_b & 50%", "ICCV'23", "†", "51.26", "49.00", "53.30", ""],
        ["this run", "", "*", "40.00", "", "", "3.00"],
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    bench.write(root)
    return root


@pytest.fixture(scope="module")
def toy(root: Path) -> Evidence:
    return evidence(root, bench.pairs(root))


@pytest.fixture(scope="module")
def page(toy: Evidence, tmp_path_factory: pytest.TempPathFactory) -> str:
    return draw(toy, tmp_path_factory.mktemp("page"))


def test_the_page_is_whole_and_fetches_nothing_and_holds_the_numbers_of_the_metrics(page: str):
    links = re.findall(r'\b(?:src|srcset|href)="([^"]*)"', page)
    assert all(link.startswith(("data:", "#")) for link in links)
    assert not re.search("<(iframe|object|embed)", page)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|https?://", page.replace("http://www.w3.org", ""))
    text = text_of(page)
    for told in (
        "The type of a single change, named right in 66.7% of pairs",
        "In 33.3% of the pairs with one change it got all of it right: the type, the object",
        "CIDEr goes from 50.0 to 5.0, so the predictions come from both images",
        "SPICE Absent. Its jars are not there.",
        "The 1 pairs with several changes hold 2: 50.0% of them are named by type, 50.0% with object and place as "
        "well, 50.0% with what changed into what. Of the clauses predicted there, 50.0% name a change that happened. "
        "0.0% of these pairs have all their types named and none too many; in 0.0% everything is right.",
        "Saliency map Outlines on the after-image around the cells in which the model looks for the",
        "Right and wrong Prediction and references are read",
    ):
        assert told in text
    assert not re.search("Only these|Beside published results", text)


def test_equal_evidence_gives_equal_bytes_inside_the_page_or_in_the_folder_beside_it(toy: Evidence, tmp_path: Path):
    for name in ("first", "second"):
        write_report(toy, tmp_path / name, 0)
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / name).rglob("*.*")} for name in ("first", "second")
    )
    assert first == second
    page = first["report.html"].decode()
    named = {image for pair in gallery_of(page)["pairs"] for image in pair["images"]}
    assert named == {f"images/{name}" for name in first if name != "report.html"}
    write_report(toy, tmp_path / "first", 1)
    inside = gallery_of((tmp_path / "first" / "report.html").read_text())["pairs"]
    assert all(image.startswith("data:image/webp;base64,") for pair in inside for image in pair["images"])
    assert list((tmp_path / "first" / "images").iterdir()) == []


def test_confusions_are_counted_and_drawn(toy: Evidence, page: str):
    assert report.confusion_table(toy.parsed.values())["rows"]["none"] == {"color": 1, "none": 1}
    body = page[page.index('<table class="confusion">') :]
    body = body[: body.index("</table>")]
    types = ["illumination", "removal", "color", "none"]
    assert re.findall(r'<th scope="col"><span>([^<]+)</span>', body) == types
    rows = [re.findall(r"<t[hd][^>]*>([^<]+)<", row) for row in body.split("<tr>")[2:]]
    drawn = [" ".join(row) for row in rows]
    assert drawn == ["illumination · · · 1", "removal · 1 · ·", "color · · 1 ·", "none · · 1 1"]
    assert (body.count("var(--good)"), body.count("--v:0.500")) == (3, 2)


def test_without_a_grammar_or_saliency_maps_or_all_pairs_the_page_says_so(root: Path, toy: Evidence, tmp_path: Path):
    bare = replace(evidence(root, bench.pairs(root), with_grammar=False), saliency=Path("none"))
    page = draw(replace(bare, report=bare.report.model_copy(update={"rows_in": 480})), tmp_path)
    text = text_of(page)
    assert "6 pairs, captioned and scored" in text
    assert not re.search("type right|True type and predicted type", text)
    assert {pair["images"][2] for pair in gallery_of(page)["pairs"]} == {None}
    for told in ("no maps in saliency.npz", "Only these of the 480 test pairs were captioned"):
        assert told in text
    alone = draw(replace(toy, metrics={"change_accuracy": METRICS["change_accuracy"]}), tmp_path)
    assert list(tiles(alone))[0] == "Type of change right"
    assert gallery_of(alone)["columns"] == ["type_right", "place_right", "exact_right"]


def test_words_of_the_data_cannot_become_markup(root: Path, tmp_path: Path):
    words = "</script><script>alert(1)</script><img src=x>\u2028"
    pairs = [replace(pair, prediction=words, references=[words]) for pair in bench.pairs(root)]
    page = draw(evidence(root, pairs), tmp_path)
    assert (page.count("<script"), "<img src=x" in page) == (2, False)
    assert gallery_of(page)["pairs"][0]["references"] == [words]


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        ("yes", None),
        ("conditions", "Shown. own pairs (licence: CC of a kind): show: as its page says."),
        ("no", "Not shown. CC of a kind: as its page says."),
    ],
)
def test_images_stand_on_the_page_as_the_licence_allows(answer: Any, note: str | None, toy: Evidence, tmp_path: Path):
    permission = Permission(answer, "as its page says")
    licence = Licence("CC of a kind", None, permission, permission, permission)
    page = draw(replace(toy, specs={"toy": replace(DATASETS["pairs"], licence=licence)}), tmp_path, inside_mb=0)
    assert [bool(pair["images"]) for pair in gallery_of(page)["pairs"]] == [answer != "no"] * 6
    assert any((tmp_path / "images").iterdir()) is (answer != "no")
    assert re.findall(r"<dt>Images of toy</dt><dd>(.*?)</dd>", page) == ([note] if note else [])
    assert "the green ball at the left was removed" in page


def tiles(page: str) -> dict[str, str]:
    found = re.findall(r'<dt>([^<]+)</dt><dd><span class="figure">(.*?)</dd>', page)
    return {name: " ".join(re.sub("<[^>]+>", " ", value).split()) for name, value in found}


COLOUR = "the red cube at the left turned blue"
OPEN = {"toy": ImageRights(True, None)}
RIGHT = [("color", True), ("object", True), ("place", True), ("change", True)]


@pytest.mark.parametrize(
    ("pair", "clauses", "missed", "grade"),
    [
        (bench.pairs()[0], [RIGHT], 0, 2),
        (bench.pairs()[1], [[("removal", True), ("object", True), ("place", False)]], 0, 1),
        (bench.pairs()[2], [[("nothing changed", False)]], 1, 0),
        (bench.pairs()[3], [RIGHT, [("illumination", False)]], 1, 0),
        (bench.pairs()[4], [[("nothing changed", True)]], 0, 2),
        (bench.pairs()[5], [[("color", False)]], 0, 0),
        (bench.pair(COLOUR.replace("blue", "green"), [COLOUR], ["color"]), [[*RIGHT[:3], ("change", False)]], 0, 1),
        (bench.pair("the the cube", [COLOUR], ["color"]), [[("not understood", False)]], 1, 0),
    ],
)
def test_marks_say_which_part_of_each_clause_is_right(pair, clauses, missed, grade):
    found = caption_of(pair, bench.parse([pair])[pair.id])
    assert [marks for _, marks in found["clauses"]] == clauses
    assert " ".join(text for text, _ in found["clauses"]) == pair.prediction.replace(", and ", " ")
    assert (found["missed"], found["grade"]) == (missed, grade)
    assert caption_of(pair, None) == {"clauses": [(pair.prediction, [])], "missed": 0, "grade": None}


def test_a_pair_of_two_protocols_has_the_scores_of_both_and_one_entry(root: Path, tmp_path: Path):
    protocols = (Protocol("some", n=None, ids="[45]"), Protocol("total", n=None, max_words=3, references="joined"))
    specs = {"toy": replace(DATASETS["pairs"], protocols=protocols)}
    data = gallery_of(draw(evidence(root, bench.pairs(root), specs), tmp_path))
    assert [pair["id"] for pair in data["pairs"]] == [f"toy/{number}" for number in (4, 5, 0, 1, 2, 3)]
    assert [list(pair["scores"]) for pair in data["pairs"]] == [["0", "1"]] * 2 + [["1"]] * 4
    assert data["pairs"][1]["captions"][0]["clauses"][0][0] == COLOUR, "as its first protocol scores it"
    assert [len(pair["references"]) for pair in data["pairs"]] == [2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(("mumbled", "graded"), [(0, True), (2, True), (3, False), (6, False)])
def test_right_and_wrong_are_told_where_a_grammar_reads_most_captions(mumbled, graded, root: Path, tmp_path: Path):
    pairs = [replace(pair, prediction="x") if n < mumbled else pair for n, pair in enumerate(bench.pairs(root))]
    assert gallery_of(draw(evidence(root, pairs), tmp_path))["graded"] is graded


def test_images_stay_inside_while_they_fit_and_one_too_many_makes_all_of_them_files(tmp_path: Path):
    (tmp_path / "old.webp").write_bytes(b"of an earlier page")
    (tmp_path / "mine.txt").write_text("mine")
    images = [b"abc", b"abc", b"defghi"]
    inside = {b"abc": "data:image/webp;base64,YWJj", b"defghi": "data:image/webp;base64,ZGVmZ2hp"}
    assert link_images(images, tmp_path, 12) == inside
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
    links = link_images([*images, b"jkl"], tmp_path, 12)
    assert {image: (tmp_path.parent / link).read_bytes() for image, link in links.items()} == {i: i for i in links}
    assert links.keys() == {*images, b"jkl"}


def test_each_pair_has_its_own_images_in_order_as_the_licence_allows(root: Path):
    pairs = bench.pairs(root)
    maps = read_saliency(root / "predictions" / "saliency.npz")
    assert list(maps) == [pair.id for pair in pairs]
    last = pairs[-1].id
    for pair, drawn in zip(pairs, draw_images(pairs, OPEN, {i: maps[i] for i in maps if i != last}), strict=True):
        after = load_small(pair.after, pair.after_sha256)
        overlay = as_webp(outlined(after, maps[pair.id])) if pair.id != last else None
        before = load_small(pair.before, pair.before_sha256)
        assert drawn == [as_webp(before), as_webp(after), overlay]
    gone = bench.pair("x", ["y"], ["color"], "nowhere")
    assert list(draw_images([gone], {"toy": ImageRights(False, "no")}, {})) == [None]
    with pytest.raises(DataError, match="nowhere"):
        list(draw_images([gone], OPEN, {}))


# Two runs compared


@pytest.fixture(scope="module")
def runs(root, toy) -> Path:
    """Two runs: the second says of every pair that nothing changed."""
    write_scores(toy, root / "first")
    silent = [replace(pair, prediction="nothing changed") for pair in bench.pairs(root)]
    write_scores(evidence(root, silent), root / "second")
    return root


def run(root: Path, out: Path, first: str = "first", second: str = "second"):
    return compare(root / first, root / second, root / "records", root / "clean", out / "compare.html")


def test_each_score_of_both_runs_stands_beside_the_gain_of_the_second(runs, tmp_path):
    found = run(runs, tmp_path)
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
    back = {row.name: row.cells[2].text for row in run(runs, tmp_path, "second", "first")["toy/test"].rows}
    assert (back["change_type_accuracy"], back["no_change_recall"]) == ("+66.7", "-50.0")


def test_what_cannot_be_compared_is_named(runs, tmp_path):
    def refused(first: Path, second: Path, message: str) -> None:
        with pytest.raises(DataError, match=message):
            compare(first, second, runs / "records", runs / "clean", tmp_path / "x.html")

    first, other, pairs = runs / "first", tmp_path / "other", bench.pairs(runs)
    refused(first, runs / "nowhere", r"nowhere: cannot be read .*; name the folder")
    some = write_scores(evidence(runs, pairs[1:]), tmp_path / "some")
    refused(first, some, r"toy/test has 6 and 5 pairs, 1 of them in one run alone, such as toy/0")
    unknown = [replace(pair, id=pair.id.replace("toy/", "toy/9")) for pair in pairs]
    strange = [write_scores(evidence(runs, unknown), tmp_path / name) for name in ("a", "b")]
    refused(*strange, r"records.parquet: no test pair toy/90, which both runs captioned")
    other.mkdir()
    scores = pq.read_table(first / "scores.parquet")
    for damaged, message in (
        (scores.set_column(0, "protocol", pa.array(["other/test"] * 6)), r"has toy/test: none is in both"),
        (pa.table({"id": ["toy/0"]}), r"cannot be read \(.*protocol.*\); .* run `m3diff eval"),
    ):
        pq.write_table(damaged, other / "scores.parquet")
        refused(first, other, message)
