"""A report, or several, as one HTML page that needs nothing else: no network, no other file, no script to be read."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import hal
from hal.conformance import html_tables as tables
from hal.conformance.html_capabilities import capabilities
from hal.conformance.html_heat import heat_map
from hal.conformance.markup import Html, Node, el, join
from hal.conformance.overview import figure, overview, target_name, verdict
from hal.conformance.report import STATUSES, Report, stack, worst
from hal.errors import ArgumentError, FileError
from hal.files import write_whole

__all__ = ["to_html", "write_html"]


def to_html(reports: Sequence[Report]) -> str:
    """The page for one report, or for several side by side. ArgumentError for none."""
    if not reports:
        raise ArgumentError("a page needs at least one report; give the files that 'hal conformance run --json' wrote.")
    style, script = _data("report.css"), _data("report.js")
    title = "Conformance of " + ", ".join(dict.fromkeys(target_name(report) for report in reports))
    table = overview(reports)
    sections = [
        ("heat", "Budget used", heat_map(reports, table)),
        ("failures", "Failures", tables.failures(reports)),
        ("tight", "Tightest cases", tables.tight(reports)),
        ("waivers", "Waivers", tables.waivers(reports)),
        ("apart", "Not judged", tables.apart(reports)),
        ("capabilities", "Capabilities", capabilities(reports)),
        ("environment", "Environment", tables.environment(reports)),
    ]
    shown = [(name, heading, body) for name, heading, body in sections if body is not None]
    head = join(
        el("title", title),
        _void("meta", charset="utf-8"),
        _void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        _void("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        _void("meta", name="generator", content=f"torch-hal {hal.__version__}"),
        Html(f"<style>{style}</style>"),
    )
    body = join(
        el("a", "Skip to the results", href="#results", class_="skip"),
        _top(title, reports),
        el(
            "nav",
            el("ul", *(el("li", el("a", heading, href=f"#{name}")) for name, heading, _ in shown)),
            aria_label="Sections",
        ),
        el("main", *(_section(*section) for section in shown), id="results"),
        el("footer", f"Written by torch-hal {hal.__version__}. Everything shown here stands in the JSON report too."),
        el("div", id="said", class_="vh", role="status", aria_live="polite"),
        Html(f"<script>{script}</script>"),
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{body}</body>\n</html>\n'


def write_html(reports: Sequence[Report], path: Path) -> None:
    """Write the page, whole or not at all."""
    write_whole(path, to_html(reports))


def _top(title: str, reports: Sequence[Report]) -> Html:
    counts = {status: sum(report.counts[status] for report in reports) for status in STATUSES}
    share = worst(result.share for report in reports for result in report.results)
    tiles: list[Node] = [_tile("results", str(sum(counts.values())))]
    for status, count in counts.items():
        if count or status in ("passed", "failed"):
            tiles.append(_tile(status, str(count), "bad" if count and status in ("failed", "mistrusted") else None))
    tiles.append(_tile("worst share", figure(share) or "–"))
    return el(
        "header",
        el(
            "div",
            el("p", "hal conformance report", class_="over"),
            el("h1", title),
            el("p", _when(reports), class_="lead"),
            el("ul", *(_verdict(report) for report in reports), class_="verdicts"),
            el("dl", *tiles, class_="tiles"),
        ),
    )


def _tile(name: str, value: str, kind: str | None = None) -> Html:
    return el("div", el("dt", name), el("dd", value), class_=kind)


def _when(reports: Sequence[Report]) -> str:
    first = reports[0]
    suites = ", ".join(dict.fromkeys(report.request.suite for report in reports))
    told = f"Suite {suites}, torch-hal {first.environment.hal}, {stack(first.environment)}, begun {first.started}"
    return told if len(reports) == 1 else f"{len(reports)} runs; the first: {told}"


def _verdict(report: Report) -> Html:
    kind, sentence = verdict(report)
    device = report.target.descriptor or "unknown device"
    simulated = ": shows that conventions agree, not how a chip computes" if report.target.simulated else ""
    where = f"{target_name(report)}, {device}{simulated}"
    return el("li", el("b", sentence), el("span", where), class_=f"verdict {kind}")


def _section(name: str, heading: str, body: Html) -> Html:
    return el("section", el("h2", heading, id=f"{name}-heading"), body, id=name, aria_labelledby=f"{name}-heading")


def _void(tag: str, **attributes: str) -> Html:
    return Html(el(tag, **attributes).removesuffix(f"</{tag}>"))


def _policy(style: str, script: str) -> str:
    """Only this style and this script, and nothing from anywhere: what escaping missed could still not run."""

    def allowed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    rules = ("default-src 'none'", f"style-src {allowed(style)}", f"script-src {allowed(script)}", "form-action 'none'")
    return "; ".join((*rules, "base-uri 'none'"))


def _data(name: str) -> str:
    try:
        return (resources.files("hal.conformance") / "data" / name).read_text("utf-8")
    except OSError as error:
        raise FileError(f"hal/conformance/data/{name} cannot be read: {error}; reinstall torch-hal") from error
