"""Which pairs two paths stand for, and what is said where they stand for none."""

import re
from pathlib import Path

import pytest

from m3diff.records.errors import DataError
from m3diff.serving.caption import AskedPair, find_pairs


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folders = ("one/a.png", "one/b.JPG", "one/notes.txt", "other/b.webp", "other/a.png", "empty/notes.txt")
    for name in (*folders, "x.png", "y.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def test_two_images_are_one_pair(here):
    assert find_pairs(here / "x.png", here / "y.png") == [AskedPair("x", here / "x.png", here / "y.png")]


def test_two_folders_are_pairs_by_name_whatever_the_format(here):
    assert find_pairs(here / "one", here / "other") == [
        AskedPair("a", here / "one/a.png", here / "other/a.png"),
        AskedPair("b", here / "one/b.JPG", here / "other/b.webp"),
    ]


@pytest.mark.parametrize("sides", [("one",), ("one", "other")])
def test_hidden_files_are_no_images(here, sides):
    want = find_pairs(here / "one", here / "other")
    for side in sides:
        for name in ("._a.png", "._b.JPG", ".thumbnail.png"):
            (here / side / name).write_bytes(b"\0\5\26\7")
        (here / side / ".hidden").mkdir()
    assert find_pairs(here / "one", here / "other") == want


def test_one_name_in_two_formats_is_two_images(here):
    for folder in ("one", "other"):
        (here / folder / "c.png").touch()
        (here / folder / "c.jpg").touch()
    assert [pair.name for pair in find_pairs(here / "one", here / "other")] == ["a", "b", "c.jpg", "c.png"]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_table_names_paths_from_its_own_folder(here, mark):
    text = f"{mark}id,after,before\n7,y.png,x.png\n8,{here}/x.png,one/a.png\n"
    (here / "pairs.csv").write_text(text, encoding="utf-8")
    assert find_pairs(here / "pairs.csv", None) == [
        AskedPair("00001", here / "x.png", here / "y.png"),
        AskedPair("00002", here / "one/a.png", here / "x.png"),
    ]


@pytest.mark.parametrize(
    ("before", "after", "table", "said"),
    [
        ("gone.png", "y.png", "", "gone.png: no such file or folder; give two images"),
        ("x.png", "gone", "", "gone: no such file or folder"),
        ("one", None, "", "one: one folder; give two images, two folders"),
        ("one", "x.png", "", "one, .*x.png: a folder and a file"),
        ("one", "empty", "", "2 image.s. in one folder alone: a, b; name both sides alike"),
        ("empty", "empty", "", "empty: no image"),
        ("t.csv", None, "first,after\n1,2\n", "t.csv: no column before among first, after; give"),
        ("t.csv", None, "before,after\nx.png,\n", "t.csv row 1: after is empty; write the path of an image"),
        ("t.csv", None, "before,after\nx.png,y.png\nx.png\n", "t.csv row 2: after is empty"),
        ("t.csv", None, "before,after\n", "t.csv: no row"),
    ],
)
def test_what_is_no_pair_is_said_with_what_to_give(here, before, after, table, said):
    if table:
        (here / "t.csv").write_text(table)
    with pytest.raises(DataError, match=said):
        find_pairs(here / before, after and here / after)


@pytest.mark.parametrize("named", ["../x.png", "{here}/x.png", "one/../../x.png", "link.png", "..\\x.png"])
def test_paths_in_a_table_stay_in_its_folder_unless_another_is_opened(here, named):
    folder = here / "table"
    (folder / "one").mkdir(parents=True)
    (folder / "link.png").symlink_to(here / "x.png")
    (folder / "in.png").touch()
    (folder / "pairs.csv").write_text(f"before,after\nin.png,{named.format(here=here)}\n")
    with pytest.raises(DataError, match=r"pairs\.csv row 1: after: text .* out of the .*--image-root"):
        find_pairs(folder / "pairs.csv", None)
    if "\\" not in named:
        (found,) = find_pairs(folder / "pairs.csv", None, here)
        assert found.after.resolve() == here / "x.png"
        assert found.before == folder / "in.png"
    with pytest.raises(DataError, match="--image-root"):
        find_pairs(folder / "pairs.csv", None, here / "other")


def test_an_address_in_a_table_is_never_fetched(here):
    (here / "pairs.csv").write_text("before,after\nx.png,http://127.0.0.1/y.png\n")
    with pytest.raises(DataError, match=r"pairs\.csv row 1: after: .*is an address, and nothing is fetched"):
        find_pairs(here / "pairs.csv", None, here)


def test_of_many_names_a_few_are_told(here):
    for number in range(9):
        (here / "one" / f"n{number}.png").touch()
    with pytest.raises(DataError, match=re.escape("9 image(s) in one folder alone: n0, n1, n2, n3, n4, ...;")):
        find_pairs(here / "one", here / "other")
