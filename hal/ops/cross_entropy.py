"""Cross entropy of logits against class ids.

Shape letters: T rows (tokens), V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.accuracy import Accumulator, Accuracy, growth, smallest_normal
from hal.arithmetic import result, widen
from hal.errors import ArgumentError, DtypeError, ShapeError
from hal.op import Args, Cost, Meta, Traits, dtype_name, op
from hal.ops._checks import check_floating, check_rank, check_same_device

__all__ = ["cross_entropy"]

REDUCTIONS = ("none", "mean", "sum")


def _pack(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> tuple[Any, ...]:
    return logits, target, ignore_index, label_smoothing, z_loss, reduction


def _validate(a: Args) -> None:
    check_floating("cross_entropy", "logits", a.logits)
    check_rank("cross_entropy", "logits", a.logits, 2)
    check_rank("cross_entropy", "target", a.target, 1)
    if a.target.dtype is not torch.int64:
        raise DtypeError(
            f"cross_entropy: target is {dtype_name(a.target.dtype)}; class ids are int64: call target.long()"
        )
    check_same_device("cross_entropy", logits=a.logits, target=a.target)
    if a.logits.shape[0] != a.target.shape[0]:
        raise ShapeError(
            f"cross_entropy: logits has {a.logits.shape[0]} rows and target {a.target.shape[0]}; "
            "logits is (T, V) and target (T,): flatten the leading dimensions of both"
        )
    if a.logits.shape[1] == 0:
        raise ShapeError("cross_entropy: logits has no classes; V must be at least 1")
    if a.reduction not in REDUCTIONS:
        raise ArgumentError(
            f"cross_entropy: reduction is {a.reduction!r}; supported are {', '.join(map(repr, REDUCTIONS))}"
        )
    if not 0.0 <= a.label_smoothing <= 1.0:
        raise ArgumentError(f"cross_entropy: label_smoothing is {a.label_smoothing}; it must lie between 0 and 1")
    if not 0.0 <= a.z_loss < float("inf"):
        raise ArgumentError(f"cross_entropy: z_loss is {a.z_loss}; it must be finite and not negative")


def _check_values(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> None:
    classes = logits.shape[1]
    bad = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ArgumentError(
            f"cross_entropy: target[{row}] is {int(target[row])}; it must be a class in 0 … {classes - 1} "
            f"or ignore_index ({ignore_index})"
        )


def _loss_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def _meta(a: Args) -> tuple[Meta, ...]:
    dtype, rows = _loss_dtype(a.logits), a.logits.shape[0]
    return Meta((rows,) if a.reduction == "none" else (), dtype), Meta((rows,), dtype)


def _traits(a: Args) -> Traits:
    features = {name for name in ("label_smoothing", "z_loss") if getattr(a, name) != 0.0}
    return Traits(
        dtype=dtype_name(a.logits.dtype),
        features=frozenset(features | {f"reduction_{a.reduction}"}),
        dims={"rows": a.logits.shape[0], "vocabulary": a.logits.shape[1]},
    )


def _cost(a: Args) -> Cost:
    rows, classes = a.logits.shape
    written = rows if a.reduction == "none" else 1
    # Per logit: compare, subtract, exponential and add.
    return Cost(
        flops=4 * rows * classes,
        bytes=rows * classes * a.logits.element_size() + 8 * rows + written * _loss_dtype(a.logits).itemsize,
    )


def _kept(a: Args) -> tuple[Tensor, Tensor]:
    """Which rows count, and the logits with the others blanked: what an ignored row holds has no
    influence."""
    keep_T = a.target != a.ignore_index
    return keep_T, torch.where(keep_T[:, None], widen(a.logits), 0.0)


def _lse(a: Args, outs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    keep_T, x_TV = _kept(a)
    return (result(torch.where(keep_T, torch.logsumexp(x_TV, -1), 0.0), _loss_dtype(a.logits)),)


def _bound(a: Args, expected: tuple[Tensor, ...], acc: Accumulator) -> tuple[Tensor, ...]:
    rows, classes = a.logits.shape
    keep_T, x_TV = _kept(a)
    lse_T = torch.logsumexp(x_TV, -1)
    chosen_T = x_TV.gather(-1, torch.where(keep_T, a.target, 0)[:, None])[:, 0]
    e_lse = growth(classes, acc) + 2 * acc.eps * lse_T.abs()
    error_T = growth(classes, acc) + 4 * acc.eps * (lse_T.abs() + chosen_T.abs())
    size_T = (lse_T - chosen_T).abs()
    if a.label_smoothing:
        error_T = error_T + a.label_smoothing * growth(classes, acc) * x_TV.abs().mean(-1)
        size_T = size_T + a.label_smoothing * (lse_T - x_TV.mean(-1)).abs()
    if a.z_loss:
        error_T = error_T + a.z_loss * lse_T.abs() * (2 * e_lse + 2 * acc.eps * lse_T.abs())
        size_T = size_T + a.z_loss * lse_T.square()
    zero = torch.zeros((), dtype=torch.float64, device=keep_T.device)
    # An infinite loss (the target's logit is −inf) has no error of its own: its value is judged as a special
    # one.
    error_T = torch.where(keep_T & error_T.isfinite(), error_T, zero)
    if a.reduction == "none":
        return (error_T,)
    total = error_T.sum() + growth(rows, acc) * torch.where(keep_T & size_T.isfinite(), size_T, zero).sum()
    return (total / keep_T.sum().clamp(min=1) if a.reduction == "mean" else total,)


def _gradient_bound(
    a: Args, expected: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], acc: Accumulator
) -> tuple[Tensor | None, ...]:
    (dout,) = grads
    assert dout is not None
    classes = a.logits.shape[1]
    keep_T, x_TV = _kept(a)
    lse_T1 = torch.logsumexp(x_TV, -1, keepdim=True)
    share_T1 = dout.abs().expand(keep_T.shape)[:, None]
    if a.reduction == "mean":
        share_T1 = share_T1 / keep_T.sum().clamp(min=1)
    p_TV = torch.exp(x_TV - lse_T1)
    factor_T1 = 1 + 2 * a.z_loss * lse_T1.abs()
    relative_TV = growth(classes, acc) + 2 * acc.eps * (2 + x_TV.abs() + lse_T1.abs())
    error_TV = torch.where(p_TV > 0, p_TV * factor_T1 * relative_TV + smallest_normal(acc), 0.0)
    error_TV = error_TV + p_TV * 2 * a.z_loss * (growth(classes, acc) + 2 * acc.eps * lse_T1.abs())
    fixed_TV = torch.full_like(p_TV, a.label_smoothing / classes)
    fixed_TV.scatter_add_(-1, torch.where(keep_T, a.target, 0)[:, None], torch.full_like(lse_T1, 1 - a.label_smoothing))
    error_TV = share_T1 * (error_TV + 2 * acc.eps * fixed_TV)
    return (torch.where(keep_T[:, None] & error_TV.isfinite(), error_TV, 0.0),)


def _exact(a: Args, expected: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    keep_T = a.target != a.ignore_index
    return (~keep_T if a.reduction == "none" else ~keep_T.any(),)


ACCURACY = Accuracy(
    bound=_bound,
    exact=_exact,
    gradient_bound=_gradient_bound,
    notes="A row is lse − x_t. The sum of V exponentials of arguments ≤ 0 errs by g(V) relative, so its "
    "logarithm by g(V) absolute; the subtraction of the maximum, its re-addition and that of x_t each err by "
    "ε of what they handle: 4ε(|lse| + |x_t|). Smoothing adds its share of a mean of V logits, g(V)·mean|x|; "
    "z-loss is z·lse², whose error is 2z|lse| times that of lse, and two roundings. Summing T rows adds "
    "g(T)·Σ|row|; the mean divides. Ignored rows, and a loss without targets, are exactly 0. Gradient: "
    "share·[p(1 + 2z·lse) − (1 − s)·onehot − s/V], share = dout over the number of rows for a mean; p = exp(x − lse) "
    "has the relative error g(V) + 2ε(1 + |x| + |lse|) of its argument and of the exponential, the factor of z-loss "
    "2z times the error of lse, the fixed parts two roundings.",
)


@op(
    schema=("Tensor logits, Tensor target, int ignore_index, float label_smoothing, float z_loss, str reduction"),
    results=("loss",),
    pack=_pack,
    validate=_validate,
    meta=_meta,
    traits=_traits,
    dims=("rows", "vocabulary"),
    cost=_cost,
    accuracy=ACCURACY,
    features=("label_smoothing", "z_loss", "reduction_none", "reduction_mean", "reduction_sum"),
    grad=("logits",),
    stats=("lse",),
    compute_stats=_lse,
    check_values=_check_values,
)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Negative log likelihood of class ids under the softmax of logits, in nats.

    With lse = log Σ_v exp(x_v), s = ``label_smoothing`` and z = ``z_loss``, a row's loss is

        (1 − s)·(lse − x_target) + s·(lse − mean_v x_v) + z·lse²

    (smoothing as in Szegedy et al. 2016, mixing the target with the uniform distribution; z-loss as in PaLM,
    Chowdhery et al. 2022). Rows whose target is ``ignore_index`` count for nothing, whatever their logits
    hold: ``"mean"`` divides by the number of the other rows, and with none left mean and sum are 0 with zero
    gradient.

    logits: (T, V), any float, V ≥ 1; −inf is allowed, and the loss is +inf where the target's logit is −inf
    (or where any is, with smoothing). A row that counts and is −inf throughout has no distribution: NaN.
    target: (T,) int64, a class or ``ignore_index``, which may itself be a class.
    reduction: ``"none"`` gives (T,), ``"mean"`` and ``"sum"`` a scalar; float32, or float64 for float64
    logits.

    Raises ShapeError, DtypeError, DeviceError, and ArgumentError for an unknown reduction, smoothing outside
    0 … 1, a negative z-loss or a target out of range (checked for CPU tensors, and on devices under
    ``HAL_CHECK=1``).
    """
    a = Args(logits=logits, target=target, ignore_index=ignore_index)
    keep_T, x_TV = _kept(a)
    lse_T = torch.logsumexp(x_TV, -1)
    chosen_T = x_TV.gather(-1, torch.where(keep_T, target, 0)[:, None])[:, 0]
    loss_T = lse_T - chosen_T
    if label_smoothing:
        uniform_T = lse_T - x_TV.mean(-1)
        # At 1 the target's own term is absent, not 0·∞.
        mixed_T = (1.0 - label_smoothing) * loss_T + label_smoothing * uniform_T
        loss_T = uniform_T if label_smoothing == 1.0 else mixed_T
    if z_loss:
        loss_T = loss_T + z_loss * lse_T.square()
    loss_T = torch.where(keep_T, loss_T, 0.0)
    dtype = _loss_dtype(logits)
    if reduction == "none":
        return result(loss_T, dtype)
    total = loss_T.sum()
    return result(total / keep_T.sum().clamp(min=1) if reduction == "mean" else total, dtype)
