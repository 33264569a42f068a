"""The pages in headless Chromium: they draw, filter, sort, open a pair, slide and compare, and nothing is fetched."""

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page

from m3diff.commands.compare import compare
from m3diff.commands.inspect.statistics import write_statistics
from m3diff.report.origin import Origin
from m3diff.report.page import FIRST_CARDS, write_report
from m3diff.scoring import run
from m3diff.stages.evaluate.stage import evaluate
from m3diff.stages.validate.pairs import Finding
from m3diff.stages.validate.stage import ValidateCounts, ValidateReport, write_page
from m3diff.stages.validate.suite import ExpectationResult
from tests.browser import Watch, chromium
from tests.scoring import bench, questions
from tests.scoring.bench import page_content, write_scores

DESKTOP = {"width": 1400, "height": 1000}


class Pages(NamedTuple):
    inside: Path  # images inside the page
    beside: Path  # in the folder
    large: Path  # of 120 pairs
    compared: Path


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    root = tmp_path_factory.mktemp("pages")
    folders = bench.write(root)
    pairs = bench.pairs(root)
    curves = root / "curves.csv"
    curves.write_text("step,loss,lr_llm,val_loss,val_cider\n1,4,0.1,,\n2,2,0.2,3,\n3,1,0.1,2,0.5\n")
    first_evidence = replace(page_content(root, pairs), origin=Origin(facts={"Model": "small"}, curves=curves))
    write_report(first_evidence, root / "inside", 1)
    write_report(first_evidence, root / "beside", 0)
    copies = [replace(pairs[n % 6], id=f"toy/{n:03d}", prediction=pairs[n % 6].prediction) for n in range(120)]
    write_report(page_content(root, copies), root / "many", 1)
    second_evidence = page_content(root, [replace(pair, prediction="nothing changed") for pair in pairs])
    numbers = {
        "toy/test": {i: values | {"CIDEr": 2.0} for i, values in second_evidence.pair_scores["toy/test"].items()}
    }
    first_folder = write_scores(first_evidence, root / "first")
    second_folder = write_scores(replace(second_evidence, pair_scores=numbers), root / "second")
    compare(first_folder, second_folder, folders.records, folders.clean, root / "compare.html")
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
        assert watch.foreign_requests == []
        assert watch.complaints == []
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
    for name, value, numbers in [("type", "color", "03"), *several, *grades]:
        choose(page, name, value)
        assert "".join(ids(page)) == numbers, (name, value)
        choose(page, name, "")
    for text, numbers in (("TOY/4", "4"), ("ball gone", "1")):  # an id; every word is needed
        page.locator("[name=text]").fill(text)
        assert "".join(ids(page)) == numbers
    choose(page, "grade", "wrong")
    for name, text, numbers in (("text", "lamp", "23"), ("low", "250", "3"), ("high", "299", "")):
        page.locator(f"[name={name}]").fill(text)
        assert "".join(ids(page)) == numbers  # of 2 a reference has the word, of 3 the prediction
    assert page.locator("#count").inner_text() == "0 of 6 pairs"
    page.locator("#clear").click()
    assert len(ids(page)) == 6


def test_pairs_are_sorted_by_a_column(page: Page):
    view(page, "All pairs")
    for sort, order in (("high", "543210"), ("low", "012345"), ("id", "012345"), ("type", "210453")):
        choose(page, "sort", sort)
        assert "".join(ids(page)) == order, sort
    choose(page, "column", "5")  # type_right: 0, 1 and 4 are right
    choose(page, "sort", "high")
    assert "".join(ids(page)) == "014235"


def test_a_view_sets_filter_and_order(page: Page):
    for name, numbers in (("Where it fails", "012"), ("Where it shines", "210"), ("Nothing changed", "45")):
        view(page, name)
        assert "".join(ids(page)) == numbers, name
        assert page.locator("#views [aria-pressed=true]").inner_text() == name
    choose(page, "sort", "id")
    assert page.locator("#views [aria-pressed=true]").count() == 0


def test_a_type_in_the_table_leads_to_its_pairs(page: Page):
    page.locator("[data-type=removal]").click()
    assert ids(page) == ["1"]
    assert page.locator("[name=type]").input_value() == "removal"


