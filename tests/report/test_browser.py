"""The page in Chromium with the network off: every chart drawn under its own policy, menus, clicks, downloads, light and dark."""

from __future__ import annotations

import csv

import pytest

from tests.browser import MISSING, OFF, browser, severe, until, wait  # noqa: F401  (a fixture)
from tests.report.conftest import HOSTILE

pytestmark = pytest.mark.browser
HOME, TAB, SHIFT = "\ue011", "\ue004", "\ue008"  # keys, as WebDriver writes them


@pytest.mark.skipif(OFF, reason="BROWSER=0")
def test_there_is_a_browser():
    if MISSING:
        pytest.fail(
            f"no {', '.join(MISSING)}: install them (Debian: chromium and chromium-driver; pip: selenium), or leave these tests out "
            "with BROWSER=0",
            pytrace=False,
        )


@pytest.fixture(scope="module")
def page(browser, request):  # noqa: F811  (the fixture)
    """The hostile page, every chart asked for; not made where there is no browser."""
    browser.get(f"file://{request.getfixturevalue('hostile_page')}#all")
    until(browser, "kvsim.errors.length || Object.keys(kvsim.views).length === kvsim.names.length")
    return browser


def find(page, selector):
    """The element, scrolled to where it can be clicked."""
    element = page.find_element("css selector", selector)
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    return element


def drawn(colours):
    return f"kvsim.names.every(n => document.getElementById(n).dataset.drawn === '{colours}')"


def test_every_chart_is_drawn_and_labelled_and_nothing_else_ran(page):
    assert page.execute_script("return kvsim.errors") == []
    charts = page.execute_script("return kvsim.names.length")
    assert charts == len(page.find_elements("css selector", ".chart svg.marks")) > 50  # of two runs
    assert page.execute_script("return [...document.querySelectorAll('svg.marks')].every(s => s.ariaLabel.length > 30)")
    assert page.execute_script("return typeof window.PWN") == "undefined"
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert severe(page) == []


def test_every_chart_shows_marks(page):
    """A chart without a mark was drawn from columns that are not there."""
    empty = page.execute_script(
        "return kvsim.names.filter(n => !document.querySelector(`#${n} svg .mark-rect path, #${n} svg .mark-line path, "
        "#${n} svg .mark-symbol path:not(.role-legend-symbol *), #${n} svg .mark-area path`))"
    )
    assert empty == []


def test_a_click_on_the_map_picks_that_head(page):
    find(page, "#run2-explore svg path[aria-label*='query head: 2'][aria-label*='layer: 3']").click()
    until(page, "JSON.stringify(kvsim.views['run2-explore'].view.data('pick_store').map(d => d.values)) === '[[2,3]]'")
    text = "[...document.querySelectorAll('#run2-explore text')].map(t => t.textContent)"
    until(page, f"{text}.includes('Every policy: layer 3, query head 2')")
    assert page.execute_script("return document.querySelector('#run2-explore select[name=pick_q_head]').value") == "2"


def test_a_menu_picks_a_head_without_a_mouse(page):
    menu = find(page, "#run2-explore select[name=pick_q_head]")
    menu.send_keys("1")
    until(page, "kvsim.views['run2-explore'].view.data('pick_store').some(d => d.values[0] === 1)")


def test_the_picked_head_is_drawn_over_the_steps(page):
    lines = "document.querySelectorAll('#run2-explore svg .mark-line path[d]').length"
    assert page.execute_script(f"return {lines}") >= 6  # a line per policy


MARKS = "[...document.querySelectorAll('#run2-explore svg .mark-{} path')].map(p => p.getAttribute('d') + p.getAttribute('fill')).join()"
TITLES = "[...document.querySelectorAll('#run2-explore svg .role-title-text text')].map(t => t.textContent)"


