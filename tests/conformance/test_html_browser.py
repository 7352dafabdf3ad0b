"""The HTML page in a real browser: nothing goes wrong, nothing is fetched, everything is there and can be read."""

from __future__ import annotations

import itertools
import os

import pytest
from browser import Browser, executable
from made_reports import hostile, mixed, report, result

from hal.conformance.html import write_html

CELLS = "document.querySelectorAll('.heat tbody td:not(.gap)').length"
# Every piece of text with the colours that it has on the screen: [contrast, text].
CONTRAST = """
(() => {
  const linear = v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
  const bright = c => { const f = c.map(linear); return .2126 * f[0] + .7152 * f[1] + .0722 * f[2]; };
  const parse = s => s.match(/[\\d.]+/g).map(Number);
  const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
                        if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  document.querySelectorAll('details').forEach(d => { d.open = true; });
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement, text = walk.currentNode.data.trim();
    if (!text || ['STYLE', 'SCRIPT'].includes(e.tagName) || e.closest('.vh, .skip')) continue;
    const a = bright(parse(getComputedStyle(e).color)), b = bright(behind(e));
    found.push([(Math.max(a, b) + .05) / (Math.min(a, b) + .05), text]);
  }
  return found.sort((x, y) => x[0] - y[0]);
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if executable() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("the page must be looked at in a real browser here, and there is none: install chromium")
        pytest.skip("no chromium on this machine")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def shown(browser, tmp_path):
    """Writes reports as a page and opens it."""

    def show(*reports, **how):
        browser.problems.clear()
        browser.requests.clear()
        path = tmp_path / "page.html"
        write_html(reports, path)
        browser.open(path.as_uri(), **how)
        return browser

    return show


def test_the_browser_reports_what_goes_wrong(browser, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text("<script>console.error('oh'); undefinedFunction()</script><img src='http://localhost:9/x'>")
    browser.problems.clear()
    browser.requests.clear()
    browser.open(page.as_uri())
    told = "\n".join(browser.problems)
    assert "oh" in told
    assert "undefinedFunction" in told
    assert "http://localhost:9/x" in browser.requests


def test_the_page_loads_without_a_word_on_the_console_and_fetches_nothing(shown, tmp_path):
    page = shown(mixed(), report(result(implementation="composed"), backend="portable:cpu"))
    assert page.problems == []
    assert page.requests == [(tmp_path / "page.html").as_uri()]


def test_the_heat_map_has_a_cell_for_each_op_implementation_and_dtype(shown):
    # mixed(): 2 ops; aten in 3 dtypes, reference in 2
    assert shown(mixed()).value(CELLS) == 2 * 5
    assert shown(mixed(), report(result(implementation="composed"))).value(CELLS) == 2 * 6


def test_failures_are_shown_and_a_failing_cell_leads_to_its_own(shown):
    page = shown(mixed())
    assert page.value("document.querySelectorAll('.failure').length") == 2
    assert "y[3,7] = 1.25" in page.value("document.querySelector('.failure').innerText")
    assert page.value("document.querySelector('.failure').checkVisibility()")
    page.value("document.querySelectorAll('.heat .hbad a')[0].click()")
    assert "y[3,7] = 1.25" in page.value("document.querySelector(':target').innerText")


def test_markup_in_a_report_does_nothing(shown):
    page = shown(hostile())
    assert page.problems == []
    assert page.value("window.hacked") is None
    assert page.value("document.images.length") == 0
    assert "<script>window.hacked" in page.value("document.querySelector('.failure').innerText")


def test_a_script_that_got_in_would_not_run(shown):
    page = shown(mixed())
    page.value("document.body.insertAdjacentHTML('beforeend', '<button id=x onclick=\"window.hacked = 1\">')")
    page.value("document.getElementById('x').click()")
    assert page.value("window.hacked") is None
    assert "Content Security Policy" in page.problems[0]


def test_the_button_copies_the_command(shown, browser):
    page = shown(mixed())
    session, browser.session = browser.session, None
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.session = session
    page.value("document.querySelector('.repeat button').click()")
    page.value("new Promise(done => setTimeout(done, 300))")
    assert page.value("document.querySelector('.repeat button').textContent") == "Copied"
    assert page.value("document.getElementById('said').textContent") == "Command copied"
    command = page.value("document.querySelector('.repeat code').textContent")
    assert page.value("navigator.clipboard.readText()") == command
    assert page.problems == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_has_enough_contrast(shown, dark):
    shares = [result(f"op{i}", share=share) for i, share in enumerate((0.0, 0.05, 0.2, 0.4, 0.7, 0.9))]
    noted = report(*shares, *mixed().results, missing=("linear",), waivers=mixed().waivers)
    page = shown(noted, report(result(), complete=False, planned=9), report(result()), dark=dark)
    found = page.value(CONTRAST)
    assert len(found) > 100
    assert [pair for pair in found if pair[0] < 4.5] == []


def test_light_and_dark_are_two_schemes(shown):
    colour = "getComputedStyle(document.body).backgroundColor"
    assert shown(mixed()).value(colour) != shown(mixed(), dark=True).value(colour)


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_only_the_tables_scroll_sideways(shown, width):
    page = shown(mixed(), hostile(), report(result(implementation="composed")), width=width)
    assert page.value("document.documentElement.scrollWidth") <= width


def test_the_page_has_one_h1_no_gap_in_its_headings_and_named_tables(shown):
    page = shown(mixed())
    levels = page.value("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert page.value("[...document.querySelectorAll('table')].every(t => t.closest('[aria-label]'))")
    assert page.value("[...document.querySelectorAll('tbody tr')].every(r => r.querySelector('th[scope=row]'))")
    assert page.value("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")
    assert page.value("[...document.querySelectorAll('[id]')].map(e => e.id).length") == page.value(
        "new Set([...document.querySelectorAll('[id]')].map(e => e.id)).size"
    )
    assert page.value("document.documentElement.lang") == "en"
