"""A real browser for the tests of pages: Debian's chromium without a window."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By


@contextmanager
def chromium(*arguments: str) -> Iterator[Chrome]:
    """Start chromium with further arguments; skips the test where there is none.

    Its logs have the messages of the console and the requests of the page.
    """
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs chromium: apt-get install chromium chromium-driver")
    options = ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", *arguments):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    page = Chrome(options, ChromeService(driver))
    try:
        yield page
    finally:
        page.quit()


def text(page: Chrome, name: str) -> str:
    """The shown text of the element with this id."""
    return page.find_element(By.ID, name).text


def press(page: Chrome, *keys: str) -> None:
    """Press keys, wherever the focus is."""
    ActionChains(page).send_keys(*keys).perform()
