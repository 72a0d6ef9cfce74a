"""The page in Chromium: every chart drawn under its own policy, the map selects, light and dark."""

from __future__ import annotations

import os
import shutil

import pytest

pytest.importorskip("selenium")
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium") or "", shutil.which("chromedriver")
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
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(os.environ.get("BROWSER") == "0", reason="BROWSER=0"),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(browser, hostile_page):
    browser.get(f"file://{hostile_page}#all")
    until(browser, "kvsim.errors.length || Object.keys(kvsim.views).length === kvsim.names.length")
    return browser


def until(browser, condition):
    WebDriverWait(browser, 30, 0.1).until(lambda b: b.execute_script(f"return {condition}"), condition)


def drawn(colours):
    return f"kvsim.names.every(n => document.getElementById(n).dataset.drawn === '{colours}')"


def test_every_chart_is_drawn_and_labelled_and_nothing_else_ran(page):
    assert page.execute_script("return kvsim.errors") == []
    assert len(page.find_elements(By.CSS_SELECTOR, ".chart svg.marks")) == page.execute_script("return kvsim.names.length") == 12
    assert page.execute_script(
        "return [...document.querySelectorAll('svg.marks')].every(s => s.getAttribute('aria-label').length > 30)"
    )
    assert page.execute_script("return typeof window.PWN") == "undefined"
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_click_on_the_map_picks_that_head(page):
    cell = page.find_element(By.CSS_SELECTOR, "#run2-map svg path[aria-label*='query head: 2'][aria-label*='layer: 3']")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", cell)
    cell.click()
    until(page, "JSON.stringify(kvsim.views['run2-map'].view.data('pick_store').map(d => d.values)) === '[[3,2]]'")
    title = "[...document.querySelectorAll('#run2-map text')].some(t => /^Layer 3, query head 2 under every policy$/.test(t.textContent))"
    until(page, title)


def test_a_click_on_the_legend_keeps_one_policy(page):
    symbol = page.find_element(By.CSS_SELECTOR, "#run2-quality-tokens .role-legend-symbol path")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", symbol)
    symbol.click()
    until(page, "kvsim.views['run2-quality-tokens'].view.signal('focus').policy == 'quest 8'")


def test_the_switch_draws_every_chart_again(page):
    before = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    first = page.execute_script("return document.getElementById(kvsim.names[0]).dataset.drawn")
    page.find_element(By.ID, "theme").click()
    until(page, drawn({"light": "dark", "dark": "light"}[first]))
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") != before
    page.find_element(By.ID, "theme").click()
    until(page, drawn(first))
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []
