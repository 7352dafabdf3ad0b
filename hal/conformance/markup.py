"""HTML by construction: text becomes markup only through `el`, which escapes it."""

from __future__ import annotations

import html

from hal.conformance.overview import clean

__all__ = ["Html", "Node", "el", "join"]


class Html(str):
    """A string that is markup already."""

    __slots__ = ()


Node = str | Html | None


def el(tag: str, *children: Node, **attributes: str | int | bool | None) -> Html:
    """An element. Children that are no Html are text; None children and None or False attributes are left out.

    Attribute names lose a trailing underscore (`class_`) and turn the others into hyphens (`aria_label`).
    """
    written = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_escaped(str(value))}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{tag}{written}>{join(*children)}</{tag}>")


def join(*children: Node) -> Html:
    """Children one after the other."""
    return Html(
        "".join(child if isinstance(child, Html) else _escaped(child) for child in children if child is not None)
    )


def _escaped(text: str) -> str:
    return html.escape(clean(text), quote=True)
