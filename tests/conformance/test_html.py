"""The HTML page as text: what it holds, that it needs nothing else, and that nothing written by others is markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from made_reports import HOSTILE, hostile, mixed, report, result

from hal.conformance.html import to_html, write_html
from hal.conformance.html_heat import step
from hal.conformance.html_tables import MOST_FAILURES
from hal.conformance.markup import Html, el, join
from hal.errors import ArgumentError, FileError


class Page(HTMLParser):
    """Every tag with its attributes, and the text outside style and script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self._open = [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "wbr"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        if not {"style", "script"} & set(self._open):
            self.text += data

    def all(self, tag, **attributes):
        return [found for name, found in self.tags if name == tag and attributes.items() <= found.items()]


def test_text_becomes_markup_only_through_an_element():
    assert el("p", "a < b", Html("<i>c</i>"), None, title='"x"') == '<p title="&quot;x&quot;">a &lt; b<i>c</i></p>'
    assert join("&", el("b")) == "&amp;<b></b>"


def test_attributes_that_are_none_or_false_are_left_out():
    assert el("td", hidden=True, class_=None, aria_hidden=False) == "<td hidden></td>"


def test_nothing_that_others_write_is_markup():
    text = to_html([hostile(), hostile()])
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= {
        "html", "head", "title", "meta", "style", "body", "a", "header", "div", "p", "h1", "h2", "h3", "ul", "li", "b",
        "span", "dl", "dt", "dd", "nav", "main", "section", "table", "caption", "thead", "tbody", "tr", "th", "td",
        "code", "abbr", "i", "details", "summary", "article", "pre", "button", "footer", "script", "wbr",
    }  # fmt: skip
    assert len(page.all("script")) == 1
    assert not [name for _, found in page.tags for name in found if name.startswith("on")]
    assert all(found["href"].startswith("#") for found in page.all("a"))
    assert HOSTILE.split("`")[0] in page.text
    assert "\u202e" not in text


def test_a_command_that_is_pasted_is_one_line():
    found = re.search(r"<pre><code>(.*?)</code></pre>", to_html([hostile()]), re.DOTALL)
    assert "\n" not in found[1]
    assert found[1].endswith("rm -rf x")


def test_the_page_names_no_other_file_and_no_address():
    text = to_html([mixed(), mixed()])
    page = Page(text)
    assert not [found for _, found in page.tags if "src" in found]
    assert not page.all("link")
    assert not re.findall(r"https?://|url\(|@import", text)


def test_equal_reports_give_equal_bytes():
    assert to_html([mixed()]) == to_html([mixed()])


def test_the_worst_share_of_a_cell_is_shown_and_unsupported_is_no_pass():
    text = to_html([mixed()])
    assert '<td class="h4" title="rms_norm, float32, aten: 2 passed">0.60' in text
    assert '<td class="hnone" title="softmax, bfloat16, aten: 1 unsupported">–' in text
    assert re.search(r'<td class="hbad" title="rms_norm, bfloat16, aten: 1 failed"><a href="#failure-0">✕ 1', text)


@pytest.mark.parametrize(
    ("share", "colour"),
    [(0.0, "h0"), (1e-9, "h1"), (0.1, "h1"), (0.25, "h2"), (0.5, "h3"), (0.75, "h4"), (1.0, "h5"), (1.01, "hbad"),
     (float("inf"), "hbad"), (float("nan"), "hbad")],
)  # fmt: skip
def test_the_scale_has_the_steps_of_its_legend(share, colour):
    assert step(share) == colour


def test_every_failure_is_shown_with_its_findings_and_its_command():
    page = Page(to_html([mixed()]))
    assert len(page.all("article")) == 2
    for told in ("R1: y[3,7] = 1.25, but should be 1.5 ± 0.01", "R3: biased", "zeros would pass", "--impl reference"):
        assert told in page.text


def test_more_failures_than_a_page_can_hold_are_counted():
    many = [result(status="failed", case=f"c{i}") for i in range(MOST_FAILURES + 3)]
    page = Page(to_html([report(*many)]))
    assert len(page.all("article")) == MOST_FAILURES
    assert "And 3 more, which stand in the JSON report." in page.text


def test_good_interrupted_and_simulated_runs_say_so():
    assert "Every judged case passed" in to_html([report(result())])
    assert "Interrupted after 1 of 9 results" in to_html([report(result(), complete=False, planned=9)])
    target = report().target.model_copy(update={"simulated": True})
    assert "not how a chip computes" in to_html([report(result(), target=target)])


def test_the_versions_of_the_vendors_software_stand_in_the_head_and_in_the_table():
    page = Page(to_html([report(result())]))
    assert "torch 2.13.0, torch_chip 2.13.0.post4, toolkit 9.1 (simulated), begun" in page.text
    assert page.text.count("9.1 (simulated)") == 2


def test_a_run_that_judged_nothing_has_a_page():
    assert "Nothing was judged" in to_html([report()])


def test_undefined_and_infinite_shares_have_a_page():
    text = to_html([report(result(status="failed", share=float("nan")), result("softmax", share=float("inf")))])
    assert "NaN" in text
    assert "∞" in text


def test_a_report_of_an_earlier_version_has_no_matrix_and_says_why():
    assert "This report does not say" in to_html([report(result(), offers=())])


def test_several_reports_stand_side_by_side_and_what_differs_is_marked():
    text = to_html([report(result()), report(result(implementation="composed"), backend="portable:cpu")])
    page = Page(text)
    assert [found["colspan"] for found in page.all("th", scope="colgroup")] == ["1", "1", "1", "1"]
    assert len(page.all("tr", **{"class": "differs"})) == 2  # backend, and the setting of that name


def test_no_report_gives_no_page():
    with pytest.raises(ArgumentError, match="at least one report"):
        to_html([])


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(FileError):
        write_html([mixed()], tmp_path / "no" / "page.html")
    write_html([mixed()], tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
