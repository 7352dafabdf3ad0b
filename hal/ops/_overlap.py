"""Whether written tensors overlap: each with itself, by its strides, and with each other, by their place in memory."""

from __future__ import annotations

import itertools

from torch import Tensor

from hal.errors import ArgumentError

__all__ = ["check_apart", "overlaps_itself"]


def overlaps_itself(cache: Tensor) -> bool:
    """Whether two indices of a view may name one element; sure for views whose strides nest, as caches' do."""
    axes = _axes(cache)
    return not _nested([stride for stride, _ in axes], [size for _, size in axes])


def check_apart(op: str, caches: list[tuple[str, Tensor]]) -> None:
    """ArgumentError if two written caches share an element. Interleaved views of one buffer are fine."""
    storages: dict[int, list[tuple[str, Tensor]]] = {}
    for name, cache in caches:
        if cache.numel():
            storages.setdefault(cache.untyped_storage()._cdata, []).append((name, cache))
    for neighbours in storages.values():
        for (name, one), (other_name, other) in itertools.combinations(neighbours, 2):
            if _share(one, other):
                raise ArgumentError(
                    f"{op}: {name} and {other_name} overlap in memory; written caches must be distinct (views of one "
                    "buffer may interleave, with equal strides)"
                )


def _axes(cache: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the axes that move, widest stride first."""
    return sorted(((s, n) for s, n in zip(cache.stride(), cache.shape, strict=True) if n > 1), reverse=True)


def _share(one: Tensor, other: Tensor) -> bool:
    width = one.element_size()
    first, second = one.storage_offset() * width, other.storage_offset() * other.element_size()
    if first + _span(one) <= second or second + _span(other) <= first:
        return False
    steps = sorted({s for t in (one, other) for s, _ in _axes(t)}, reverse=True)
    ones, others = ([dict(_axes(t)).get(s, 1) for s in steps] for t in (one, other))
    nested = _nested(steps, [max(pair) for pair in zip(ones, others, strict=True)])
    if width != other.element_size() or (second - first) % width or not nested:
        return True
    return _meet((second - first) // width, steps, ones, others)


def _nested(steps: list[int], sizes: list[int]) -> bool:
    reach = 0
    for stride, size in zip(reversed(steps), reversed(sizes), strict=True):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _meet(gap: int, steps: list[int], ones: list[int], others: list[int]) -> bool:
    """Whether some index of one, less some index of the other, lies `gap` apart."""
    if not steps:
        return gap == 0
    near = gap // steps[0]  # with nested strides the finer axes make up for less than one step
    return any(
        -others[0] < turns < ones[0] and _meet(gap - turns * steps[0], steps[1:], ones[1:], others[1:])
        for turns in (near, near + 1)
    )


def _span(cache: Tensor) -> int:
    return (1 + sum(s * (n - 1) for s, n in _axes(cache))) * cache.element_size()
