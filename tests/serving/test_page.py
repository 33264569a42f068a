"""Test the page in headless Chromium, in the windows of a desktop and of a phone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Page, expect

from m3diff.models.contract import Takes
from m3diff.serving.model_card import NO_PHOTOGRAPHS, Example, TrainingData
from m3diff.serving.page import read_page
from m3diff.serving.questions import NOTE
from tests.browser import Watch, chromium
from tests.servers import free_port
from tests.serving.toy import Service, ToyCaptioner, plain, source, write_toy

DESKTOP = {"width": 1400, "height": 1000}
PHONE = {"width": 390, "height": 844}
own_answer = ToyCaptioner.answer
WANT = "one: 10/20/0 became 30/40/0 (What has changed from the first image to the second?)"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`before.png` and `after.png`."""
    root = tmp_path_factory.mktemp("images")
    plain(10, 20, size=(320, 240)).save(root / "before.png")
    plain(30, 40, size=(320, 240)).save(root / "after.png")
    return root


def card_of(images: Path) -> dict[str, Any]:
    """Return the facts of a model of drawn scenes, with six example pairs."""
    files = {side: images / f"{side}.png" for side in ("before", "after")}
    examples = [Example(key=f"k{n}", id=f"a/{n}", reference=f"what a says of {n}", **files) for n in range(1, 7)]
    data = TrainingData(dataset="minichange", is_drawn=True, pairs=2564)
    return {"family": "m3diff", "date": "2026-11-28", "trained_on": (data,), "examples": tuple(examples)}


