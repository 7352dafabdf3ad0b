"""The `op` decorator: from a reference function and its companions to a dispatching public function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from torch import Tensor

from hal import torchlib
from hal.accuracy import Accuracy
from hal.arithmetic import baseline, compute_dtype, lossy, oracle, result, stored, widen
from hal.contract import FLOATS, OPS, Args, Cost, Dispatcher, Meta, Op, Traits, dtype_name
from hal.dispatch import public_function
from hal.memory import allocator, empty

__all__ = [
    "FLOATS",
    "OPS",
    "Args",
    "Cost",
    "Dispatcher",
    "Meta",
    "Op",
    "Traits",
    "allocator",
    "baseline",
    "compute_dtype",
    "dtype_name",
    "empty",
    "lossy",
    "op",
    "oracle",
    "result",
    "stored",
    "widen",
]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class PublicFunction(Protocol[P, R_co]):
    """An operator's public function, with its contract at `.op`."""

    op: Op

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def op(
    *,
    schema: str,
    results: tuple[str, ...],
    pack: Callable[..., tuple[Any, ...]],
    validate: Callable[[Args], None],
    meta: Callable[[Args], tuple[Meta, ...]],
    traits: Callable[[Args], Traits],
    cost: Callable[[Args], Cost],
    accuracy: Accuracy,
    features: tuple[str, ...] = (),
    dims: tuple[str, ...] = (),
    grad: tuple[str, ...] = (),
    stats: tuple[str, ...] = (),
    compute_stats: Callable[[Args, tuple[Tensor, ...]], tuple[Tensor, ...]] | None = None,
    saves: tuple[str, ...] | None = None,
    optional_result: str | None = None,
    to_outs: Callable[[Args, Any], tuple[Tensor, ...]] | None = None,
    from_outs: Callable[[tuple[Tensor, ...], tuple[Any, ...]], Any] | None = None,
    check_values: Callable[..., None] | None = None,
    splits: Mapping[str, tuple[str, ...]] | None = None,
    mutates: tuple[str, ...] = (),
    autocast: tuple[str, ...] = (),
    host_lengths: tuple[str, ...] = (),
    volatile: tuple[str, ...] = (),
) -> Callable[[Callable[P, R_co]], PublicFunction[P, R_co]]:
    """Make the decorated reference an operator of the contract.

    The reference's body is the meaning. The companions that take `a` get an `Args` with every public parameter.

    Args:
        schema: arguments of the torch op, tensors first, in torch's schema language.
        results: names of the torch op's results; all are tensors.
        pack: public signature -> the torch op's positional arguments; plain Python that torch.compile can trace.
        validate: raises a typed error for wrong metadata (shapes, dtypes, devices, scalars); reads no values.
        meta: shape and dtype of each result, then of each statistic.
        traits: what capabilities are judged on.
        cost: floor of the call.
        accuracy: the accuracy contract.
        features: every feature that `traits` may name.
        dims: every dimension that `traits` names, which is what limits can bound.
        grad: differentiable arguments; with any, the torch ops are `X_fwd` and `X_bwd`.
        stats, compute_stats: statistics kept for backward, and how to get them from (a, results).
        saves: names of results and statistics that backward gets; default: the statistics.
        optional_result: boolean parameter that asks for the last result; the torch op returns it with shape (0,)
            when it is neither asked for nor kept for backward.
        to_outs, from_outs: between the public result and the torch op's results, where that is not one to one.
        check_values: public signature -> None; reads tensor values and raises. Runs on every call for CPU tensors,
            elsewhere under HAL_CHECK=1, never inside a capture or a compiled region.
        splits: public parameters that stand for several schema arguments (a tuple), or for a tensor or a number.
        mutates: arguments that are written.
        autocast: arguments that autocast casts.
        host_lengths: CPU copies of lengths: exempt from the device check, dropped for CUDA before the torch op.
        volatile: numbers that change from call to call (a seed) and on which neither validation (beyond their type)
            nor selection depends; plans are shared across their values.
    """

    def decorate(reference: Callable[P, R_co]) -> PublicFunction[P, R_co]:
        contract = Op(
            name=reference.__name__,
            reference=reference,
            signature=inspect.signature(reference),
            schema=schema,
            results=results,
            pack=pack,
            validate=validate,
            meta=meta,
            traits=traits,
            cost=cost,
            accuracy=accuracy,
            features=features,
            dims=dims,
            grad=grad,
            stats=stats,
            compute_stats=compute_stats,
            saves=stats if saves is None else saves,
            optional_result=optional_result,
            to_outs=to_outs,
            from_outs=from_outs,
            check_values=check_values,
            splits=dict(splits or {}),
            mutates=mutates,
            autocast=autocast,
            host_lengths=host_lengths,
            volatile=volatile,
        )
        torchlib.register(contract)
        OPS[contract.name] = contract
        public = cast(PublicFunction[P, R_co], public_function(contract, reference))
        public.op = contract
        return public

    return decorate
