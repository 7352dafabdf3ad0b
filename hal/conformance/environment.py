"""What numbers may depend on outside hal: versions, platform, numerics switches."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import torch

import hal
from hal import registry
from hal.conformance.report import Environment
from hal.numerics import numerics


def environment(settings: dict[str, str], plugin_failures: tuple[str, ...] = ()) -> Environment:
    """The present environment. Touches no device."""
    commit, dirty = _git()
    return Environment(
        hal=hal.__version__,
        git_commit=commit,
        git_dirty=dirty,
        torch=torch.__version__,
        software=registry.software(),
        python=platform.python_version(),
        platform=platform.platform(),
        numerics=numerics(),
        settings=settings,
        plugin_failures=plugin_failures,
    )


def _git() -> tuple[str | None, bool | None]:
    """The commit of the checkout that this package is part of, and whether it has uncommitted changes."""
    root = Path(__file__).resolve().parents[2]
    git = shutil.which("git")
    # An installed package inside some other project's checkout must not claim that project's commit.
    if git is None or not (root / ".git").exists():
        return None, None

    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                [git, "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return None, None
    changes = ask("status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)
