"""Chromium with the network off, for tests that open a page: a module imports the fixture, which is not started where there is no browser."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import pytest

HERE = {"chromium": shutil.which("chromium"), "chromedriver": shutil.which("chromedriver"), "selenium": find_spec("selenium")}
MISSING = [name for name, found in HERE.items() if not found]
OFF = os.environ.get("BROWSER") == "0"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--no-proxy-server",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if OFF or MISSING:
        pytest.skip("BROWSER=0" if OFF else f"no {', '.join(MISSING)}")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = HERE["chromium"]
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(HERE["chromedriver"]))
    yield driver
    driver.quit()


def wait(browser, happens, what):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60, 0.1).until(happens, what)


def until(browser, condition):
    wait(browser, lambda b: b.execute_script(f"return {condition}"), condition)


def severe(page):
    return [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
