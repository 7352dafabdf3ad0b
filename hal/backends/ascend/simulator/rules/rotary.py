"""Rules of rotary position embedding."""

from __future__ import annotations

from torch import Tensor

from hal.backends.ascend.simulator.constraints import A2, A3, A5, P310, Constraint
from hal.backends.ascend.simulator.rules._common import contiguous, each, no_bfloat16, one_dtype, taking

_MUL, _APPLY = "torch_npu-npu_rotary_mul", "torch_npu-npu_apply_rotary_pos_emb"
_TURN = ("aclnnRotaryPositionEmbedding", "aclnnRotaryPositionEmbeddingV2")
_INPLACE = ("aclnnApplyRotaryPosEmb", "aclnnApplyRotaryPosEmbV2")
_OLDER = A2 | A3 | P310
_BSND = 1


def _spread(x: Tensor, cos: Tensor) -> str | None:
    fits = x.dim() == cos.dim() and x.shape[-1] == cos.shape[-1]
    fits = fits and all(c in (1, n) for n, c in zip(x.shape, cos.shape, strict=True))
    return None if fits else f"cos {tuple(cos.shape)} for an input {tuple(x.shape)}"


def _sequence_only(cos: Tensor, mode: int) -> str | None:
    if mode != 1 or sum(size != 1 for size in cos.shape[:-1]) <= 1:
        return None
    return f"cos {tuple(cos.shape)}"


def _counts(x: Tensor, mode: int) -> str | None:
    """Batch and heads stand before and behind the sequence, or both before it: the sequence's place is not told."""
    if x.dim() != 4:
        return None
    return None if sorted(x.shape[:3])[1] < 1000 else f"input {tuple(x.shape)}"


def _width(limit: int) -> Constraint:
    socs = A5 if limit == 1025 else A2 | A3
    return Constraint(
        operator=_TURN,
        rule=f"the head dim is even and below {limit}",
        page=_MUL,
        enforced_by="document",
        check=each("x", test=lambda t: None if t.shape[-1] % 2 == 0 and t.shape[-1] < limit else _last(t)),
        socs=socs,
    )


def _last(t: Tensor) -> str:
    return f"of head dim {t.shape[-1]}"


def _cos_fits(query: Tensor, cos: Tensor, sin: Tensor, layout: int) -> str | None:
    batch = query.shape[:-2]
    if cos.shape == sin.shape and cos.shape[:-2] == batch and cos.shape[-2] == 1:
        return None
    return f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} for queries {tuple(query.shape)}"


ROWS = (
    Constraint(
        operator=_TURN,
        rule="the input has 3 or 4 dimensions",
        page=_MUL,
        enforced_by="document",
        check=each("x", test=lambda t: None if t.dim() in (3, 4) else f"of {t.dim()}"),
    ),
    _width(896),
    _width(1025),
    Constraint(
        operator=_TURN,
        rule="each dimension of cos is the input's or 1, the last the input's",
        page=_MUL,
        enforced_by="document",
        check=_spread,
    ),
    Constraint(
        operator=_TURN,
        rule="interleaved, cos varies along the sequence alone",
        page=_MUL,
        enforced_by="document",
        check=_sequence_only,
        socs=A2 | A3,
    ),
    Constraint(
        operator=_TURN,
        rule="batch and heads are each below 1000",
        page=_MUL,
        enforced_by="document",
        check=taking(("x", "mode"), _counts),
        socs=A2 | A3,
    ),
    Constraint(
        operator=_INPLACE,
        rule="the head dim is 64 or 128",
        page=_APPLY,
        enforced_by="document",
        check=each("query", "key", "cos", "sin", test=lambda t: None if t.shape[-1] in (64, 128) else _last(t)),
        socs=_OLDER,
    ),
    Constraint(
        operator=_INPLACE,
        rule="query, key, cos and sin have one dtype",
        page=_APPLY,
        enforced_by="document",
        check=one_dtype("query", "key", "cos", "sin"),
    ),
    Constraint(
        operator=_INPLACE,
        rule="cos and sin have the queries' batch and sequence, and one head",
        page=_APPLY,
        enforced_by="document",
        check=_cos_fits,
        socs=_OLDER,
    ),
    Constraint(
        operator="aclnnApplyRotaryPosEmbV2",
        rule="rotary_mode is half",
        page=_APPLY,
        enforced_by="document",
        check=lambda rotary_mode: None if rotary_mode == "half" else repr(rotary_mode),
        socs=_OLDER,
    ),
    Constraint(
        operator=_INPLACE,
        rule="query and key that are turned in place are contiguous",
        page=_APPLY,
        enforced_by="field",
        check=contiguous("query", "key"),
    ),
    Constraint(
        operator=_INPLACE,
        rule="query and key that are turned in place are not empty",
        page=_APPLY,
        enforced_by="document",
        check=each("query", "key", test=lambda t: None if t.numel() else f"of shape {tuple(t.shape)}"),
        socs=_OLDER,
    ),
    no_bfloat16(_INPLACE, _APPLY, "query", "key"),
)
