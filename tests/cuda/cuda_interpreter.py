"""Triton's interpreter, mended where it computes otherwise than the compiled kernel would.

Its casts between float32 and bfloat16 or fp8 truncate: torch's are used instead. Its maximum and minimum hand NaN on;
what tl.maximum, tl.minimum and tl.max promise is to drop it, as the devices do. Its products of 16-bit matrices are
taken in 16 bits, those of bfloat16 of their bit patterns: here in float32, as the matrix units do.

It also patches triton.language anew for each function that a kernel calls: here once a launch, in a third of the time.

Import this before any kernel, in a process where TRITON_INTERPRET=1 was set before triton was imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_convert, _dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
# dtypes that numpy has not: as torch's, and as the integers that the interpreter keeps them in
STORED = {
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8),
}
KNOWN = {tl.float16: torch.float16, tl.float32: torch.float32, tl.float64: torch.float64}


def _tensor(x: np.ndarray, dtype: Any) -> torch.Tensor:
    given = torch.from_numpy(np.ascontiguousarray(x))
    if dtype in STORED:
        kept, integer = STORED[dtype]
        return given.view(integer).view(kept)
    return given.view(KNOWN[dtype])


def _convert_float(x: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    """x, of dtype `source` (those that numpy has not as their bits), as `target`."""
    if source not in STORED and target not in STORED:
        return _convert(x, source, target, rounding_mode)
    wide = _tensor(x, source).float()
    if target not in STORED:
        made = wide.to(KNOWN[target]).numpy()
        return made.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[made.itemsize]).reshape(x.shape)
    kept, integer = STORED[target]
    if target is not tl.bfloat16:  # the devices' conversion saturates
        wide = wide.clamp(-torch.finfo(kept).max, torch.finfo(kept).max)
    return wide.to(kept).view(integer).numpy().reshape(x.shape)


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    narrow = (tl.bfloat16, tl.float16)
    if a.dtype.scalar not in narrow or b.dtype.scalar not in narrow:
        return _dot(self, a, b, d, input_precision, max_num_imprecise_acc)
    left, right = (_tensor(t.data, t.dtype.scalar).float().numpy() for t in (a, b))
    return Handle((np.matmul(left, right) + d.data).astype(d.data.dtype), d.dtype.scalar)


_scope, _patch_lang, _patched = interpreter._LangPatchScope, interpreter._patch_lang, set()
_restore = _scope.restore


def _patch_once(fn: Any) -> Any:
    if id(fn.__globals__) in _patched:
        return _scope()
    _patched.add(id(fn.__globals__))
    return _patch_lang(fn)


def _restored(self: Any) -> None:
    _patched.clear()
    _restore(self)


interpreter._patch_lang, _scope.restore = _patch_once, _restored
interpreter._convert_float = _convert_float
Builder.create_dot = _create_dot
Builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
Builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
