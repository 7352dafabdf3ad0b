"""An environment with a Python, torch and what torch itself needs: the image that a vendor ships."""

from __future__ import annotations

import importlib.metadata
import re
import venv
from pathlib import Path


def needs(name: str) -> dict[str, importlib.metadata.Distribution]:
    """A distribution and all that it asks for, without extras, as far as it is installed here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    left = [name]
    while left:
        wanted = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if wanted in found:
            continue
        try:
            found[wanted] = importlib.metadata.distribution(wanted)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        asked = (text for text in found[wanted].requires or () if "extra ==" not in text)
        left += [re.match(r"[A-Za-z0-9._-]+", text)[0] for text in asked]
    return found


def environment(home: Path) -> Path:
    """The Python of a fresh environment in which torch's own packages are linked, and no others."""
    venv.create(home, with_pip=False, symlinks=True)
    site = next((home / "lib").glob("python3.*")) / "site-packages"
    for found in needs("torch").values():
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            link = site / top
            if not link.exists():
                link.symlink_to(found.locate_file(top))
    return home / "bin" / "python"