@pytest.mark.parametrize(
    ("menu", "key", "said"),
    [
        ("pick_layer", "0", "layer 0, query head"),
        ("pick_q_head", "3", ", query head 3"),
        ("shown", "h2o", "Kept and read by h2o 12"),
        ("other", "kivi", "second: kivi"),
        ("at_step", "4", "decode step 4"),
    ],
)
def test_the_keyboard_alone_picks_and_every_panel_follows(page, menu, key, said):
    """Tab reaches the menu, which shows that it has the focus; typing picks, and the detail is another one."""
    find(page, "#figure-run2-explore")
    before = page.execute_script(f"return {MARKS.format('rect')} + {MARKS.format('symbol')}")
    page.execute_script("document.querySelector('a.csv[data-of=run2-explore]').focus()")
    names = page.execute_script("return [...document.querySelectorAll('#run2-explore select')].map(s => s.name)")
    active = page.switch_to.active_element
    for _ in range(20):  # backwards from what follows the chart
        active.send_keys(SHIFT + TAB)
        active = page.switch_to.active_element
        if active.get_attribute("name") == menu:
            break
    assert active.get_attribute("name") == menu, names
    assert page.execute_script("return getComputedStyle(document.activeElement).outlineStyle") != "none"
    active.send_keys(key)
    until(page, f"{TITLES}.some(t => t.includes({said!r}))")
    until(page, f"{MARKS.format('rect')} + {MARKS.format('symbol')} !== {before!r}")
    assert severe(page) == []


def test_every_menu_and_every_figure_has_a_name(page):
    """A label for each control, a description for each drawing, a heading for each figure."""
    unnamed = page.execute_script(
        "return [...document.querySelectorAll('select, input')].filter(s => !s.labels.length || !s.labels[0].textContent.trim()).length"
    )
    assert unnamed == 0
    figures = page.execute_script(
        "return [...document.querySelectorAll('figure')].filter(f => !document.getElementById(f.getAttribute('aria-labelledby'))).length"
    )
    assert figures == 0
    described = page.execute_script("return new Set([...document.querySelectorAll('svg.marks')].map(s => s.ariaLabel)).size")
    assert described > 25  # different ones: the page has two runs


def test_the_page_is_small(page):
    """The charts' script is there once; two runs of some thirty charts each stay under the bound of one."""
    size = page.execute_script("return document.documentElement.outerHTML.length")
    drawn = page.execute_script("return [...document.querySelectorAll('.chart')].reduce((n, c) => n + c.innerHTML.length, 0)")
    script = page.execute_script("return [...document.scripts].filter(s => !s.type).map(s => s.textContent.length)")
    assert size - drawn < 6_000_000
    assert len(script) == 2
    assert max(script) < 1_100_000


def test_text_is_readable_in_light_and_in_dark(page):
    """4.5 to 1 and more (WCAG AA) between the letters of page and charts and what is behind them."""
    for colours in ("light", "dark"):
        if page.execute_script("return document.getElementById(kvsim.names[0]).dataset.drawn") != colours:
            find(page, "#theme").click()
        until(page, drawn(colours))
        fills = page.execute_script(
            "return [...new Set([...document.querySelectorAll('svg.marks text')].map(t => t.getAttribute('fill')))]"
        )
        ground = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        texts = page.execute_script(
            "return [...document.querySelectorAll('h1, p, figcaption, td, th, label, :not(.vega-actions) > a, .data > summary')].map(e => getComputedStyle(e).color)"
        )
        weak = {t for t in {*filter(None, fills), *texts} if contrast(rgb(t), rgb(ground)) < 4.5}
        assert weak == set()


def rgb(text):
    """#RRGGBB or rgb(r, g, b)."""
    if text.startswith("#"):
        return [int(text[i : i + 2], 16) for i in (1, 3, 5)]
    return [int(x) for x in text[text.index("(") + 1 :].rstrip(")").split(",")[:3]]


def contrast(a, b):
    """WCAG 2.2, 1.4.3."""

    def luminance(colour):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (x / 255 for x in colour)]
        return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_a_click_on_the_legend_keeps_one_policy(page):
    find(page, "#run2-quality-tokens .role-legend-symbol path").click()
    until(page, "kvsim.views['run2-quality-tokens'].view.signal('focus').policy == 'quest 8'")


