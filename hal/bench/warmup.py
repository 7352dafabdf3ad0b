"""The calls that a model makes of the operators, kept so that they can be made ready: compiled, and tuned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hal.bench.tuning import Call
from hal.bench.workload import Maker, Workload
from hal.contract import OPS
from hal.dispatch import plan_key

__all__ = ["Calls", "call_of", "run_model"]


class Calls(TorchDispatchMode):
    """Within the block, keeps one call of each kind: of shapes, dtypes and numbers that one plan serves."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds: dict[tuple[Any, ...], Call] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._overloadpacket.__name__
        if func.namespace == "hal" and not name.endswith("_bwd"):
            op = OPS[name.removesuffix("_fwd")]
            packed = args[: len(op.schema_names)]
            key = (op.name, *plan_key(packed))
            if key not in self.kinds:
                self.kinds[key] = Call(op, op.unpack(packed))
        return func(*args, **(kwargs or {}))


def run_model(model: Any, tokens: Sequence[int], batch: int, device: torch.device) -> Iterator[int]:
    """Run a transformers model on prompts of these lengths, and one decoding step after each; yields each length."""
    vocabulary = int(model.config.vocab_size)
    with torch.no_grad():
        for length in tokens:
            prompt = torch.randint(0, vocabulary, (batch, length), device=device)
            seen = torch.ones_like(prompt)
            model.generate(prompt, attention_mask=seen, max_new_tokens=2, min_new_tokens=2, do_sample=False)
            yield length


def call_of(workload: Workload, device: torch.device, dtype: torch.dtype) -> Call:
    """A benchmark's workload as a call."""
    return Call(workload.op, workload.make(Maker.of(device, dtype, 0)), workload.backward)
