"""Golden traces: what the Ascend adapter asks of CANN for small fixed calls of each operator.

    hal simulate ascend -- python tests/ascend/npu/golden.py trace     this process's traces as JSON
    hal simulate ascend -- python tests/ascend/npu/golden.py write     regenerate traces/*.json; review the difference

A file holds one operator: per call, which chips and CANN versions make it alike, and the events in order, one a line,
without the arguments that are None.
Of implementations that are references composed from ATen only the operators' names are kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

import hal
from hal import dispatch_report
from hal.errors import UnsupportedError
from hal.files import write_whole

FOLDER = Path(__file__).with_name("traces")
TARGETS = (("910B3", "8.5.0"), ("910B3", "8.2.RC1"), ("910_9391", "8.5.0"), ("950PR", "8.5.0"), ("310P3", "8.5.0"))

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def npu(*shape: int, dtype: torch.dtype = FP16) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).to(dtype).to("npu")


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _norms(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    x, weight = npu(3, 64, dtype=dtype), npu(64, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    return {
        f"rms_norm {name}": lambda: hal.ops.rms_norm(x, weight),
        f"rms_norm {name} no weight": lambda: hal.ops.rms_norm(x),
        f"rms_norm {name} round_before_weight": lambda: hal.ops.rms_norm(x, weight, round_before_weight=True),
        f"rms_norm {name} weight_offset": lambda: hal.ops.rms_norm(x, weight, weight_offset=1.0),
        f"add_rms_norm {name}": lambda: hal.ops.add_rms_norm(x, x, weight),
        f"add_rms_norm {name} unrounded": lambda: hal.ops.add_rms_norm(x, x, weight, round_residual=False),
        f"layer_norm {name}": lambda: hal.ops.layer_norm(x, weight, weight),
    }


def _elementwise() -> dict[str, Callable[[], object]]:
    x, weight, bias = npu(3, 64), npu(8, 64), npu(8)
    q, k, positions = npu(3, 4, 32), npu(3, 2, 32), ints(0, 1, 2, dtype=torch.int64).to("npu")
    cos, sin = npu(8, 16, dtype=FP32), npu(8, 16, dtype=FP32)
    logits, target = npu(3, 64), ints(1, -100, 5, dtype=torch.int64).to("npu")
    return {
        "silu_and_mul": lambda: hal.ops.silu_and_mul(x),
        "silu_and_mul limit": lambda: hal.ops.silu_and_mul(x, limit=7.0, alpha=1.702, up_offset=1.0),
        "gelu_and_mul": lambda: hal.ops.gelu_and_mul(x),
        "gelu_and_mul tanh": lambda: hal.ops.gelu_and_mul(x, approximate="tanh"),
        "softmax": lambda: hal.ops.softmax(x),
        "linear": lambda: hal.ops.linear(x, weight),
        "linear bias": lambda: hal.ops.linear(x, weight, bias),
        "rotary_embedding": lambda: hal.ops.rotary_embedding(q, k, positions, cos, sin),
        "rotary_embedding interleaved": lambda: hal.ops.rotary_embedding(q, k, positions, cos, sin, interleaved=True),
        "cross_entropy": lambda: hal.ops.cross_entropy(logits, target, label_smoothing=0.1),
        "top_k_top_p_probs": lambda: hal.ops.top_k_top_p_probs(logits, top_k=5, top_p=0.9),
        "top_k_top_p_sample": lambda: hal.ops.top_k_top_p_sample(logits, 7, top_k=5, top_p=0.9),
    }


def _attention() -> dict[str, Callable[[], object]]:
    q, k, one = npu(2, 6, 4, 32), npu(2, 8, 2, 32), npu(2, 1, 4, 32)
    mask = torch.ones(2, 1, 6, 8, dtype=torch.bool, device="npu")
    packed_q, packed_k = npu(7, 4, 32), npu(9, 2, 32)
    cu_q, cu_k = ints(0, 3, 7), ints(0, 4, 9)
    device_q, device_k = cu_q.to("npu"), cu_k.to("npu")
    out, lse = npu(6, 4, 32), npu(6, 4, dtype=FP32)

    def varlen(**options: object) -> object:
        return hal.ops.attention_varlen(packed_q, packed_k, packed_k, device_q, device_k, 4, 5, causal=True, **options)

    return {
        "attention": lambda: hal.ops.attention(q, k, k),
        "attention causal lse": lambda: hal.ops.attention(q, k, k, causal=True, return_lse=True),
        "attention causal": lambda: hal.ops.attention(q, k, k, causal=True),
        "attention window": lambda: hal.ops.attention(q, k, k, causal=True, window=(3, 0)),
        "attention mask": lambda: hal.ops.attention(q, k, k, mask=mask),
        "attention one query": lambda: hal.ops.attention(one, k, k, causal=True, scale=0.5),
        "attention float32": lambda: hal.ops.attention(q.float(), k.float(), k.float(), causal=True),
        "attention_varlen": lambda: varlen(cu_seqlens_q_cpu=cu_q, cu_seqlens_k_cpu=cu_k),
        "attention_varlen device lengths": varlen,
        "merge_attention": lambda: hal.ops.merge_attention(out, lse, out, lse),
    }


def _paged() -> dict[str, Callable[[], object]]:
    # A trace has shapes alone: values narrower than keys show which is which.
    small, large = npu(6, 16, 2, 32), npu(4, 128, 2, 32)
    table, table_large = ints(0, 1, 2, 3).view(2, 2).to("npu"), ints(0, 1).view(2, 1).to("npu")
    lens, cu_one, cu = ints(20, 9), ints(0, 1, 2), ints(0, 3, 4)
    lens_d, cu_one_d, cu_d = lens.to("npu"), cu_one.to("npu"), cu.to("npu")
    q, rows = npu(2, 4, 32), npu(4, 4, 32)
    tokens, narrow = (npu(3, 2, 32), npu(3, 2, 16)), npu(6, 16, 2, 16)
    slots, kept = ints(3, -1, 17, dtype=torch.int64).to("npu"), ints(3, 4, 17, dtype=torch.int64).to("npu")
    rows_128, pages_128 = npu(4, 4, 128), npu(6, 16, 2, 128)
    cu_keys = ints(0, 20, 29)
    cu_keys_d = cu_keys.to("npu")
    pair = (npu(4, 16, 2, 32), npu(4, 16, 2, 16))
    source, target = ints(0, 1, dtype=torch.int64).to("npu"), ints(2, 3, dtype=torch.int64).to("npu")

    def marked() -> object:
        from hal.backends.ascend.kv_cache import without_skips

        return hal.ops.write_kv_cache(*tokens, *pair, without_skips(kept))

    def decode(**options: object) -> object:
        return hal.ops.paged_attention(q, small, small, table, lens_d, cu_one_d, 1, **options)

    return {
        "paged_attention decode": lambda: decode(seq_lens_cpu=lens, cu_seqlens_q_cpu=cu_one),
        "paged_attention decode, device lengths": decode,
        "paged_attention prefill": lambda: hal.ops.paged_attention(
            rows, large, large, table_large, lens_d, cu_d, 3, seq_lens_cpu=lens, cu_seqlens_q_cpu=cu
        ),
        "paged_attention prefill, head dim 128": lambda: hal.ops.paged_attention(
            rows_128, pages_128, pages_128, table, lens_d, cu_d, 3, seq_lens_cpu=lens, cu_seqlens_q_cpu=cu
        ),
        "write_kv_cache": lambda: hal.ops.write_kv_cache(*tokens, *pair, slots),
        "write_kv_cache none skipped": marked,
        "gather_kv_cache": lambda: hal.ops.gather_kv_cache(small, narrow, table, cu_keys_d, 32),
        "gather_kv_cache host lengths": lambda: hal.ops.gather_kv_cache(
            small, narrow, table, cu_keys_d, 32, cu_seqlens_k_cpu=cu_keys
        ),
        "copy_kv_blocks": lambda: hal.ops.copy_kv_blocks([pair[0]], [pair[1]], source, target),
    }


def traces() -> dict[str, list[str]]:
    """What this process's simulated CANN is asked for, by call."""
    from hal.backends.ascend import simulator

    floats = (FP16, FP32) if simulator.current().soc.family == "310P" else (BF16, FP16, FP32)
    calls = {name: call for dtype in floats for name, call in _norms(dtype).items()}
    calls |= _elementwise() | _attention() | _paged()
    return {name: _trace(name.split()[0], call) for name, call in calls.items()}


