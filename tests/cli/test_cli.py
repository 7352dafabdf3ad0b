"""The commands: what they print, as text and as JSON, and how they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hal.cli import app
from hal.op import OPS

COMMANDS = (
    ["devices"], ["ops"], ["explain"], ["doctor"], ["conformance", "run"], ["conformance", "power"], ["generate"],
)  # fmt: skip


def hal(*arguments, **options):
    return CliRunner().invoke(app, list(arguments), **options)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_has_examples(command):
    done = hal(*command, "--help")
    assert done.exit_code == 0
    assert "Example" in done.output
    assert f"hal {' '.join(command)}" in done.output


def test_help_touches_no_device_and_loads_no_transformers():
    code = (
        "import sys, torch\n"
        "def touched(*_, **__): raise SystemExit('a device was touched')\n"
        "torch.accelerator.current_accelerator = torch.cuda.is_available = torch.cuda._lazy_init = touched\n"
        "from hal.cli import main\n"
        "sys.argv = ['hal', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code in (0, None), end.code\n"
        "assert not {'transformers', 'hypothesis', 'hal.descriptor'} & set(sys.modules), 'loaded too much'\n"
        "print('quiet')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("quiet\n"), done.stderr


def test_version():
    assert hal("--version").output == "torch-hal 0.1.0\n"


def test_devices_lists_the_cpu():
    (cpu, *_) = [entry for entry in json.loads(hal("devices", "--json").stdout) if entry["backend"] == "cpu"]
    assert cpu["torch_device"] == "cpu"
    assert cpu["name"] in hal("devices").output


def test_devices_audit_is_sound_and_says_what_was_audited():
    done = hal("devices", "--audit")
    assert done.exit_code == 0, done.output
    assert "data sheets" in done.output


def test_devices_audit_fails_on_a_finding(monkeypatch):
    import hal.descriptor

    found = [hal.descriptor.Finding("x.json", "rates.0", "no source")]
    monkeypatch.setattr(hal.descriptor, "audit", lambda: found)
    text = CliRunner().invoke(app, ["devices", "--audit"])
    assert text.exit_code == 1
    assert "x.json: rates.0: no source" in text.output
    data = CliRunner().invoke(app, ["devices", "--audit", "--json"])
    assert data.exit_code == 1
    assert json.loads(data.stdout)["findings"] == [{"sheet": "x.json", "where": "rates.0", "problem": "no source"}]


def test_ops_lists_every_operator_with_its_implementations():
    entries = {entry["name"]: entry for entry in json.loads(hal("ops", "--json").stdout)}
    assert set(entries) == set(OPS)
    norm = entries["rms_norm"]
    assert norm["gradients"] == ["x", "weight"]
    assert "reference" in [implementation["name"] for implementation in norm["implementations"]["cpu"]]
    assert set(norm["implementations"]["cpu"][0]) >= {"kind", "supports", "declares"}
    assert all(name in hal("ops").output for name in OPS)


def test_doctor_reports_and_its_exit_status_follows_health(monkeypatch):
    done = hal("doctor", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == (0 if found["healthy"] else 1)
    assert found["versions"]["hal"] == "0.1.0"


@pytest.mark.parametrize("op", sorted(OPS))
def test_explain_needs_nothing_but_the_operator(op):
    done = hal("explain", op, "--backend", "cpu", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["op"] == op
    assert found["chosen"].startswith("cpu/")
    assert "reference" in [candidate["implementation"] for candidate in found["candidates"]]


def test_explain_says_why_not():
    done = hal("explain", "rms_norm", "--json", env={"HAL_IMPL": "rms_norm=reference"})
    others = [c for c in json.loads(done.stdout)["candidates"] if c["implementation"] != "reference"]
    assert all("HAL_IMPL asks for reference" in candidate["reasons"] for candidate in others)


def test_explain_reads_shapes_dtypes_and_options():
    done = hal(
        "explain", "attention", "--dtype", "bf16", "--shape", "q=1,128,32,128", "--shape", "k=1,256,8,128",
        "--set", "causal=true", "--set", "window=4095,0", "--shape", "mask=1,1,128,256", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    call = json.loads(done.stdout)["call"]
    for told in (
        "q=bfloat16[1,128,32,128]", "k=bfloat16[1,256,8,128]", "v=bfloat16[1,256,8,128]", "causal=True",
        "window=(4095, 0)", "mask=bool[1,1,128,256]",
    ):  # fmt: skip
        assert told in call


def test_explain_can_leave_out_an_optional_tensor():
    done = hal("explain", "layer_norm", "--set", "weight=none", "--json")
    assert "weight" not in json.loads(done.stdout)["call"]


def test_explain_takes_quantised_caches():
    done = hal(
        "explain", "write_kv_cache", "--shape", "k=7,8,128", "--dtype", "k_cache=int8", "--dtype", "v_cache=int8",
        "--shape", "k_scale=", "--shape", "v_scale=", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "k_scale=float32[]" in json.loads(done.stdout)["call"]


REFUSALS = [
    (["explain", "rmsnorm"], "ArgumentError", "Did you mean 'rms_norm'"),
    (["explain", "rms_norm", "--shape", "4x4"], "ArgumentError", "1,128,32,128"),
    (["explain", "rms_norm", "--shape", "x=-1,4"], "ArgumentError", "0 or more"),
    (["explain", "rms_norm", "--shape", "y=4"], "ArgumentError", "x, weight"),
    (["explain", "rms_norm", "--shape", "4", "--shape", "5"], "ArgumentError", "twice"),
    (["explain", "rms_norm", "--dtype", "float99"], "ArgumentError", "float99"),
    (["explain", "rms_norm", "--dtype", "int32"], "DtypeError", "int32"),
    (["explain", "rms_norm", "--set", "eps"], "ArgumentError", "NAME=VALUE"),
    (["explain", "rms_norm", "--set", "weigth=none"], "ArgumentError", "Did you mean weight"),
    (["explain", "attention", "--shape", "4"], "ShapeError", "q"),
    (["explain", "rotary_embedding", "--shape", "4"], "ShapeError", "(…, H, D)"),
    (["explain", "paged_attention", "--shape", "q="], "ShapeError", "q=[]"),
    (["explain", "paged_attention", "--set", "q=none"], "ShapeError", "needs q"),
    (["explain", "attention", "--set", "causal=maybe"], "ArgumentError", "true or false"),
    (["explain", "attention", "--set", "window=a,b"], "ArgumentError", "a pair such as 4095,0"),
    (["explain", "attention", "--set", "window=1,2,3"], "ArgumentError", "a pair such as 4095,0"),
    (["explain", "attention", "--set", "scale=true"], "ArgumentError", "a number"),
    (["explain", "attention", "--set", "mask=3"], "ArgumentError", "--shape mask="),
    (["explain", "attention", "--set", "softcap=nan"], "ArgumentError", "softcap is nan"),
    (["explain", "attention", "--shape", "99999999999999999999,1,1,1"], "ShapeError", "2**63"),
    (["explain", "attention", "--shape", "1,1,9223372036854775807,2"], "ShapeError", "2**63"),
    (["explain", "softmax", "--device", "nonsense"], "ArgumentError", "--device nonsense"),
    (["generate", "hi", "--model", "m.gguf", "--device", "nonsense"], "ArgumentError", "--device nonsense"),
    (["generate", "hi", "--model", "m.gguf", "--device", "cpu:x"], "ArgumentError", "--device cpu:x"),
    (["generate", "\udcff", "--model", "m.gguf"], "ArgumentError", "not UTF-8"),
    (["explain", "rotary_cache"], "ArgumentError", "nothing is selected"),
    (["explain", "rms_norm", "--backend", "cup"], "ConfigError", "did you mean 'cpu'"),
    (["conformance", "run", "--backend", "cup"], "ConfigError", "did you mean 'cpu'"),
    (["conformance", "run", "--op", "rmsnorm"], "ArgumentError", "Did you mean 'rms_norm'"),
    (["conformance", "run", "--impl", "atem"], "ArgumentError", "implementation 'atem'"),
    (["conformance", "run", "--case", "nothing"], "ArgumentError", "case id"),
    (["conformance", "run", "--json", "/no/such/folder/r.json"], "FileError", "/no/such/folder"),
    (["conformance", "run", "--junit", "/no/such/folder/r.xml"], "FileError", "/no/such/folder"),
]


@pytest.mark.parametrize(("arguments", "error", "told"), REFUSALS, ids=[" ".join(refusal[0]) for refusal in REFUSALS])
def test_what_cannot_run_is_one_message_and_status_2(arguments, error, told):
    done = hal(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"{error}: ")
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["explain", "rms_norm"], ["conformance", "run"]], ids=" ".join)
def test_a_setting_that_means_nothing_is_one_message_and_status_2(command):
    done = hal(*command, env={"HAL_FALLBACK": "maybe"})
    assert done.exit_code == 2
    assert done.stderr.startswith("ConfigError: ")
    assert "HAL_FALLBACK" in done.stderr


def test_none_is_a_word_where_the_argument_is_one():
    done = hal("explain", "gelu_and_mul", "--set", "approximate=none", "--json")
    assert done.exit_code == 0, done.output
    assert "approximate=none" in json.loads(done.stdout)["call"]


def shell(command, **environment):
    script = command.replace("hal ", f"{sys.executable} -m hal.cli ", 1)
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("command", ["hal ops >/dev/full", "hal ops --json >/dev/full"])
def test_a_full_disk_is_one_message_and_status_2(command):
    done = shell(command)
    assert done.returncode == 2
    assert done.stderr == "OSError: [Errno 28] No space left on device\n"


def test_a_closed_stdout_swallows_what_is_printed():
    done = shell("hal ops >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_stops_reading_gets_no_traceback():
    done = shell("hal ops | true")
    assert done.stderr == ""


def test_an_ascii_terminal_gets_what_it_can_show_and_json_is_whole():
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for command in ("hal explain --help", "hal devices", "hal conformance run --op merge_attention --impl reference"):
        done = shell(command, **ascii_only)
        assert (done.returncode, done.stderr) == (0, ""), command
    asked = "hal explain silu_and_mul --set alpha=1 --json"
    assert json.loads(shell(asked, **ascii_only).stdout) == json.loads(shell(asked).stdout)
