"""What `hal bench` runs: calls of the operators at sizes of real models, with fresh inputs for each turn.

T tokens, F features, V vocabulary, B sequences, S queries, L keys, H query heads, K kv heads, D head dim, P page size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal.contract import OPS, Args, Cost, Op
from hal.errors import ArgumentError

__all__ = ["SUITES", "Maker", "Workload", "workloads"]

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class Maker:
    """Draws tensors on a device, the same ones for the same seed."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, seed: int) -> Maker:
        return cls(device, dtype, torch.Generator(device=device).manual_seed(seed))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, device=self.device, generator=self.generator).to(self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, device=self.device, generator=self.generator)


Make = Callable[[Maker], dict[str, Any]]


@dataclass(frozen=True)
class Workload:
    """One call to be timed. `backward` times the gradients of its differentiable arguments, forward left out."""

    op: Op
    label: str
    make: Make
    backward: bool = False
    suites: frozenset[str] = field(default_factory=frozenset)

    @property
    def name(self) -> str:
        return f"{self.op.name}{' backward' if self.backward else ''} {self.label}"

    def cost(self, arguments: dict[str, Any]) -> Cost:
        """The floor of the call. Backward reads what forward read and the results' gradients and writes the inputs'."""
        forward = self.op.cost(Args(**self.op.bind((), arguments).__dict__))
        if not self.backward:
            return forward
        inputs = sum(_bytes(arguments.get(name)) for name in self.op.grad)
        # The products of attention's backward are five where forward has two; elsewhere flops do not bind.
        return Cost(flops=forward.flops * 5 // 2, bytes=forward.bytes + inputs)


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _norm(rows: int, features: int, *more: str) -> Make:
    def make(m: Maker) -> dict[str, Any]:
        drawn = {"x": m.normal(rows, features), "weight": m.normal(features)}
        for name in more:
            drawn[name] = m.normal(features) if name == "bias" else m.normal(rows, features)
        return drawn

    return make


def _rotary(tokens: int, features: int) -> Make:
    heads = features // HEAD_DIM

    def make(m: Maker) -> dict[str, Any]:
        # The table is as long as the positions: its rows are read once, as the floor counts them.
        angles = torch.arange(tokens, device=m.device)[:, None] / 10_000 ** (
            torch.arange(HEAD_DIM // 2, device=m.device) / (HEAD_DIM // 2)
        )
        return {
            "q": m.normal(tokens, heads, HEAD_DIM),
            "k": m.normal(tokens, max(1, heads // 4), HEAD_DIM),
            "positions": torch.arange(tokens, device=m.device),
            "cos": angles.cos(),
            "sin": angles.sin(),
        }

    return make


def _loss(tokens: int, vocabulary: int) -> Make:
    return lambda m: {"logits": m.normal(tokens, vocabulary), "target": m.integers(vocabulary, tokens)}


def _attention(queries: int, head_dim: int, causal: bool, tokens: int = 16_384) -> Make:
    batch = max(1, tokens // queries)

    def make(m: Maker) -> dict[str, Any]:
        k, v = (m.normal(batch, queries, KV_HEADS, head_dim) for _ in range(2))
        return {"q": m.normal(batch, queries, HEADS, head_dim), "k": k, "v": v, "causal": causal}

    return make


def _paged(batch: int, context: int, page: int) -> Make:
    pages = math.ceil(context / page)

    def make(m: Maker) -> dict[str, Any]:
        table = torch.randperm(batch * pages, device=m.device, generator=m.generator)
        return {
            "q": m.normal(batch, HEADS, HEAD_DIM),
            "k_cache": m.normal(batch * pages, page, KV_HEADS, HEAD_DIM),
            "v_cache": m.normal(batch * pages, page, KV_HEADS, HEAD_DIM),
            "block_table": table.reshape(batch, pages).to(torch.int32),
            "seq_lens": torch.full((batch,), context, dtype=torch.int32, device=m.device),
            "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32, device=m.device),
            "max_seqlen_q": 1,
        }

    return make


def _sampling(batch: int, vocabulary: int) -> Make:
    return lambda m: {
        "logits": m.normal(batch, vocabulary) * 3,
        "seed": m.integers(2**31, batch),
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
    }


def _rows(tokens: int, features: int) -> Iterator[tuple[str, Make, bool]]:
    """The operators over rows at one size, and whether their gradients are timed."""
    yield "rms_norm", _norm(tokens, features), True
    yield "add_rms_norm", _norm(tokens, features, "residual"), True
    yield "layer_norm", _norm(tokens, features, "bias"), True
    yield "silu_and_mul", lambda m: {"x": m.normal(tokens, 2 * features)}, True
    yield "gelu_and_mul", lambda m: {"x": m.normal(tokens, 2 * features), "approximate": "tanh"}, False
    yield "softmax", lambda m: {"x": m.normal(tokens, features)}, False
    yield "rotary_embedding", _rotary(tokens, features), False


# smoke: seconds on any device; core: what the project states figures for.
SUITES = ("smoke", "core")
_CORE, _SMOKE = frozenset({"core"}), frozenset({"smoke"})


def workloads(suite: str = "core") -> list[Workload]:
    """The workloads of a suite, in the order of the table; ArgumentError for a suite that there is not."""
    if suite not in SUITES:
        raise ArgumentError(f"--suite {suite}: there are {', '.join(SUITES)}")
    return [found for found in _all() if suite in found.suites]


def _all() -> Iterator[Workload]:
    for tokens, features in ((16_384, 4096), (16_384, 8192), (128, 4096), (1, 4096), (4, 2 * HEAD_DIM)):
        suites = _SMOKE if tokens == 4 else _CORE
        label = f"{tokens}x{features}"
        for name, make, differentiated in _rows(tokens, features):
            yield Workload(OPS[name], label, make, suites=suites)
            if differentiated and tokens in (16_384, 4) and features != 8192:
                yield Workload(OPS[name], label, make, backward=True, suites=suites)
    for tokens, vocabulary in ((4096, 131_072), (4, 97)):
        suites = _SMOKE if tokens == 4 else _CORE
        for backward in (False, True):
            yield Workload(OPS["cross_entropy"], f"{tokens}x{vocabulary}", _loss(tokens, vocabulary), backward, suites)
    for head_dim in (64, 128, 256):
        for causal in (True, False):
            for queries in (512, 2048, 16_384):
                label = f"{queries} D{head_dim} {'causal' if causal else 'full'}"
                make = _attention(queries, head_dim, causal)
                yield Workload(OPS["attention"], label, make, suites=_CORE)
                if head_dim == 128:
                    yield Workload(OPS["attention"], label, make, backward=True, suites=_CORE)
    yield Workload(OPS["attention"], "32 D64 causal", _attention(32, 64, True, tokens=32), suites=_SMOKE)
    for batch, context in ((1, 1024), (1, 131_072), (8, 8192), (64, 8192), (256, 1024)):
        for page in (16, 64):
            label = f"{batch}x{context} page {page}"
            yield Workload(OPS["paged_attention"], label, _paged(batch, context, page), suites=_CORE)
    yield Workload(OPS["paged_attention"], "2x40 page 16", _paged(2, 40, 16), suites=_SMOKE)
    yield Workload(OPS["top_k_top_p_sample"], "64x131072", _sampling(64, 131_072), suites=_CORE)
    yield Workload(OPS["top_k_top_p_sample"], "2x97", _sampling(2, 97), suites=_SMOKE)
