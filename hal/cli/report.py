"""`hal conformance report`: render reports that exist."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hal.cli._console import line


def report(
    reports: Annotated[list[Path], typer.Argument(metavar="RUN.json…", help="Reports written with --json.")],
    html_path: Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Write one HTML page.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", metavar="PATH", help="Write Markdown.")] = None,
    junit_path: Annotated[
        Path | None, typer.Option("--junit", metavar="PATH", help="Write JUnit XML; one report only.")
    ] = None,
) -> None:
    """Render JSON reports as an HTML page, as Markdown or as JUnit XML; several stand side by side.

    The page is one file that needs neither network nor another file. Files that are damaged, are no report or were
    written by a newer hal are refused. Without an option, each report's outcome is printed.

    Exit status: 0 rendered, 2 could not. What the reports say does not change it.

    Examples:

    - `hal conformance report run.json --html run.html --markdown run.md`
    - `hal conformance report cpu.json h200.json --html both.html`
    """
    from hal import files
    from hal.conformance import junit
    from hal.conformance.html import write_html
    from hal.conformance.markdown import write_markdown
    from hal.conformance.overview import counted, target_name, verdict
    from hal.conformance.report import read_report
    from hal.errors import ArgumentError

    if junit_path is not None and len(reports) > 1:
        raise ArgumentError(f"--junit takes one report, not {len(reports)}; render each by itself.")
    for path in (html_path, markdown_path, junit_path):
        if path is not None:
            files.check_writable(path)
    read = [read_report(path) for path in reports]
    if html_path is not None:
        write_html(read, html_path)
    if markdown_path is not None:
        write_markdown(read, markdown_path)
    if junit_path is not None:
        junit.write_junit(read[0], junit_path)
    for path, found in zip(reports, read, strict=True):
        line(f"{path}: {target_name(found)}: {verdict(found)[1]} ({counted(dict(found.counts))})")
