"""Decisions about tiles: a table's, unless tuning kept another for this device and these sources."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hal.backends.cuda import tactics
from hal.backends.cuda.tactics import TUNER, Tactic, tuned

DEFAULT, WIDE, TALL = (Tactic({"BLOCK": block}, {"num_warps": warps}) for block, warps in ((64, 4), (128, 8), (32, 2)))


def _others(width: int, capability: int) -> Sequence[Tactic]:
    return (WIDE, TALL) if capability >= 90 else (TALL,)


@tuned(_others)
def _example(width: int, capability: int) -> Tactic:
    return DEFAULT


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for found in (tactics._kept, tactics._folder):
        found.cache_clear()
    yield tmp_path
    for found in (tactics._kept, tactics._folder):
        found.cache_clear()


def choice(*numbers: int) -> tactics.Choice:
    with TUNER.watching() as found:
        _example(*numbers)
        _example(*numbers)
    (only,) = found
    return only


def test_a_decision_is_the_tables_until_another_is_kept() -> None:
    assert _example(100, 90) == DEFAULT
    TUNER.keep(choice(100, 90), WIDE.label)
    assert _example(100, 90) == WIDE
    assert (_example(101, 90), _example(100, 80)) == (DEFAULT, DEFAULT)


def test_what_was_kept_is_read_by_later_processes_for_the_same_sources_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TUNER.keep(choice(100, 90), WIDE.label)
    (written,) = cache.rglob("*.json")
    tactics._kept.cache_clear()
    assert _example(100, 90) == WIDE
    for found in (tactics._kept, tactics._folder):
        found.cache_clear()
    monkeypatch.setattr(tactics, "_sources", lambda: "others")
    assert _example(100, 90) == DEFAULT
    assert written.exists()


def test_the_tactic_in_use_comes_first_among_those_to_choose_from() -> None:
    assert choice(100, 90).tactics == (DEFAULT.label, WIDE.label, TALL.label)
    TUNER.keep(choice(100, 90), TALL.label)
    assert choice(100, 90).tactics == (TALL.label, DEFAULT.label, WIDE.label)


def test_a_tactic_is_in_force_within_the_block_alone() -> None:
    asked = choice(100, 90)
    with TUNER.using(asked, WIDE.label):
        assert (_example(100, 90), _example(7, 90)) == (WIDE, DEFAULT)
    assert _example(100, 90) == DEFAULT


@pytest.mark.parametrize("text", ["", "{", "[]", '{"shape": "(100, 90)"}', '{"shape": "(1, 1)", "constants": {}}'])
def test_a_damaged_file_is_told_of_and_left_out(cache: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    TUNER.keep(choice(100, 90), WIDE.label)
    (written,) = cache.rglob("*.json")
    written.write_text(text)
    tactics._kept.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hal"):
        assert _example(100, 90) == DEFAULT
    assert str(written) in caplog.text or "(1, 1)" in text


def test_nothing_is_written_where_nothing_is_kept(cache: Path) -> None:
    choice(100, 90)
    assert not list(cache.rglob("*"))
