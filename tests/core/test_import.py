"""What `import hal` costs, loads and touches; and that a process may fork after it."""

from __future__ import annotations

import pytest
from core_processes import python

HEAVY = ["pydantic", "pydantic_settings", "typer", "rich", "transformers", "hypothesis", "safetensors", "triton"]

# Any of these would create a device context, or ask a driver for its devices.
TOUCHES = """
import torch
touched = []
for name in ("_lazy_init", "init", "is_available", "device_count", "current_device", "get_device_properties"):
    def touch(*args, name=name, real=getattr(torch.cuda, name), **kwargs):
        touched.append(name)
        return real(*args, **kwargs)
    setattr(torch.cuda, name, touch)
"""


def test_import_takes_less_than_300_ms_on_top_of_torch():
    script = """
        import time, torch
        start = time.process_time()
        import hal
        answer(time.process_time() - start)
    """
    assert min(python(script)[0] for _ in range(3)) < 0.3


def test_import_loads_the_contract_and_no_heavy_package():
    script = f"""
        import sys, torch
        before = set(sys.modules)
        import hal
        assert callable(hal.ops.rms_norm)
        new = set(sys.modules) - before
        answer([sorted(set({HEAVY}) & new), sorted(m for m in new if m.split(".")[0] == "hal"),
                "importlib.metadata" in new])
    """
    (heavy, own, _), _ = python(script)
    assert heavy == []
    late = (
        "backends",
        "conformance",
        "cli",
        "port",
        "bench",
        "kv",
        "registry",
        "selection",
        "settings_model",
        "descriptor",
    )
    assert [name for name in own if name.split(".")[1:2] and name.split(".")[1] in late] == []
    assert "hal.ops" in own


def test_import_reads_no_environment_and_prints_nothing():
    env = {"HAL_BACKEND": "no-such", "HAL_FALLBACK": "maybe", "HAL_BAKEND": "cpu", "HAL_CONFIG": "/no/such/file"}
    (kind, text), _ = python(
        """
        import io, contextlib, torch
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            import hal
        assert out.getvalue() == ""
        try:
            hal.ops.rms_norm(torch.ones(2, 3))
        except Exception as error:
            answer([type(error).__name__, str(error)])
        """,
        env=env,
    )
    assert kind in ("ConfigError", "FileError")
    assert "/no/such/file" in text or "HAL_" in text


@pytest.mark.parametrize(
    "use",
    [
        "pass",
        "from hal import registry; registry.backend_names(); registry.failures()",
        "from typer.testing import CliRunner\nfrom hal.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "assert CliRunner().invoke(app, ['explain', '--help']).exit_code == 0",
        "hal.ops.rms_norm(torch.ones(2, 3)); hal.report()",
    ],
    ids=["import", "list backends", "command-line help", "a call on the CPU"],
)
def test_no_device_is_touched(use):
    """NVIDIA/TransformerEngine#872, vllm-project/vllm#14910: a query at import creates a context that a fork
    cannot use."""
    script = TOUCHES + f"import hal\n{use}\nanswer([touched, torch.cuda.is_initialized()])"
    (touched, initialised), _ = python(script)
    assert touched == []
    assert initialised is False


FORK = """
import os, threading, torch
import hal

def work(scale=1.0):
    # No backward: where torch sees a GPU, it forbids one in a child once its parent ran one.
    return bool(hal.ops.rms_norm(torch.full((4, 8), scale)).isfinite().all())

{before}
child = os.fork()
if child == 0:
    import signal
    signal.alarm(60)
    try:
        ok = work(2.0) and {inside}
    except BaseException as error:
        import traceback
        traceback.print_exc()
        ok = False
    os._exit(0 if ok else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert work(3.0)
answer(status)
"""


@pytest.mark.parametrize("before", ["", "work()"], ids=["before the first call", "after calls"])
def test_a_forked_child_computes(before):
    assert python(FORK.format(before=before, inside="not torch.cuda.is_initialized()"))[0] == 0


def test_a_forked_child_starts_without_plans_of_its_parent():
    before = "work(); from hal import dispatch; assert any(dispatch._caches)"
    script = FORK.format(before=before, inside="True").replace(
        "ok = work(2.0) and True", "ok = not any(dispatch._caches) and work(2.0)"
    )
    assert python(script)[0] == 0


def test_a_fork_while_another_thread_selects_does_not_hang_the_child():
    before = """
work()
stop = threading.Event()
def churn():
    n = 1
    while not stop.is_set():
        n += 1
        hal.ops.rms_norm(torch.ones(1, n))
thread = threading.Thread(target=churn, daemon=True)
thread.start()
"""
    script = FORK.format(before=before, inside="True")
    script = script.replace("answer(status)", "stop.set(); thread.join(); answer(status)")
    script = script.replace("child = os.fork()", "import time; time.sleep(0.2)\nchild = os.fork()")
    assert [python(script)[0] for _ in range(3)] == [0, 0, 0]


def test_a_broken_vendor_package_does_not_disturb_the_cpu(tmp_path):
    for name in ("torch_npu", "triton", "transformers", "flash_attn"):
        (tmp_path / f"{name}.py").write_text(f"raise OSError('lib{name}.so: cannot open shared object file')\n")
    (result, failures), _ = python(
        """
        import torch, hal
        from hal import registry
        y = hal.ops.rms_norm(torch.ones(2, 3))
        registry.load_all()
        answer([y.tolist(), [f.name for f in registry.failures()]])
        """,
        path=[tmp_path],
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert result[0] == pytest.approx([1, 1, 1], rel=1e-5)
    assert "cpu" not in failures