def test_one_policy_is_kept_in_every_chart(page):
    find(page, "#policy").send_keys("kivi")
    kept = "(n => kvsim.views[n].view.data('focus_store').map(d => d.values[0]).join())"
    until(page, f"['run2-steps', 'run2-quality-bytes', 'run2-layers'].every(n => {kept}(n) === 'kivi')")
    faded = "[...document.querySelectorAll('#run2-memory .mark-symbol path')].map(p => p.getAttribute('opacity'))"
    until(page, f"{faded}.includes('0.1') && {faded}.includes('1')")
    find(page, "#policy").send_keys(HOME)
    until(page, f"{kept}('run2-steps') === ''")


def test_a_statistic_over_heads_is_chosen_from_a_menu(page):
    at = "[...document.querySelectorAll('#run2-memory .mark-symbol path')].map(p => p.getAttribute('transform')).join()"
    before = page.execute_script(f"return {at}")
    find(page, "#run2-memory select[name=statistic]").send_keys("worst")
    until(page, f"{at} !== {before!r}")


def test_the_download_holds_the_rows_of_the_figure(page, tmp_path):
    found = rows_of(page, "run2-fate", tmp_path)
    assert found[0] == ["policy", "part", "mass", "order"]
    policies = {row[0] for row in found[1:]}
    assert {"quest 8", "h2o 12", "kivi", "full"} <= policies
    assert len(found) == 1 + 6 * len(policies)
    assert all(abs(sum(float(row[2]) for row in found[1:] if row[0] == p) - 1) < 1e-4 for p in policies)


def test_hostile_names_stay_text_in_a_download(page, tmp_path):
    found = rows_of(page, "run1-fate", tmp_path)
    labels = {row[0] for row in found[1:]}
    assert any("script>" in label for label in labels)
    assert not any(label.startswith(("=", "+", "-", "@")) for label in labels)


def rows_of(page, figure, folder):
    """The CSV file that a click on the link of a figure saves."""
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    link = find(page, f"a.csv[data-of='{figure}']")
    link.click()
    assert link.get_attribute("href").startswith("blob:")
    file = folder / f"{figure}.csv"
    wait(page, lambda _: file.is_file() and file.stat().st_size > 0, f"{file} is saved")
    with file.open(newline="") as text:
        return list(csv.reader(text))


def test_a_table_opens_beside_the_chart(page):
    details = find(page, "details.data[data-of='run2-bytes'] summary")
    details.click()
    until(page, "document.querySelectorAll(\"details.data[data-of='run2-bytes'] tbody tr\").length > 10")
    head = page.execute_script(
        "return [...document.querySelectorAll(\"details.data[data-of='run2-bytes'] th\")].map(t => t.textContent)"
    )
    assert head == ["policy", "part", "bytes", "order"]


def test_formulas_get_a_quote_in_front(page):
    """As a spreadsheet would read them; other text and numbers stay as they are."""
    text = page.execute_script(
        "return kvsim.csv({columns: ['a', 'b'], rows: 4, at: i => [[ '=1+1', -1], ['say \"x\", y', 2.5], ['@a', null], ['plain', 0]][i]})"
    )
    assert text == 'a,b\r\n\'=1+1,-1\r\n"say ""x"", y",2.5\r\n\'@a,\r\nplain,0\r\n'


def test_the_switch_draws_every_chart_again(page):
    before = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    first = page.execute_script("return document.getElementById(kvsim.names[0]).dataset.drawn")
    find(page, "#theme").click()
    until(page, drawn({"light": "dark", "dark": "light"}[first]))
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") != before
    assert severe(page) == []


def test_a_title_that_is_hostile_is_shown_as_it_is(page):
    assert HOSTILE.split("{{")[0].strip()[:30] in page.execute_script("return document.querySelector('h1').textContent")