def _trace(op: str, call: Callable[[], object]) -> list[str]:
    from hal.backends.ascend.simulator import trace

    dispatch_report.reset()
    with hal.use(backend="ascend"), torch.no_grad():
        try:
            call()  # the first call makes the constants
            with trace.recording() as recorded:
                call()
        except UnsupportedError as error:
            return ["refused", *(f"{label}: {'; '.join(why)}" for label, why in sorted(error.rejections.items()))]
    used = next(entry for entry in hal.report()["calls"] if entry["op"] == op)
    if used["kind"] == "composed":
        names = [getattr(event, "operator", event.kind) for event in recorded.events]
        runs = ((name, len(list(group))) for name, group in groupby(names))
        return [used["implementation"], " ".join(name if n == 1 else f"{name}×{n}" for name, n in runs)]
    return [used["implementation"], *map(_line, recorded.events)]


def _line(event: object) -> str:
    told = vars(event)
    if told["kind"] == "call":
        given = (f"{name}={_value(value)}" for name, value in told["arguments"].items() if value is not None)
        return f"{told['operator']}({', '.join(given)})"
    return " ".join(str(value) for key, value in told.items() if key != "kind") + f" {told['kind']}"


def _value(value: object) -> str:
    if isinstance(value, dict):
        shape, strides = value["shape"], value["strides"]
        dense = torch.empty(shape, device="meta").stride() == tuple(strides) or 0 in shape
        return f"{value['dtype']}{shape}" + ("" if dense else f"/{strides}")
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, list) else repr(value)


def simulated(soc: str, cann: str) -> dict[str, list[str]]:
    """The traces of another chip and version, from a process of its own."""
    command = [os.path.join(os.path.dirname(sys.executable), "hal"), "simulate", "ascend", "--soc", soc, "--cann", cann]
    done = subprocess.run([*command, "--", "python", __file__, "trace"], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{soc} with CANN {cann}: {done.stderr[-2000:]}")
    found: dict[str, list[str]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def files(found: dict[str, dict[str, list[str]]]) -> dict[str, str]:
    """The files' texts by name, from the traces by target."""
    by_op: dict[str, dict[str, list[dict[str, object]]]] = {}
    for target, calls in found.items():
        for name, lines in calls.items():
            alike = by_op.setdefault(name.split()[0], {}).setdefault(name, [])
            same = next((entry for entry in alike if entry["events"] == lines), None)
            if same is None:
                alike.append({"on": [target], "events": lines})
            else:
                same["on"].append(target)  # type: ignore[attr-defined]
    return {f"{op}.json": json.dumps(calls, indent=1, ensure_ascii=False) + "\n" for op, calls in by_op.items()}


def everywhere() -> dict[str, str]:
    return files({f"{soc} CANN {cann}": simulated(soc, cann) for soc, cann in TARGETS})


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        for name, text in everywhere().items():
            write_whole(FOLDER / name, text)
    else:
        print(json.dumps(traces()))
