"""The benchmark measures what it says; no test asserts a speed."""

from __future__ import annotations

import json
import time

import pytest
import torch

from hal.bench import call_cost
from hal.bench.timing import take_turns
from hal.errors import FileError


def test_turns_take_off_the_cost_of_the_clock_and_keep_the_tail():
    def sometimes_slow():
        nonlocal count
        count += 1
        time.sleep(0.002 if count % 20 == 0 else 0)

    count = 0
    timed = take_turns({"nothing": lambda: None, "tail": sometimes_slow}, rounds=4, calls=50)
    assert timed["nothing"].median_us < 1
    assert timed["tail"].calls == 200
    assert timed["tail"].p99_us > 1000 > timed["tail"].median_us


def test_each_subject_is_taken_apart_beside_its_peers():
    for subject in call_cost.subjects(torch.device("cpu")):
        items = {item.item: item for item in call_cost.measure(subject, rounds=1)}
        assert set(subject.peers) < set(items)
        limited = [items[name] for name in (call_cost.SHORT, call_cost.ROUTED, call_cost.RECORDED)]
        assert all(item.over_bare_us is not None and item.limit_us is not None for item in limited)
        assert items[call_cost.BARE].median_us > 0
        assert items[call_cost.YARDSTICK].times_add == 1.0


def test_a_limit_is_exceeded_only_by_more_than_it():
    item = call_cost.Item("call", "short way", 5.0, 6.0, 2.0, 2.0)
    assert not item.exceeded
    assert call_cost.Item("call", "short way", 5.1, 6.0, 2.1, 2.0).exceeded
    assert not call_cost.Item("call", "short way", 5.0, 6.0, None, None, 1.4, 1.4).exceeded
    assert call_cost.Item("call", "short way", 5.0, 6.0, None, None, 1.41, 1.4).exceeded


def test_measurement_is_written_as_json_with_its_environment(tmp_path):
    path = tmp_path / "cost.json"
    call_cost.main(["--rounds", "1", "--json", str(path)])
    written = json.loads(path.read_text())
    assert written["format"] == "hal-call-cost"
    assert written["environment"]["torch"] == torch.__version__
    assert {item["call"].split()[0] for item in written["items"]} == {"rms_norm", "add_rms_norm", "attention"}


def test_a_path_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    with pytest.raises(FileError, match="no-such-folder"):
        call_cost.main(["--json", str(tmp_path / "no-such-folder" / "cost.json")])
