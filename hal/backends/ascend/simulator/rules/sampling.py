"""Rules of the filters of logits."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hal.backends.ascend.simulator.constraints import Constraint
from hal.backends.ascend.simulator.rules._common import absent, dtypes, each, one_dtype

_PAGE = "torch_npu-npu_top_k_top_p"
_FILTER = "aclnnApplyTopKTopP"
_filter = partial(Constraint, _FILTER, page=_PAGE, enforced_by="document")


def _one_a_row(logits: Tensor, p: Tensor | None, k: Tensor | None) -> str | None:
    for name, t in (("p", p), ("k", k)):
        if t is not None and t.shape != logits.shape[:1]:
            return f"{name} {tuple(t.shape)} for {logits.shape[0]} rows"
    return None


def _k_range(logits: Tensor, k: Tensor | None) -> str | None:
    if k is None or not k.numel():
        return None
    least, greatest = (int(x) for x in k.aminmax())
    most = min(1024, logits.shape[-1])
    return None if least >= 1 and greatest <= most else f"{least} to {greatest} of {logits.shape[-1]} logits"


def _p_range(p: Tensor | None) -> str | None:
    if p is None or not p.numel():
        return None
    least, greatest = (float(x) for x in p.aminmax())
    return None if least >= 0 and greatest <= 1 else f"{least:g} to {greatest:g}"


def _any(p: Tensor | None, k: Tensor | None) -> str | None:
    return "neither" if p is None and k is None else None


ROWS = (
    absent(_FILTER, _PAGE),
    _filter(
        rule="logits have 2 dimensions",
        check=each("logits", test=lambda t: None if t.dim() == 2 else f"of {t.dim()}"),
    ),
    _filter(
        rule="p has the dtype of the logits",
        check=one_dtype("logits", "p"),
    ),
    _filter(
        rule="k is int32",
        check=dtypes("k", allowed=(torch.int32,)),
    ),
    _filter(rule="p and k have one entry a row", check=_one_a_row),
    _filter(rule="k is at least 1 and at most 1024 and the number of logits", check=_k_range, values=True),
    _filter(rule="p is from 0 to 1", check=_p_range, values=True),
    _filter(rule="p or k is given", check=_any),
)
