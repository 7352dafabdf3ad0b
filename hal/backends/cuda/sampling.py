"""top_k_top_p_probs and top_k_top_p_sample by the kernels of hal.kernels.sampling.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda import launch
from hal.backends.cuda.launch import Launch
from hal.backends.cuda.offers import offer
from hal.backends.cuda.rows import power_of_two
from hal.capability import Declares, Implementation, Limit
from hal.op import Args, empty

__all__ = ["IMPLEMENTATIONS"]

LOAD_BYTES = 16
# Last bits that are 0 in a float32 number of this dtype.
SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
# Bits of a level that a pass over a row finds: each costs twice the comparisons of the one before.
PASS_BITS = 2
# Numbers of a row's state; how many of its logits are copied at most.
STATE, CAPACITY = 8, 2048
# Of the kernels with a program for each row, from which compute capability on: elements of a tile, and of a thread.
ROW_TILES = {
    "gather_kernel": {80: (4096, 16)},
    "search_kernel": {80: (8192, 16), 100: (4096, 16)},
}
# Neighbouring copies of a thread's load.
COPIED_LANES = 4
PARTS = ("value", "stride")
# What stands for a parameter that is left out, and the kernels' name for it.
ABSENT = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SHORT = {"temperature": "temperature", "top_k": "k", "top_p": "p", "min_p": "min_p"}


def row_tile(kernel: str, vocabulary: int, itemsize: int, arch: int) -> tuple[dict[str, int], dict[str, int]]:
    """(constants, options) of a kernel with a program for each row."""
    tiles = ROW_TILES[kernel]
    most, each = tiles[max(oldest for oldest in tiles if oldest <= arch)]
    columns = max(min(power_of_two(vocabulary), most), LOAD_BYTES)
    # Loads run ahead of a loop of many tiles alone.
    stages = 4 if vocabulary > 4 * columns else 1
    lanes = min(LOAD_BYTES // itemsize, each)
    return {"BLOCK_V": columns, "STAGES": stages, "LANES": lanes}, {"num_warps": max(4, min(32, columns // each // 32))}


def wide_tile(vocabulary: int, arch: int) -> tuple[dict[str, int], dict[str, int]]:
    """(constants, options) of the kernels with many programs for each row."""
    columns = max(min(power_of_two(vocabulary), 2048), LOAD_BYTES)
    return {"BLOCK_V": columns}, {"num_warps": max(1, min(8, columns // 512))}


def chunk_of(rows: int, vocabulary: int, tile: int, programs: int) -> int:
    """Tokens that a program of `draw_kernel` looks at: whole tiles, enough programs to keep the device busy."""
    return tile * max(1, rows * vocabulary // (tile * programs * 4))


class _Rows:
    """What the kernels of one kind of call share: how rows and parameters lie, and the launches that filter."""

    def __init__(self, a: Args, normalise: bool) -> None:
        logits = a.logits
        self.rows, self.vocabulary = logits.shape
        self.device, self.itemsize = logits.device, logits.element_size()
        self.arch = launch.capability(self.device)
        self.numbers = {"vocabulary": self.vocabulary, "row_stride": logits.stride(0), "stride": logits.stride(1)}
        for name in ABSENT:
            self.numbers |= _numbers(name, getattr(a, name))
        # Whether anything but min-p may drop a token; temperature 0 leaves one.
        greedy = isinstance(a.temperature, Tensor) or a.temperature == 0.0
        self.filters = greedy or a.top_k is not None or a.top_p is not None
        self.copied = (self.rows, max(min(CAPACITY, power_of_two(self.vocabulary)), COPIED_LANES))
        constants = {
            "CAPACITY": self.copied[1],
            "BITS": PASS_BITS,
            "SHIFT": SHIFTS[logits.dtype],
            "FILTERS": self.filters,
            "MASSES": a.top_p is not None,
        }
        self.gather = self.by_row("gather_kernel", ("temperature", "top_k"), constants)
        self.search = None
        if self.filters or normalise:
            self.search = self.by_row("search_kernel", tuple(ABSENT), constants | {"NORMALISE": normalise})

    def by_row(self, kernel: str, parameters: tuple[str, ...], constants: dict[str, Any]) -> Launch:
        """A launch of a kernel with a program for each row."""
        tile, options = row_tile(kernel, self.vocabulary, self.itemsize, self.arch)
        return self.launch(kernel, parameters, self.rows, options, tile | constants)

    def launch(
        self,
        kernel: str,
        parameters: tuple[str, ...],
        programs: int,
        options: dict[str, int],
        constants: dict[str, Any],
        **more: Any,
    ) -> Launch:
        """A launch of a kernel that takes these parameters."""
        told = ("vocabulary", "row_stride", "stride", *(f"{SHORT[p]}_{part}" for p in parameters for part in PARTS))
        numbers = {name: self.numbers[name] for name in told}
        return Launch(f"sampling.{kernel}", (programs,), self.device, options, **numbers, **constants, **more)

    def filtered(self, logits: Tensor, parameters: tuple[Tensor | None, ...]) -> Tensor:
        """The state of each row."""
        device, copies, tokens = self.device, None, None
        state = empty((self.rows, STATE), dtype=torch.float32, device=device)
        if self.filters:
            copies = empty(self.copied, dtype=torch.float32, device=device)
            tokens = empty(self.copied, dtype=torch.int32, device=device)
        self.gather(logits, *parameters[:2], state, copies, tokens)
        if self.search is not None:
            self.search(logits, *parameters, state, copies, tokens)
        return state


def _numbers(name: str, value: Any) -> dict[str, Any]:
    """How the kernels are told of a parameter: its number, or how far apart rows find it in its tensor."""
    absent, short = ABSENT[name], SHORT[name]
    number = absent if value is None or isinstance(value, Tensor) else type(absent)(value)
    if name == "temperature" and number:  # 0 is argmax, and nothing else may become it in float32
        number = max(number, torch.finfo(torch.float32).tiny)
    stride = value.stride(0) if isinstance(value, Tensor) and value.dim() else 0
    return {f"{short}_value": number, f"{short}_stride": stride}


def _tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def top_k_top_p_probs(a: Args) -> Callable[..., Tensor]:
    shape, device = a.logits.shape, a.logits.device
    if not shape[0]:
        return lambda logits, **_: empty(shape, dtype=torch.float32, device=device)
    rows = _Rows(a, normalise=True)
    tile, options = wide_tile(rows.vocabulary, rows.arch)
    chunks = -(-rows.vocabulary // tile["BLOCK_V"])
    probs = rows.launch("probs_kernel", ("temperature", "min_p"), rows.rows * chunks, options, tile, chunks=chunks)

    def call(
        logits: Tensor, *, temperature: Any = None, top_k: Any = None, top_p: Any = None, min_p: Any = None
    ) -> Tensor:
        t, k, p, m = _tensor(temperature), _tensor(top_k), _tensor(top_p), _tensor(min_p)
        state = rows.filtered(logits, (t, k, p, m))
        found = empty(shape, dtype=torch.float32, device=device)
        probs(logits, t, m, state, found)
        return found

    return call


def top_k_top_p_sample(a: Args) -> Callable[..., Tensor]:
    device, count = a.logits.device, a.logits.shape[0]
    if not count:
        return lambda logits, seed, **_: empty((0,), dtype=torch.int64, device=device)
    rows = _Rows(a, normalise=False)
    tile, options = wide_tile(rows.vocabulary, rows.arch)
    chunk = chunk_of(count, rows.vocabulary, tile["BLOCK_V"], launch.multiprocessors(device))
    chunks = -(-rows.vocabulary // chunk)
    each = isinstance(a.seed, Tensor) and a.seed.dim() == 1
    draw = rows.launch(
        "draw_kernel",
        ("temperature", "min_p"),
        count * chunks,
        options,
        tile,
        seed_stride=a.seed.stride(0) if each else 0,
        chunks=chunks,
        CHUNK=chunk,
        EACH=each,
    )
    pick = Launch(
        "sampling.pick_kernel", (count,), device, {"num_warps": 1}, chunks=chunks, BLOCK_C=power_of_two(chunks)
    )

    def call(
        logits: Tensor,
        seed: int | Tensor,
        *,
        temperature: Any = None,
        top_k: Any = None,
        top_p: Any = None,
        min_p: Any = None,
    ) -> Tensor:
        t, k, p, m = _tensor(temperature), _tensor(top_k), _tensor(top_p), _tensor(min_p)
        if not isinstance(seed, Tensor):  # it changes from call to call, and a launch's numbers do not
            seed = empty((), dtype=torch.int64, device=device).fill_(seed)
        state = rows.filtered(logits, (t, k, p, m))
        totals = empty((count, chunks), dtype=torch.float32, device=device)
        drawn = empty((count, chunks), dtype=torch.int32, device=device)
        draw(logits, t, m, seed, state, totals, drawn)
        ids = empty((count,), dtype=torch.int64, device=device)
        pick(state, totals, drawn, ids)
        return ids

    return call


# A token's place in its row is kept as a float32 number.
_LIMITS = {"vocabulary": Limit(max=2**24 - 1)}
_DECLARES = Declares(batch_invariant=True)

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    offer("top_k_top_p_probs", top_k_top_p_probs, limits=_LIMITS, declares=_DECLARES),
    offer("top_k_top_p_sample", top_k_top_p_sample, limits=_LIMITS, declares=_DECLARES),
)