def blues(page: Page) -> list[int]:
    """The blue of the slide at a quarter and at three quarters of its width; the toy's images turn bluer."""
    picture = Image.open(io.BytesIO(page.locator("#slide").screenshot())).convert("RGB")
    return [picture.getpixel((round(picture.width * share), picture.height // 4))[2] for share in (0.25, 0.75)]


def test_a_pair_opens_with_its_references_scores_and_saliency(page: Page):
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


def test_the_slider_goes_from_before_to_after(page: Page):
    view(page, "All pairs")
    page.locator(".card").first.click()
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


@pytest.fixture(scope="module")
def question_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of captions and questions about two images, one image and none."""
    root = tmp_path_factory.mktemp("questions")
    folders = questions.write(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "tokenise", lambda texts, limit_s: {text: text for text in texts})
        evaluate(bench.config(metrics=("CIDEr",)), bench.compute(), *folders, root / "report")
    return root / "report" / "report.html"


def test_a_record_has_as_many_images_as_its_question_and_the_turns_before(new_page, question_page):
    page = new_page(question_page)
    view(page, "All records")
    page.locator("#more button").click()
    assert page.locator("#count").inner_text() == "8 records"
    cards = page.locator(".card")
    assert [cards.nth(number).locator("img").count() for number in range(8)] == [2, 2, 2, 2, 2, 1, 1, 0]
    assert cards.nth(3).locator(".turn").all_inner_texts() == ["Did anything change?", "yes", "And what changed?"]
    assert cards.nth(0).locator(".turn").count() == 0
    assert cards.nth(1).locator(".wrong").all_inner_texts() == ["exact match"]
    assert cards.nth(1).locator(".right").all_inner_texts() == ["number"]
    assert cards.nth(1).locator("header b").inner_text() == "count"


def test_only_two_images_have_a_slider(new_page, question_page):
    page = new_page(question_page)
    view(page, "All records")
    page.locator("#more button").click()
    shown = {}
    for name, number in (("two", 3), ("one", 5), ("none", 7)):
        page.locator(".card").nth(number).click()
        parts = ("#slide", "#single", "#look")
        shown[name] = [part for part in parts if page.locator(part).is_visible()]
        if name == "one":
            assert drawn_images(page.locator("#look")) >= 1
            assert page.locator("#single").evaluate("image => image.naturalWidth") == 24
            box = page.locator("#single").bounding_box()
            assert box is not None
            assert box["width"] > 200, "a small image fills its column"
            page.keyboard.press("ArrowUp")
        page.keyboard.press("Escape")
    assert shown == {"two": ["#slide", "#look"], "one": ["#single", "#look"], "none": []}


def test_a_kind_in_the_table_of_answers_leads_to_its_questions(new_page, question_page):
    page = new_page(question_page)
    page.locator("#answers [data-kind=count]").click()
    assert sorted(ids(page)) == ["0?0", "one?1"]
    view(page, "All records")
    page.locator("[name=text]").fill("snow")
    assert ids(page) == ["none"], "the search reads questions"
    page.locator("[name=text]").fill("")
    choose(page, "kind", "yes/no")
    assert ids(page) == ["0?1"]


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
    captions = page.locator("#words .prediction").all_inner_texts()
    assert captions == ["the red cube at the left became blue", "nothing changed"]


PHONE = {"width": 390, "height": 844}
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize(("name", "is_wide"), [("inside", True), ("compared", False)])
def test_on_a_phone_no_page_is_wider_than_the_screen_and_cut_tables_say_so(new_page, pages: Pages, name, is_wide):
    page = new_page(getattr(pages, name), viewport=PHONE)
    page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    assert page.evaluate(OVERFLOW) == 0
    cut = page.locator(".scroll").evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth + 1).length")
    assert (cut > 0) is is_wide
    page.wait_for_function(f"document.querySelectorAll('.scroll.cut').length === {cut}")
    assert page.locator(".hint:visible").count() == cut


def test_the_statistics_of_a_dataset_fit_a_phone(new_page, tmp_path):
    folders = bench.write(tmp_path)
    write_statistics(folders.clean)
    page = new_page(folders.clean / "statistics.html", viewport=PHONE)
    assert page.evaluate(OVERFLOW) == 0
    assert page.locator(".scroll").evaluate("one => one.scrollWidth - one.clientWidth") == 0
    assert page.locator("td[data-name=Vocabulary]").is_visible()


def test_the_menu_of_a_phone_has_a_shadow_where_it_goes_on(new_page, pages: Pages):
    menu = new_page(pages.inside, viewport=PHONE).locator("nav div")
    assert menu.evaluate("one => one.scrollWidth > one.clientWidth")
    assert "gradient" in menu.evaluate("one => getComputedStyle(one).backgroundImage")


def test_on_a_wide_screen_a_table_that_fits_says_nothing_of_scrolling(page: Page):
    assert page.locator("#scores > .scroll.cut").count() == 0
    assert page.locator("#scores .hint:visible").count() == 0


def test_a_link_into_a_folded_part_opens_it(new_page, pages: Pages):
    page = new_page(pages.inside)
    assert not page.locator("#toy-test").evaluate("part => part.open")
    page.evaluate("location.hash = '#toy-test'")
    page.wait_for_function("document.getElementById('toy-test').open")
    assert page.locator("#toy-test table").is_visible()


def test_the_gallery_of_a_report_grows_at_a_press_above_the_scores(new_page, pages: Pages):
    page = new_page(pages.large)
    view(page, "All pairs")
    page.mouse.wheel(0, 20_000)
    page.wait_for_timeout(100)
    assert len(ids(page)) == FIRST_CARDS
    page.locator("#more button").click()
    assert len(ids(page)) > FIRST_CARDS


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_curves_are_drawn_in_colours_of_the_scheme(new_page, pages: Pages, scheme):
    page = new_page(pages.inside, color_scheme=scheme)
    charts = page.locator("#training svg.chart")
    assert charts.count() == 3
    box = charts.first.bounding_box()
    assert box is not None
    assert box["width"] > 250
    line = charts.first.locator("path.line.s0")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    stroke = line.evaluate("line => getComputedStyle(line).stroke")
    assert contrast(stroke, ground) > 3
    words = charts.first.locator("text").first.evaluate("text => getComputedStyle(text).fill")
    assert contrast(words, ground) > 4.5


def contrast(first_colour: str, second_colour: str) -> float:
    """The ratio of two colours as the guidelines for accessible pages (WCAG 2) define it."""

    def luminance(colour: str) -> float:
        channels = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first_colour), luminance(second_colour)))
    return (high + 0.05) / (low + 0.05)


def test_the_page_of_validate_fits_a_phone_however_long_its_names_are(new_page, tmp_path: Path):
    name = "a_dataset_with_a_very_long_name_" * 3
    row = {"id": f"{name}/1", "dataset": name, "split": "train", "own_split": "train", "source": f"{name}.csv, line 22"}
    row |= {"reason": f"after: {name}.jpg is missing; restore the file", "rules": ["images_present"]}
    counts = ValidateCounts(
        pairs={"train": 59, "test": 7},
        references={"train": 59, "test": 7},
        quarantined=1,
        broken_rules={"images_present": 1},
        lost_test_pairs=[],
    )
    finding = Finding(dataset=name, kind="sides_differ", count=2, sentence="2 pairs differ in size.", first=[name])
    report = ValidateReport(
        **{"stage": "validate", "rows_in": 67, "rows_out": 66, "quarantined": 1, "leaks": 0, "overlaps": {}},
        **{"references_respaced": 0, "images": 130, "bad_images": 1, "mislabelled_images": 0},
        findings=[finding],
        datasets={name: counts},
    )
    checks = [
        ExpectationResult(name, "images_present", "expect", is_met=False, row_count=1),
        ExpectationResult(name, "no_markup", "expect", is_met=True, row_count=0),
    ]
    write_page(report, checks, pl.DataFrame([row]), tmp_path)
    page = new_page(tmp_path / "index.html", viewport=PHONE)
    page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    assert page.evaluate(OVERFLOW) == 0
    beyond = "all => all.filter(one => one.getBoundingClientRect().right > innerWidth).length"
    assert page.locator("td, th, p, h1, h2, h3").evaluate_all(beyond) == 0
    assert page.locator("#quarantine").inner_text().count("1 row") == 1
