"""A real browser for the tests of pages: Debian's chromium without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By


@contextmanager
def chromium() -> Iterator[Chrome]:
    """Start chromium; skips the test where there is none."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
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
