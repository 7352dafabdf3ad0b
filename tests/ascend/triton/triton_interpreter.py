"""Triton's interpreter, mended where it computes otherwise than the compiled kernel would.

Its casts to bfloat16 truncate, and lose the carry where they are told to round: torch's are used instead. Its maximum
and minimum hand NaN on; what tl.maximum, tl.minimum and tl.max promise is to drop it, as the devices do.

Import this before any kernel, in a process where TRITON_INTERPRET=1 was set before triton was imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._convert_float
_reduce = interpreter.ReduceOps.apply_impl
# triton-ascend brings a tl.max of its own, whose step the interpreter does not know and takes element by element.
_maximum = tl.max.fn.__globals__["_elementwise_max_default"]
Builder = interpreter.InterpreterBuilder


def _convert_float(x: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    """x, of dtype `source` (bfloat16 as its bits), as `target`."""
    if (source, target) == (tl.float32, tl.bfloat16):
        return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.uint16).numpy().reshape(x.shape)
    if (source, target) == (tl.bfloat16, tl.float32):
        return torch.from_numpy(np.ascontiguousarray(x)).view(torch.bfloat16).float().numpy().reshape(x.shape)
    return _convert(x, source, target, rounding_mode)


def _apply_impl(self: Any, given: Any) -> Any:
    if self.combine_fn == _maximum:
        return self.min_max(given[0], val_reduce_op=np.fmax.reduce)
    return _reduce(self, given)


interpreter._convert_float = _convert_float
interpreter.ReduceOps.apply_impl = _apply_impl
Builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
Builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
