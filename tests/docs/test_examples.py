"""The documentation's examples run.

A `python` block is executed, all blocks of a page in order as one script. A `console` block is one shell
session: each `$ command` must exit with 0 and, where lines follow it, print them (`...` stands for anything).
An `ascend` block is the same for an environment with torch_npu: it is a test there (`make ascend`), elsewhere none.
A `sh` block is only for reading: installing, cloning, and what needs other hardware.
"""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SESSIONS = ("console", "ascend") if importlib.util.find_spec("torch_npu") else ("console",)
KNOWN = ("python", "console", "ascend", "sh", "text", "toml", "json")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MARK = "\x1e"


@dataclass(frozen=True)
class Block:
    language: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    fences = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(match[1], text.count("\n", 0, match.start()) + 2, match[2]) for match in fences]


def environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HAL_", "PYTEST_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    fixed = {"COLUMNS": "110", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return env | fixed | {"PATH": path}


def commands(block: Block) -> list[tuple[str, str]]:
    """(command, expected output) pairs of a console block."""
    pairs: list[tuple[str, str]] = []
    continued = False
    for line in block.text.splitlines(keepends=True):
        if continued:
            pairs[-1] = (pairs[-1][0] + line.rstrip("\n"), "")
        elif line.startswith("$ "):
            pairs.append((line[2:].rstrip("\n"), ""))
        else:
            assert pairs, f"line {block.line}: a console block starts with '$ '"
            pairs[-1] = (pairs[-1][0], pairs[-1][1] + line)
            continue
        continued = pairs[-1][0].endswith("\\")
        if continued:
            pairs[-1] = (pairs[-1][0][:-1], "")
    return pairs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page):
    for block in blocks(page):
        assert block.language in KNOWN, f"{page.name}:{block.line}: a block of language {block.language!r}"


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.language == "python" for b in blocks(p))], ids=lambda page: page.name
)
def test_python_blocks_run(page, tmp_path):
    script = ""
    for block in blocks(page):
        if block.language == "python":
            # Padded so that a traceback names the page's own lines.
            script += "\n" * (block.line - 1 - script.count("\n")) + block.text
    path = tmp_path / page.name
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{page.name}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, block, id=f"{page.name}:{block.line}:{block.language}")
        for page in PAGES
        for block in blocks(page)
        if block.language in SESSIONS
    ],
)
def test_console_blocks_run(page, block, tmp_path):
    pairs = commands(block)
    script = "".join(f"{command}\nprintf '{MARK}%d{MARK}' $?\n" for command, _ in pairs)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
    )
    parts = done.stdout.split(MARK)
    for index, (command, want) in enumerate(pairs):
        where = f"{page.name}:{block.line}: $ {command}\n"
        assert 2 * index + 1 < len(parts), f"{where}did not finish\n{done.stdout}{done.stderr}"
        got, code = parts[2 * index], parts[2 * index + 1]
        assert code == "0", f"{where}exited with {code}\n{got}{done.stderr}"
        if want:
            same = doctest.OutputChecker().check_output(want, got, FLAGS)
            assert same, f"{where}should print\n{want}but printed\n{got}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (page.parent / target).exists()] == []