@contextmanager
def served(card: dict[str, Any], folder: Path) -> Iterator[str]:
    """Serve the toy of a folder and yield the address of its page."""
    service = Service(card=card)
    port = free_port()

    async def app(scope, receive, send):  # the model must be loaded in the event loop of the requests
        if service.models.current is None:
            await service.models.switch(source(folder))
        await service.server(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(app, port=port, ws="none", lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def address(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a model that was trained on pairs and single questions."""
    with served(card_of(images), write_toy(tmp_path_factory.mktemp("toy"), "one")) as address:
        yield address


@pytest.fixture(scope="module")
def address_of_dialogues(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a model that was trained on one or two images and on dialogues."""
    folder = write_toy(tmp_path_factory.mktemp("toy"), "one", question="Is it red?", images=[1, 2], turns=3)
    with served({}, folder) as address:
        yield address


@contextmanager
def opened(address: str, window: Any) -> Iterator[Page]:
    """Open the page in a new browser. Playwright's event loop would disturb other tests if it were shared."""
    with chromium() as browser:
        context = browser.new_context(viewport=window, permissions=["clipboard-read", "clipboard-write"])
        page = context.new_page()
        watch = Watch(page)
        page.goto(address)
        yield page
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"
        assert watch.foreign_requests == []
        # Chromium complains about the refusal that a test provokes
        assert [text for text in watch.complaints if "status of 422" not in text] == []
        context.close()


@pytest.fixture(params=[DESKTOP, PHONE], ids=["desktop", "phone"])
def page(request: pytest.FixtureRequest, address: str) -> Iterator[Page]:
    with opened(address, request.param) as page:
        yield page


@pytest.fixture(params=[DESKTOP, PHONE], ids=["desktop", "phone"])
def page_of_dialogues(request: pytest.FixtureRequest, address_of_dialogues: str) -> Iterator[Page]:
    with opened(address_of_dialogues, request.param) as page:
        yield page


def upload(page: Page, images: Path) -> None:
    page.set_input_files("#before", images / "before.png")
    expect(page.get_by_role("button", name="Say what changed")).to_be_disabled()
    page.set_input_files("#after", images / "after.png")


@pytest.mark.slow(30)
def test_the_page_captions_two_images_outlines_swaps_and_asks_and_shows_a_refusal(page, images, tmp_path):
    upload(page, images)
    page.get_by_role("button", name="Say what changed").click()
    expect(page.locator("#caption")).to_have_text(WANT)
    expect(page.locator("#model")).to_have_text("said by m3diff/1")
    slider = page.get_by_label("from the image before to the image after")
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert slider.input_value() == "51"
    assert page.evaluate("getComputedStyle(document.getElementById('slide')).getPropertyValue('--x')") == "49%"
    assert page.get_attribute("#slide-before", "src").startswith("blob:")
    page.get_by_label("outline what the model looked at").check()
    for side in ("before", "after"):
        assert page.get_attribute(f"#slide-{side}", "src").startswith("data:image/png;base64,")
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == WANT
    page.get_by_label("swap the images").click()
    page.get_by_label("Question").fill("Is it red?")
    page.keyboard.press("Enter")
    expect(page.locator("#caption")).to_have_text("one: 30/40/0 became 10/20/0 (Is it red?)")
    (tmp_path / "notes.png").write_text("no image")
    page.set_input_files("#after", tmp_path / "notes.png")
    page.get_by_role("button", name="Say what changed").click()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("This cannot be captioned")
    expect(alert).to_contain_text(
        "after: 8 bytes, is text, not an image (it begins with 'no image'). Allowed: an image"
    )
    page.set_input_files("#after", images / "after.png")
    expect(alert).to_be_hidden()
    page.get_by_label("Question").fill("<image>")
    page.get_by_role("button", name="Say what changed").click()
    expect(alert).to_contain_text("question: '<image>'")


@pytest.mark.slow(10)
def test_an_example_is_one_press_away(page):
    expect(page.locator("#pairs button")).to_have_count(6)
    page.get_by_label("pair 1, a/1").click()
    expect(page.locator("#caption")).to_have_text(WANT)
    expect(page.locator("#reference q")).to_have_text("what a says of 1")


@pytest.mark.slow(10)
def test_the_page_names_the_model_and_what_it_does_not_know(page):
    card = page.locator("#card")
    expect(card).to_contain_text("m3diff/1, family m3diff, from 2026-11-28")
    expect(card).to_contain_text("Trained on 2,564 pairs: minichange (2,564).")
    expect(card.locator(".warning")).to_have_text(NO_PHOTOGRAPHS)


@pytest.mark.slow(10)
def test_the_page_says_that_a_question_may_have_been_passed_over(page, images):
    upload(page, images)
    page.get_by_label("Question").fill("Is a cup gone?")
    page.get_by_role("button", name="Say what changed").click()
    expect(page.locator("#note")).to_have_text(f"Note: {NOTE}.")
    page.get_by_label("Question").fill("What has changed?")
    page.get_by_role("button", name="Say what changed").click()
    expect(page.locator("#caption")).to_contain_text("What has changed?")
    expect(page.locator("#note")).to_be_hidden()


@pytest.mark.slow(20)
def test_the_page_asks_further_questions_with_the_turns_before_them(page_of_dialogues, images):
    page = page_of_dialogues
    expect(page.get_by_label("Question")).to_have_attribute("placeholder", "Is it red?")
    page.set_input_files("#before", images / "before.png")
    page.set_input_files("#after", images / "after.png")
    page.get_by_role("button", name="Say what changed").click()
    first_answer = "one: 10/20/0 became 30/40/0 (Is it red?)"
    expect(page.locator("#caption")).to_have_text(first_answer)
    expect(page.locator("#asked")).to_have_text("Is it red?")
    expect(page.locator("#turns")).to_be_hidden()
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_disabled()
    page.get_by_label("Next question about the same images").fill("Why?")
    page.keyboard.press("Enter")
    second_answer = f"one: 10/20/0 became 30/40/0 (Is it red? {first_answer} Why?)"
    expect(page.locator("#caption")).to_have_text(second_answer)
    expect(page.locator("#asked")).to_have_text("Why?")
    expect(page.locator("#turns li")).to_have_text([f"Is it red?{first_answer}"])
    expect(page.locator("#note")).to_be_hidden()
    for number, question in enumerate(("How?", "When?"), 2):
        page.get_by_label("Next question about the same images").fill(question)
        page.keyboard.press("Enter")
        expect(page.locator("#turns li")).to_have_count(number)
        expect(page.locator("#said")).to_be_visible()
    expect(page.locator("#note")).to_contain_text("at most 3 turns")
    page.get_by_role("button", name="New dialogue").click()
    expect(page.locator("#turns")).to_be_hidden()
    expect(page.locator("#asked")).to_be_hidden()
    page.get_by_role("button", name="Say what changed").click()
    expect(page.locator("#caption")).to_have_text(first_answer)
    page.get_by_label("swap the images").click()
    page.get_by_label("Question").fill("Why?")
    page.get_by_role("button", name="Say what changed").click()
    expect(page.locator("#caption")).to_have_text("one: 30/40/0 became 10/20/0 (Why?)")


@pytest.mark.slow(20)
def test_the_page_says_that_a_model_without_maps_draws_no_outlines(images, tmp_path, monkeypatch):
    monkeypatch.setattr(ToyCaptioner, "family", SimpleNamespace(takes=Takes(), maps=None))
    monkeypatch.setattr(ToyCaptioner, "answer", answer_without_maps)
    with served({}, write_toy(tmp_path, "one")) as address, opened(address, PHONE) as page:
        upload(page, images)
        page.get_by_role("button", name="Say what changed").click()
        expect(page.locator("#caption")).to_have_text(WANT)
        expect(page.locator("#no-overlay")).to_be_visible()
        expect(page.locator("#overlay-label")).to_be_hidden()


def answer_without_maps(captioner, prepared, dialogues, saliency=False):
    texts, _ = own_answer(captioner, prepared, dialogues)
    return texts, None


@pytest.mark.slow(20)
def test_the_page_answers_about_one_image_if_the_model_was_trained_on_one(page_of_dialogues, images):
    page = page_of_dialogues
    expect(page.locator("#lead")).to_contain_text("or one image")
    page.set_input_files("#after", images / "after.png")
    page.get_by_label("Question").fill("How many?")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#caption")).to_have_text("one: 30/40/0 (How many?)")
    expect(page.get_by_role("img", name="image", exact=True)).to_be_visible()
    expect(page.locator("#slider")).to_be_hidden()
    expect(page.locator("#overlay-label")).to_be_hidden()
    page.set_input_files("#before", images / "before.png")
    expect(page.locator("#slider")).to_be_visible()
    page.get_by_label("remove the image after").click()
    page.get_by_label("Question").fill("How many?")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#caption")).to_have_text("one: 10/20/0 (How many?)")


@pytest.mark.slow(10)
def test_the_page_of_a_model_of_pairs_needs_both_and_sends_no_history(page, images):
    upload(page, images)
    page.get_by_label("Question").fill("Is it red?")
    page.get_by_role("button", name="Say what changed").click()
    expect(page.locator("#caption")).to_contain_text("(Is it red?)")
    page.get_by_role("button", name="Say what changed").click()
    expect(page.locator("#said")).to_be_visible()
    expect(page.locator("#caption")).to_contain_text("(Is it red?)")
    expect(page.locator("#turns")).to_be_hidden()
    expect(page.get_by_role("button", name="New dialogue")).to_be_hidden()
    expect(page.get_by_label("remove the image after")).to_be_hidden()


def test_the_example_pairs_belong_to_the_current_model(images, tmp_path):
    service = Service(card=card_of(images))
    assert service.get("/examples").json() == []
    service.run(service.models.switch(source(write_toy(tmp_path, "one"))))
    listed = service.get("/examples").json()[1]
    assert listed["id"] == "a/2"
    assert listed["reference"] == "what a says of 2"
    assert service.get(listed["after"]).content == (images / "after.png").read_bytes()
    for address in ("/examples/k9/after", "/examples/k1/reference", "/examples/k1/key"):
        assert service.get(address).status_code == 404
    service.runner.close()


def test_the_policy_of_the_page_names_no_host_and_allows_no_other_script():
    (html, policy) = read_page()
    service = Service()
    assert service.get("/").headers["content-security-policy"] == policy
    service.runner.close()
    assert "http" not in policy
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http://" not in html.replace("http://127.0.0.1", "")
    assert "https://" not in html
