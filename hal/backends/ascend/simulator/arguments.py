"""The arguments of an aclnn call, from the words that the native side reads: tensors become views of device memory."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["DTYPES", "Decoder"]

# aclDataType codes (acl_base_rt.h) and torch's dtypes; those that torch lacks are absent.
DTYPES: dict[int, torch.dtype] = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    7: torch.uint16,
    8: torch.uint32,
    9: torch.int64,
    10: torch.uint64,
    11: torch.float64,
    12: torch.bool,
    16: torch.complex64,
    17: torch.complex128,
    27: torch.bfloat16,
    35: torch.float8_e5m2,
    36: torch.float8_e4m3fn,
    37: torch.float8_e8m0fnu,
}
# Scalars that the struct module reads; the others are read as tensors, which is slow.
_SCALARS = {0: "f", 1: "e", 2: "b", 3: "i", 4: "B", 6: "h", 9: "q", 11: "d", 12: "?"}
# Formats whose bytes lie as shape and strides say: undefined, NCHW, NHWC, ND, HWCN, NDHWC, NCDHW, NCL.
_PLAIN_FORMATS = frozenset({-1, 0, 1, 2, 16, 27, 30, 47})
_FLOAT_ARRAY = 4  # Kind::floats
_BOOL_ARRAY = 5
# Views are kept by the words that describe them; torch_npu reuses addresses, so the same ones come again and again.
_MOST_VIEWS = 8192


class Decoder:
    """Decodes arguments; `start` and `size` (bytes) are those of the memory of all devices."""

    def __init__(self, start: int, size: int) -> None:
        self._start, self._end = start, start + size
        memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(start), dtype=torch.uint8)
        self._typed = {dtype: memory[: size // 16 * 16].view(dtype) for dtype in DTYPES.values()}
        self._views: dict[bytes, Tensor] = {}
        self._readers: dict[str, Callable[[bytes, memoryview, int], Any]] = {
            "t": self._tensor,
            "l": self._tensors,
            "k": _scalar,
            "K": _scalars,
            "a": _array,
            "s": _text,
        }

    def decode(self, signature: str, raw: bytes) -> list[Any]:
        """The values of one call. Raises NotImplementedError for a layout or dtype that is not simulated."""
        words = memoryview(raw).cast("q")
        values: list[Any] = []
        at = 0
        for letter in signature:
            word = words[at]
            reader = self._readers.get(letter)
            if reader is not None:
                if word:
                    values.append(reader(raw, words, at))
                    at += word
                    continue
                values.append(None)
            elif letter in "df":
                values.append(struct.unpack_from("d", raw, 8 * at)[0])
            elif letter == "b":
                values.append(word != 0)
            elif letter == "T":
                values.append(DTYPES.get(word))
            else:
                values.append(word)
            at += 1
        return values

    def handle(self, signature: str, raw: bytes, position: int) -> int:
        """The aclTensor that argument number `position` was."""
        words = memoryview(raw).cast("q")
        at = 0
        for letter in signature[:position]:
            at += (words[at] or 1) if letter in self._readers else 1
        pointer: int = words[at + 1]
        return pointer

    def lasting(self, value: Any) -> Any:
        """The argument for a call that runs later: tensors of the host as copies."""
        if isinstance(value, list):
            return [self.lasting(item) for item in value]
        if not isinstance(value, Tensor) or self._start <= value.data_ptr() < self._end:
            return value
        return value.clone()

    def _tensor(self, raw: bytes, words: memoryview, at: int) -> Tensor:
        key = raw[8 * (at + 2) : 8 * (at + words[at])]
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            view = self._views[key] = self._view(words, at)
        return view

    def _view(self, words: memoryview, at: int) -> Tensor:
        address, code, layout, offset, rank = words[at + 2 : at + 7]
        dtype = DTYPES.get(code)
        if dtype is None:
            raise NotImplementedError(f"tensors of aclDataType {code} are not simulated")
        if layout not in _PLAIN_FORMATS:
            raise NotImplementedError(f"tensors of aclFormat {layout} are not simulated")
        shape = words[at + 7 : at + 7 + rank].tolist()
        strides = words[at + 7 + rank : at + 7 + 2 * rank].tolist()
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype)
        if not self._start <= address < self._end or (address - self._start) % dtype.itemsize:
            return _elsewhere(address, dtype, shape, strides, offset)
        first = (address - self._start) // dtype.itemsize + offset
        return self._typed[dtype].as_strided(shape, strides, first)

    def _tensors(self, raw: bytes, words: memoryview, at: int) -> list[Tensor | None]:
        return [self._tensor(raw, words, start) if start else None for start in _items(words, at)]


def _elsewhere(address: int, dtype: torch.dtype, shape: list[int], strides: list[int], offset: int) -> Tensor:
    """A tensor whose bytes are the host's, as those of a CPU scalar among device tensors are."""
    count = 1 + offset + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides, offset)


def _items(words: memoryview, at: int) -> list[int]:
    """Where the items of a list stand; 0 for null pointers."""
    found, position = [], at + 2
    for _ in range(words[at + 1]):
        length = words[position]
        found.append(position if length else 0)
        position += length or 1
    return found


def _scalar(raw: bytes, words: memoryview, at: int) -> int | float | bool | complex:
    code = words[at + 1]
    layout = _SCALARS.get(code)
    if layout is not None:
        number: int | float | bool = struct.unpack_from(layout, raw, 8 * (at + 2))[0]
        return number
    dtype = DTYPES.get(code)
    if dtype is None:
        raise NotImplementedError(f"scalars of aclDataType {code} are not simulated")
    value: float | complex = torch.frombuffer(bytearray(raw[8 * (at + 2) : 8 * (at + 4)]), dtype=dtype, count=1).item()
    return value


def _scalars(raw: bytes, words: memoryview, at: int) -> list[Any]:
    return [_scalar(raw, words, start) if start else None for start in _items(words, at)]


def _array(raw: bytes, words: memoryview, at: int) -> list[Any]:
    kind, end = words[at + 1], at + words[at]
    if kind == _FLOAT_ARRAY:
        return memoryview(raw).cast("d")[at + 2 : end].tolist()
    values = words[at + 2 : end].tolist()
    return [value != 0 for value in values] if kind == _BOOL_ARRAY else values


def _text(raw: bytes, words: memoryview, at: int) -> str:
    return raw[8 * (at + 2) : 8 * (at + 2) + words[at + 1]].decode()
