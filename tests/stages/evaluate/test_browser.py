"""The pages in headless Chromium: they draw, filter, sort, open a pair, slide and compare, and nothing is fetched."""

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page

from m3diff.commands.compare import compare
from m3diff.stages.evaluate.report import write_report
from tests.browser import Watch, chromium
from tests.scoring import bench
from tests.scoring.bench import evidence, write_scores

DESKTOP = {"width": 1400, "height": 1000}


class Pages(NamedTuple):
    inside: Path  # images inside the page
    beside: Path  # in the folder
    many: Path  # of 120 pairs
    compared: Path


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    root = tmp_path_factory.mktemp("pages")
    folders = bench.write(root)
    pairs = bench.pairs(root)
    known = evidence(root, pairs)
    write_report(known, root / "inside", 1)
    write_report(known, root / "beside", 0)
    copies = [replace(pairs[n % 6], id=f"toy/{n:03d}", prediction=pairs[n % 6].prediction) for n in range(120)]
    write_report(evidence(root, copies), root / "many", 1)
    other = evidence(root, [replace(pair, prediction="nothing changed") for pair in pairs])
    numbers = {"toy/test": {i: values | {"CIDEr": 2.0} for i, values in other.pair_scores["toy/test"].items()}}
    first = write_scores(known, root / "first")
    second = write_scores(replace(other, pair_scores=numbers), root / "second")
    compare(first, second, folders.records, folders.clean, root / "compare.html")
    return Pages(*(root / name / "report.html" for name in ("inside", "beside", "many")), root / "compare.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open a page; nothing that a test does with it may leave this machine or raise a complaint."""
    opened: list[tuple[Page, Watch]] = []

    def open_page(path: Path | None = None, **options: Any) -> Page:
        page = browser.new_page(**({"viewport": DESKTOP} | options))
        opened.append((page, Watch(page)))
        if path is not None:
            page.goto(path.as_uri())
        return page

    yield open_page
    for page, watch in opened:
        assert (watch.left, watch.complaints) == ([], [])
        page.close()


@pytest.fixture
def page(new_page: Callable[..., Page], pages: Pages) -> Page:
    return new_page(pages.inside)


def ids(page: Page) -> list[str]:
    return page.locator(".card").evaluate_all("cards => cards.map(card => card.dataset.id.split('/').pop())")


def choose(page: Page, name: str, value: str) -> None:
    page.locator(f"#controls [name={name}]").select_option(value)


def view(page: Page, name: str) -> None:
    page.locator("#views button", has_text=name).click()


DECODE = """async all => {
  for (const image of all) image.loading = "eager";
  await Promise.all(all.map(image => image.decode()));
  return all.filter(image => image.naturalWidth > 0).length;
}"""


def drawn_images(within: Locator) -> int:
    """The number of images that are there and decoded, those below the window too."""
    return within.locator("img").evaluate_all(DECODE)


def test_the_gallery_opens_with_one_pair_of_each_kind_and_what_of_it_is_right(page: Page):
    assert ids(page) == ["2", "1", "0", "5", "3"]  # the types in their order, none, and several
    assert page.locator("#count").inner_text() == "5 of 6 pairs"
    assert page.locator("#views [aria-pressed=true]").inner_text() == "One of each kind"
    assert drawn_images(page.locator("#cards")) == 15
    card = page.locator(".card[data-id='toy/1']")
    for text in ("the green ball at the left was removed", "closest of 2 references", "CIDEr 100.0"):
        assert text in card.inner_text()
    assert card.locator(".right").all_inner_texts() == ["removal", "object"]
    assert card.locator(".wrong").all_inner_texts() == ["place"]


def test_each_filter_keeps_its_pairs_and_they_work_together(page: Page):
    view(page, "All pairs")
    assert ids(page) == ["0", "1", "2", "3", "4", "5"]
    several = [("changes", "several", "3"), ("changes", "none", "45"), ("changes", "one", "012")]
    grades = [("grade", "right", "04"), ("grade", "type", "014"), ("grade", "wrong", "1235")]
    for name, value, kept in [("type", "color", "03"), *several, *grades]:
        choose(page, name, value)
        assert "".join(ids(page)) == kept, (name, value)
        choose(page, name, "")
    for text, kept in (("TOY/4", "4"), ("ball gone", "1")):  # an id; every word is needed
        page.locator("[name=text]").fill(text)
        assert "".join(ids(page)) == kept
    choose(page, "grade", "wrong")
    for name, text, kept in (("text", "lamp", "23"), ("low", "250", "3"), ("high", "299", "")):
        page.locator(f"[name={name}]").fill(text)
        assert "".join(ids(page)) == kept  # of 2 a reference has the word, of 3 the prediction
    assert page.locator("#count").inner_text() == "0 of 6 pairs"
    page.locator("#clear").click()
    assert len(ids(page)) == 6


def test_pairs_are_sorted_a_view_sets_filter_and_order_and_a_type_in_the_table_leads_to_its_pairs(page: Page):
    view(page, "All pairs")
    for sort, order in (("high", "543210"), ("low", "012345"), ("id", "012345"), ("type", "210453")):
        choose(page, "sort", sort)
        assert "".join(ids(page)) == order, sort
    choose(page, "column", "5")  # type_right: 0, 1 and 4 are right
    choose(page, "sort", "high")
    assert "".join(ids(page)) == "014235"
    choose(page, "column", "0")
    for name, kept in (("Where it fails", "012"), ("Where it shines", "210"), ("Nothing changed", "45")):
        view(page, name)
        assert "".join(ids(page)) == kept, name
        assert page.locator("#views [aria-pressed=true]").inner_text() == name
    choose(page, "sort", "id")
    assert page.locator("#views [aria-pressed=true]").count() == 0
    page.locator("[data-type=removal]").click()
    assert ids(page) == ["1"]
    assert page.locator("[name=type]").input_value() == "removal"


def blues(page: Page) -> list[int]:
    """The blue of the slide at a quarter and at three quarters of its width; the toy's images turn bluer."""
    picture = Image.open(io.BytesIO(page.locator("#slide").screenshot())).convert("RGB")
    return [picture.getpixel((round(picture.width * place), picture.height // 4))[2] for place in (0.25, 0.75)]


def test_a_pair_opens_with_its_references_scores_and_saliency_and_the_slider_goes_from_before_to_after(page: Page):
    view(page, "All pairs")
    page.locator(".card").first.click()
    words = page.locator("#words").inner_text()
    assert "the red cube at the left turned blue" in words
    assert "the red cube at the left became blue" in words
    header, row = page.locator("#words tr").all()
    assert header.locator("th").all_inner_texts() == ["", "CIDEr", "type_right", "place_right", "exact_right"]
    assert row.locator("th, td").all_inner_texts() == ["toy/test", "0.0", "100.0", "100.0", "100.0"]
    after = page.locator("#slide-after").get_attribute("src")
    page.locator("#heat").check()
    map_of = page.locator(".card").first.locator("img").nth(2).get_attribute("src")
    assert page.locator("#slide-after").get_attribute("src") == map_of != after
    page.keyboard.press("s")
    assert page.locator("#slide-after").get_attribute("src") == after
    page.keyboard.press("ArrowRight")
    assert page.locator("#viewer-place").inner_text() == "2 of 6"
    assert drawn_images(page.locator("#slide")) == 2
    assert blues(page) == pytest.approx([120, 220], abs=6)
    box = page.locator("#slide").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.95 * box["width"], middle, steps=4)
    page.mouse.up()
    assert blues(page) == pytest.approx([120, 120], abs=6)
    page.mouse.click(box["x"] + 0.05 * box["width"], middle)
    assert blues(page) == pytest.approx([220, 220], abs=6)


def test_two_runs_are_compared_pair_by_pair(new_page, pages: Pages):
    page = new_page(pages.compared)
    # the first run's CIDEr of a pair is its number, the second's always 2
    assert "".join(ids(page)) == "504132"
    assert page.locator(".card header span").first.inner_text() == "CIDEr -300.0"
    view(page, "second better")
    assert "".join(ids(page)) == "012345"
    view(page, "first better")
    assert "".join(ids(page)) == "543210"
    choose(page, "grade", "lost")
    assert ids(page) == ["0"]
    choose(page, "grade", "gained")
    assert ids(page) == ["5"]
    choose(page, "grade", "differ")
    assert "".join(ids(page)) == "5310"
    page.locator(".card").last.click()
    words = page.locator("#words").inner_text()
    assert "first, 0.0" in words
    assert "second, 200.0" in words
    said = page.locator("#words .prediction").all_inner_texts()
    assert said == ["the red cube at the left became blue", "nothing changed"]
