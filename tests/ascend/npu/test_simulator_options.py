"""Options of `hal simulate ascend`, each in a process of its own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest

from hal.backends.ascend.simulator import symbols

PRINT = "import json, torch, torch_npu; torch.npu.set_device(0); "


def test_chip_version_devices_and_memory_reach_torch_npu(simulated):
    code = PRINT + (
        "p = torch.npu.get_device_properties(0); print(json.dumps([p.name, p.cube_core_num, p.total_memory, "
        "torch.npu.device_count(), torch_npu.npu.get_soc_version(), torch_npu.npu.utils.get_cann_version()]))"
    )
    options = ("--soc", "310P3", "--cann", "9.0.0", "--devices", "3", "--memory", "512MiB")
    name, cores, memory, count, soc, cann = json.loads(simulated(code, *options))
    assert (name, cores, memory, count, cann) == ("Ascend310P3", 8, 512 * 2**20, 3, "9.0.0")
    assert 200 <= soc <= 205


def test_a_record_names_torch_npu_and_the_cann_that_is_simulated(simulated):
    code = (
        "import json, torch; from hal import registry; from hal.conformance.environment import environment; "
        "print(json.dumps([registry.software(), torch.npu.is_initialized(), environment({}).software]))"
    )
    software, initialised, recorded = json.loads(simulated(code, "--cann", "9.0.0"))
    assert software == recorded == {"torch_npu": importlib.metadata.version("torch_npu"), "CANN": "9.0.0 (simulated)"}
    assert not initialised, "a version must be told without touching a device"


@pytest.mark.parametrize(("soc", "versions"), [("910B1", (220, 225)), ("A3", (250, 256)), ("950PR", (260, 270))])
def test_torch_npu_knows_every_family(simulated, soc, versions):
    number = int(simulated(PRINT + "print(torch_npu.npu.get_soc_version())", "--soc", soc))
    assert versions[0] <= number <= versions[1]


def test_no_strict_lets_a_call_through_that_breaks_a_rule(simulated):
    code = PRINT + "torch_npu.npu_rms_norm(torch.ones(4, 64, device='npu'), torch.ones(1, device='npu')); print('ran')"
    assert "aclnnRmsNorm" in simulated(code, fails=True)
    assert simulated(code, "--no-strict") == "ran"


def test_perturbed_numerics_differ_in_float32_sums_and_stay_close(simulated):
    code = PRINT + (
        "g = torch.Generator().manual_seed(0); a = torch.randn(64, 300, generator=g); "
        "b = torch.randn(300, 64, generator=g); y = (a.npu() @ b.npu()).cpu().double(); "
        "print(float((y - a.double() @ b.double()).abs().max()))"
    )
    exact, perturbed = (float(simulated(code, "--numerics", n)) for n in ("exact", "perturbed"))
    assert exact < 4e-6  # one rounding of values up to 64
    assert exact < perturbed < 1e-3


def test_a_chip_that_saturates_loses_infinity_and_nan_when_perturbed(simulated):
    code = PRINT + (
        "x = torch.tensor([float('inf'), float('nan'), -60000.0], dtype=torch.float16); "
        "print((x.npu() + x.npu()).cpu().tolist())"
    )
    assert simulated(code, "--soc", "310P3", "--numerics", "perturbed") == "[65504.0, 0.0, -65504.0]"
    assert simulated(code, "--soc", "910B3", "--numerics", "perturbed") == "[inf, nan, -inf]"


def test_the_task_queue_of_torch_npu_works(simulated):
    code = PRINT + "x = torch.ones(8, device='npu')\nfor _ in range(500): x = x + 1\nprint(x.sum().item())"
    assert simulated(code, TASK_QUEUE_ENABLE="1") == "4008.0"
    assert simulated(code, TASK_QUEUE_ENABLE="2") == "4008.0"


def test_the_trace_file_has_one_json_line_an_event(simulated, tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text("what was there before\n")
    simulated(PRINT + "(torch.ones(3, device='npu') + 1).cpu()", "--trace", str(file))
    events = [json.loads(line) for line in file.read_text().splitlines()]
    calls = [event for event in events if event["kind"] == "call"]
    assert [call["operator"] for call in calls] == ["aclnnInplaceOne", "aclnnAdds"]
    assert calls[1]["arguments"]["other"] == 1
    assert [e["bytes"] for e in events if e["kind"] == "copy" and e["direction"] == "device_to_host"] == [12]
    assert any(event["kind"] == "synchronisation" for event in events)


def test_children_of_the_program_are_simulated_too(simulated):
    inner = "import torch; print(torch.npu.device_count())"
    code = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {inner!r}], text=True))"
    assert simulated(code, "--devices", "5") == "5"


def test_the_program_stands_in_for_the_command(simulated):
    code = "import sys; sys.stderr.write('from the program'); sys.exit(7)"
    assert "from the program" in simulated(code, fails=True)


def test_settings_that_mean_nothing_stop_the_program_with_a_message(simulated):
    told = simulated("pass", fails=True, ASCEND_SIM_SOCK="910B3")
    assert "ASCEND_SIM_SOCK" in told


def test_the_libraries_without_the_launcher_say_what_to_do(simulated):
    program = "import torch; torch.ones(1, device='npu')"
    code = (
        "import os, subprocess, sys; e = dict(os.environ); del e['ASCEND_SIM_LIBRARIES']; "
        f"d = subprocess.run([sys.executable, '-c', {program!r}], env=e, capture_output=True, text=True); "
        "print(d.returncode, 'hal simulate ascend -- COMMAND' in d.stderr)"
    )
    assert simulated(code) == "1 True"


def test_the_wheel_names_several_hundred_operators():
    wheel = symbols.find_wheel()
    found = symbols.operators(wheel)
    assert {"aclnnAdd", "aclnnRmsNorm", "aclnnFusedInferAttentionScoreV3"} <= set(found)
    assert len(found) > 500
    assert os.path.basename(wheel.main) == "libtorch_npu.so"


def test_the_first_operator_may_run_in_inference_mode(simulated):
    code = (
        "import torch\n"
        "with torch.inference_mode(): x = torch.ones(3, device='npu') + 1\n"
        "del x; y = torch.ones(3, device='npu'); y += 1\n"
        "w = torch.ones(3, device='npu', requires_grad=True); (w * w).sum().backward()\n"
        "print(y.cpu().tolist(), w.grad.cpu().tolist())"
    )
    assert simulated(code) == "[2.0, 2.0, 2.0] [2.0, 2.0, 2.0]"


def test_an_interrupt_while_an_operator_runs_interrupts_the_program(simulated):
    # The operator gets the signal itself, so that it falls inside its callback every time; a process that was started
    # in the background may have it ignored.
    code = (
        "import dataclasses, signal, torch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from hal.backends.ascend.simulator import runtime\n"
        "x = torch.ones(3, device='npu') + 1\n"
        "table = runtime.attached()._table\n"
        "index = [found and found.name for found in table].index('aclnnAdds')\n"
        "def run(*values): signal.raise_signal(signal.SIGINT)\n"
        "table[index] = dataclasses.replace(table[index], function=run)\n"
        "try:\n"
        "    x + 1; len('signals are looked for here')\n"
        "except Exception as error: print('an error', error)\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    assert simulated(code) == "interrupted"


@pytest.mark.parametrize("program", ["torch.npu.synchronize()", "torch.ones(1, device='npu') + 1"])
def test_a_trace_that_cannot_be_written_is_no_success(simulated, program):
    assert "'/dev/full' is not whole" in simulated(PRINT + program, "--trace", "/dev/full", fails=True)


def test_what_ran_says_that_it_was_simulated(simulated):
    code = (
        "import torch, hal; hal.ops.softmax(torch.ones(2, 3, device='npu')); "
        "print(hal.report()['calls'][0]['simulated'])"
    )
    assert simulated(code) == "True"
    command = [str(Path(sys.executable).parent / "hal"), "explain", "softmax", "--backend", "ascend"]
    code = f"import subprocess; print(subprocess.run({command!r}, capture_output=True, text=True).stdout)"
    assert "on npu:0 (simulated), backend ascend" in simulated(code)
