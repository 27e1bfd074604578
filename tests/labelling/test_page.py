"""The page in a real browser."""

import pytest
from browser import chromium, press, text
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from waiting import wait_until

from rlhf_pipeline.labelling.votes import read_votes

HOSTILE = '</script><script>window.hacked = 1</script><img src="x" onerror="window.hacked = 2">'


@pytest.fixture(scope="module")
def page():
    with chromium() as page:
        yield page


@pytest.fixture
def open_page(page, serve, votes):
    """Opens the page of some pairs as an annotator."""

    def open_page(pairs, annotator="?annotator=Ann"):
        page.set_window_size(1280, 900)
        page.get(f"{serve(pairs, votes)}/{annotator}")

    yield open_page
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


def shows(page, count):
    """Wait until so many pairs are done."""
    wait_until(lambda: text(page, "count").endswith(f": {count}"))


def click(page, selector):
    page.find_element(By.CSS_SELECTOR, selector).click()


def scores(votes):
    """By vote, the scores of the answers that were shown as A and B."""
    found = [(v.first_score, v.second_score, v.shown_as_a) for v in read_votes(votes)]
    return [(first, second) if a == "first" else (second, first) for first, second, a in found]


def test_ten_pairs_are_compared_by_mouse_and_keyboard(page, open_page, pairs, votes):
    open_page(pairs(10), annotator="")
    page.find_element(By.ID, "annotator").send_keys("Ann B.", Keys.ENTER)
    shows(page, "0 of 10")
    assert "annotator=Ann+B." in page.current_url
    page.execute_script(  # a double click is one vote
        "const a = document.querySelector('[data-choice=a]'); a.click(); a.click(); a.click();"
    )
    shows(page, "1 of 10")
    for done, choice in enumerate(("b", "tie", "bad"), start=2):
        click(page, f'[data-choice="{choice}"]')
        shows(page, f"{done} of 10")
    for done, key in enumerate(("1", "2", "3", "4", Keys.ARROW_LEFT, Keys.ARROW_RIGHT), start=5):
        press(page, key)
        shows(page, f"{done} of 10")
    each = [(1, 0), (0, 1), (1, 1), (0, 0)]
    assert scores(votes) == [*each, *each, (1, 0), (0, 1)]
    assert {v.annotator for v in read_votes(votes)} == {"Ann B."}
    assert text(page, "question") == "All pairs are done. Thank you."
    wait_until(lambda: "of 10 pairs: " in text(page, "found"))
    assert not page.find_element(By.ID, "pair").is_displayed()


def test_the_keyboard_alone_gives_reasons_and_undoes(page, open_page, pairs, votes):
    open_page(pairs(3))
    shows(page, "0 of 3")
    press(page, "r", "1 is ruder, u know", Keys.ENTER, "2")  # letters of the reason do nothing else
    shows(page, "1 of 3")
    assert [(v.reason, s) for v, s in zip(read_votes(votes), scores(votes), strict=True)] == [
        ("1 is ruder, u know", (0, 1))
    ]
    assert page.find_element(By.ID, "reason").get_property("value") == ""
    press(page, "u")
    shows(page, "0 of 3")
    assert read_votes(votes) == []
    chord = ActionChains(page).key_down(Keys.CONTROL).send_keys("2").key_up(Keys.CONTROL)
    chord.perform()  # a key of the browser
    press(page, "u")  # nothing is left to undo
    press(page, Keys.TAB, Keys.TAB, Keys.ENTER)  # the second button has the focus
    shows(page, "1 of 3")
    assert scores(votes) == [(0, 1)]


def test_texts_are_shown_and_not_executed(page, open_page, pairs, votes):
    prompt = [
        {"role": "system", "content": HOSTILE},
        {"role": "user", "content": f"{HOSTILE}\n  & next line"},
    ]
    row = {"prompt": prompt, "first": f"{HOSTILE} 1", "second": f"{HOSTILE} 2"}
    open_page(pairs([row | {"policies": [HOSTILE, HOSTILE]}]), f"?annotator={HOSTILE[-50:]}")
    shows(page, "0 of 1")
    assert text(page, "prompt") == f"System\n{HOSTILE}\nUser\n{HOSTILE}\n  & next line"
    assert sorted([text(page, "a"), text(page, "b")]) == [f"{HOSTILE} 1", f"{HOSTILE} 2"]
    press(page, "1")
    wait_until(lambda: f"People prefer {HOSTILE} to {HOSTILE}" in text(page, "found"))
    assert page.execute_script("return window.hacked") is None


def test_the_page_says_when_a_vote_was_not_saved(page, open_page, pairs, votes):
    open_page(pairs(2))
    shows(page, "0 of 2")
    page.execute_script("window.fetch = () => Promise.reject(new Error('no network'));")
    press(page, "1")
    wait_until(lambda: text(page, "status") == "Not saved: no network. Try again.")
    assert text(page, "count") == "Ann: 0 of 2" and read_votes(votes) == []
