"""The Markdown report: what it says, and that nothing written by others is markup in it."""

from __future__ import annotations

import re

import pytest
from made_reports import HOSTILE, hostile, mixed, report, result

from hal.conformance.markdown import MOST_FAILURES, to_markdown, write_markdown
from hal.errors import ArgumentError


def spans_removed(text):
    """The document without its code: fenced blocks, and spans of any number of backticks."""
    text = re.sub(r"^(`{3,})sh\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<![\\`])(`+)(?!`).*?(?<!`)\1(?!`)", "", text)


def test_it_says_how_each_run_ended():
    text = to_markdown([mixed(), report(result(), backend="portable:cpu")])
    assert "- **2 cases failed or are mistrusted** on cpu, a CPU: 3 passed, 1 failed" in text
    assert "- **Every judged case passed** on portable:cpu, a CPU: 1 passed" in text


def test_failures_come_with_findings_and_a_command_to_paste():
    text = to_markdown([mixed()])
    assert "### `rms_norm bfloat16 aten` failed" in text
    assert "- `R1: y[3,7] = 1.25, but should be 1.5 ± 0.01`" in text
    assert "```sh\nhal conformance run --case 'rms_norm/bfloat16/T=7~0000' --backend cpu --impl aten\n```" in text


def test_the_table_has_a_row_for_each_operator_with_its_worst_shares():
    text = to_markdown([mixed()])
    assert "| `rms_norm` | f32 0.60<br>bf16 **✕ 1 failed** | f16 **✕ 1 failed** |" in text
    assert "| `softmax` | f32 ✓<br>bf16 –<br>f16 1.50 | f32 – |" in text


def test_every_row_of_a_table_has_as_many_cells_as_its_head():
    for block in re.findall(r"(?:^\|.*\|$\n?)+", to_markdown([mixed(), hostile()]), re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}
        assert len(counts) == 1, block


def test_nothing_that_others_write_is_markup():
    outside = spans_removed(to_markdown([hostile()]))
    assert "<script" not in outside
    assert "<img" not in outside
    assert "\u202e" not in outside
    assert HOSTILE.split("<img")[0] in to_markdown([hostile()])


def test_the_environment_names_the_vendors_software():
    assert "| toolkit | 9.1 (simulated) |" in to_markdown([report(result())])


def test_more_failures_than_it_holds_are_counted():
    text = to_markdown([report(*(result(status="failed", case=f"c{i}") for i in range(MOST_FAILURES + 2)))])
    assert text.count("```sh") == MOST_FAILURES
    assert "And 2 more" in text


def test_no_report_gives_no_document():
    with pytest.raises(ArgumentError, match="at least one report"):
        to_markdown([])


def test_it_is_written_whole(tmp_path):
    write_markdown([mixed()], tmp_path / "r.md")
    assert [path.name for path in tmp_path.iterdir()] == ["r.md"]
    assert (tmp_path / "r.md").read_text() == to_markdown([mixed()])
