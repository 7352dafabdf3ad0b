"""The capability matrix of the HTML page: what each implementation accepts and declares."""

from __future__ import annotations

from collections.abc import Sequence

from hal.conformance.html_tables import plain_table
from hal.conformance.markup import Html, Node, el, join
from hal.conformance.overview import target_name
from hal.conformance.report import Offer, Report

__all__ = ["capabilities"]


def capabilities(reports: Sequence[Report]) -> Html:
    """What each implementation says that it accepts and declares."""
    parts: list[Node] = []
    for report in reports:
        if len(reports) > 1:
            parts.append(el("h3", target_name(report)))
        if not report.offers:
            parts.append(el("p", "This report does not say: an earlier version of hal wrote it.", class_="note"))
            continue
        parts += [_accepts(report.offers), _declares(report.offers)]
    return join(*parts)


def _accepts(offers: Sequence[Offer]) -> Html:
    rows = []
    for offer in offers:
        of = offer.accepts
        limits = "; ".join(f"{name}\u00a0{_bounds(b.min, b.max, b.multiple_of)}" for name, b in of.limits.items())
        places = (("on", of.device_types), ("architectures", of.architectures))
        where = ", ".join(f"{title} {', '.join(names)}" for title, names in places if names is not None)
        rest = "; ".join(part for part in (where, of.where) if part)
        rows.append((offer.op, el("code", offer.implementation), offer.kind, _names(of.dtypes), _names(of.features),
                     limits or "–", rest or "–"))  # fmt: skip
    heads = ("operator", "implementation", "class", "dtypes", "features", "limits", "only where")
    return plain_table(
        "Accepts (any = whatever the contract allows)", heads, rows, {"features": "text", "only where": "text"}
    )


def _declares(offers: Sequence[Offer]) -> Html:
    flags = list(dict.fromkeys(name for o in offers for name, value in o.declares.items() if isinstance(value, bool)))
    others = list(
        dict.fromkeys(name for o in offers for name, value in o.declares.items() if not isinstance(value, bool))
    )
    rows = []
    for offer in offers:
        ticks = (_tick(offer.declares.get(name)) for name in flags)
        rows.append(
            (offer.op, el("code", offer.implementation), *ticks, *(_said(offer.declares.get(name)) for name in others))
        )
    heads = ("operator", "implementation", *(name.replace("_", " ") for name in (*flags, *others)))
    return plain_table("Declares (and is judged by)", heads, rows, {})


def _names(names: Sequence[str] | None) -> str:
    return "any" if names is None else ", ".join(names) or "none"


def _bounds(low: int | None, high: int | None, multiple: int | None) -> str:
    said = [f"≥\u00a0{low}" if low is not None else "", f"≤\u00a0{high}" if high is not None else ""]
    said.append(f"multiple of {multiple}" if multiple is not None else "")
    return ", ".join(part for part in said if part) or "any"


def _tick(value: object) -> Html:
    return (
        el("span", "✓ yes", class_="yes") if value is True else el("span", "–" if value is None else "no", class_="no")
    )


def _said(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:g}" for name, number in value.items()) or "–"
    return ", ".join(value) or "–" if isinstance(value, tuple) else "–"
