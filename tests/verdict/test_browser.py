"""The page in a real browser: what it loads, what it runs, what the keyboard reaches."""

import json
import time

import pytest
from made_by_hand import HOSTILE, REGISTRATION
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from rlhf_pipeline.verdict.page import evaluation_page

PHONE = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
DESKTOP = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}


@pytest.fixture
def opened(browser, evaluation, models, tmp_path):
    """Opens the page of an evaluation; returns the browser."""

    def opened(size=DESKTOP, **changes):
        file = tmp_path / "page.html"
        page = evaluation_page(evaluation(**changes), models, REGISTRATION)
        file.write_text(page, encoding="utf-8")
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for log in ("browser", "performance"):
            browser.get_log(log)  # of earlier pages
        browser.get(file.as_uri())
        return browser

    return opened


def numbers(page):
    """The numbers of the prompts that the table shows, in order."""
    cells = page.find_elements(By.CSS_SELECTOR, ".answers tbody td:first-child")
    return [int(cell.text.split()[-1]) for cell in cells]


def press(page, *keys):
    page.switch_to.active_element.send_keys(*keys)


def tab_to(page, selector):
    """Press Tab until an element has the focus."""
    wanted = page.find_element(By.CSS_SELECTOR, selector)
    for _ in range(200):
        if page.switch_to.active_element == wanted:
            return
        press(page, Keys.TAB)
    raise AssertionError(f"Tab does not reach {selector}")


def test_every_chart_is_drawn_without_an_error_or_a_request(opened):
    page = opened()
    assert page.get_log("browser") == []
    figures = page.find_elements(By.CSS_SELECTOR, "figure")
    assert len(figures) == 13
    assert all(figure.find_elements(By.CSS_SELECTOR, "svg path") for figure in figures)
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    assert asked and all(url.startswith(("file://", "data:")) for url in asked)


def test_the_keyboard_reads_the_points_of_a_chart_sorts_and_turns_pages(opened):
    page = opened()
    tab_to(page, ".plot")
    press(page, Keys.END)
    assert page.find_element(By.CSS_SELECTOR, "output").text == "held-out: 2 at step 8"
    assert numbers(page) == list(range(1, 21))
    tab_to(page, ".answers [data-key='0'] button")
    press(page, Keys.ENTER)
    assert numbers(page)[:3] == [60, 59, 58]
    head = page.find_element(By.CSS_SELECTOR, ".answers [data-key='0']")
    assert head.get_attribute("aria-sort") == "descending"
    press(page, Keys.SPACE)
    assert numbers(page)[:3] == [1, 2, 3]
    tab_to(page, ".pages button:last-child")
    press(page, Keys.ENTER)
    assert numbers(page) == list(range(21, 41))
    assert page.find_element(By.CSS_SELECTOR, "[role=status]").text == "21 to 40 of 60 prompts"


def test_the_keyboard_filters_by_outcome_and_text(opened):
    """The reward model always prefers PPO, so it disagrees where the gold judge does not."""
    page = opened()
    status = page.find_element(By.CSS_SELECTOR, "[role=status]")
    tab_to(page, "[name=kind]")
    for letters, first, count in (
        ("largest g", 60, 29), ("largest l", 1, 30), ("t", 31, 1), ("j", 1, 30)
    ):  # fmt: skip
        time.sleep(1.1)  # the letters of a second belong together
        press(page, letters)
        assert (letters, numbers(page)[0]) == (letters, first)
        assert status.text.endswith(f" of {count} prompts")
    tab_to(page, "[name=text]")
    press(page, "QUESTION 17 nonsense")
    assert status.text == "No prompt matches."


def test_words_that_differ_are_marked(opened):
    page = opened()
    row = page.find_elements(By.CSS_SELECTOR, ".answers tbody tr")[1]
    assert [mark.text for mark in row.find_elements(By.TAG_NAME, "mark")] == ["never", "always"]
    tab_to(page, "[name=mark]")
    press(page, Keys.SPACE)
    assert page.find_elements(By.CSS_SELECTOR, ".answers mark") == []


def test_hostile_texts_are_shown_and_not_run(opened):
    slices = {HOSTILE: {"n": 60, "win_rates": {"gold": {"rate": 0.5, "lower": 0.4, "upper": 0.6,
                                                          "n": 60}}}}  # fmt: skip
    page = opened(slices=slices)
    texts = [cell.text for cell in page.find_elements(By.CSS_SELECTOR, ".answers tr .text")]
    assert texts[1] == texts[2] == HOSTILE
    assert page.execute_script("return window.hacked") is None
    assert page.find_elements(By.TAG_NAME, "img") == []


def test_nothing_is_wider_than_the_window_of_a_phone(opened):
    page = opened(PHONE)
    assert page.execute_script("return document.documentElement.scrollWidth") <= PHONE["width"]
    table, box = (page.find_element(By.CSS_SELECTOR, each) for each in (".answers", "main"))
    assert table.size["width"] <= box.size["width"]
