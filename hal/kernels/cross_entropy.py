"""cross_entropy over the rows of a matrix of logits, and its gradient.

Scope: logits are (rows, classes), float32, float16 or bfloat16, with any strides; target is int64 with any stride;
losses, lse and workspaces are float32, contiguous. Three kernels make the loss. `statistics_kernel` reads the logits
once: of each chunk of a row it leaves the maximum, the sum of exponentials over it and, for smoothing, the sum of the
logits. `losses_kernel` combines a row's chunks into its loss and lse, and either stores the loss or adds up the rows of
its program; `total_kernel` adds up the programs. Every sum is taken in one fixed order, which for a row depends on the
number of classes alone. `share_kernel` and `gradient_kernel` are the backward pass, from the saved lse. Rows whose
target is ignored are not read, nor is a logit that a target out of range names: the loss of its row is NaN.

Limits: no float64; fewer than 2³¹ − 2²³ classes and rows. Where classes or the stride of rows is no multiple of 16,
loads are of single elements, as the compiler cannot know that wider ones are aligned.

Floor, s bytes a logit: the forward pass reads s·rows·classes bytes at 4 flops a logit (5 with smoothing), and moves
8 (12) bytes more for each chunk, twice, and 12 for each row. The backward pass moves 2s·rows·classes bytes at 5 flops a
logit; between the two 4 bytes a row are kept.

Shape suffixes: R rows of a tile, V its classes, as N loads of G threads of L classes, where the tile lies so; C chunks
of a row; P programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gradient_kernel", "losses_kernel", "share_kernel", "statistics_kernel", "total_kernel"]


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp(x):
    """exp x, 0 where it is subnormal: one instruction, where tl.exp takes three more for those."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def _base(maximum):
    """What to subtract: the maximum, but 0 for one that is infinite, from which the difference may be NaN."""
    return tl.where(tl.abs(maximum) == float("inf"), 0.0, maximum)


@triton.jit
def _targets(target, row_R, rows, stride, ignore_index):
    """The targets of rows, and which rows there are and count."""
    target_R = tl.load(target + row_R * tl.cast(stride, tl.int64), mask=row_R < rows, other=ignore_index)
    return target_R, (row_R < rows) & (target_R != ignore_index)


@triton.jit(do_not_specialize=["rows"])  # 1 row is summed as it is among many
def statistics_kernel(
    logits,
    target,
    partials,
    rows,
    classes,
    row_stride,
    stride,
    target_stride,
    ignore_index,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LOADS: tl.constexpr,
    LANES: tl.constexpr,
    SMOOTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """partials (2 or 3, rows, chunks): maximum of each chunk, sum of exp(x − maximum) and, if SMOOTH, of x."""
    GROUPS: tl.constexpr = BLOCK_V // (LOADS * LANES)
    chunk = tl.program_id(0) % chunks
    row_R = tl.program_id(0) // chunks * BLOCK_R + tl.arange(0, BLOCK_R)
    _, keep_R = _targets(target, row_R, rows, target_stride, ignore_index)
    x_R1 = (logits + row_R.to(tl.int64) * tl.cast(row_stride, tl.int64))[:, None]
    # Each thread has a maximum and sums of its own, so that none waits for another within the loop.
    top_RG = tl.full((BLOCK_R, GROUPS), float("-inf"), tl.float32)
    weight_RG = tl.zeros((BLOCK_R, GROUPS), tl.float32)
    sum_RG = tl.zeros((BLOCK_R, GROUPS), tl.float32)
    begin = chunk * CHUNK
    for start in tl.range(begin, tl.minimum(begin + CHUNK, classes), BLOCK_V, num_stages=STAGES):
        at_V = start + tl.arange(0, BLOCK_V)
        mask_RV = keep_R[:, None] & (at_V < classes)[None, :]
        at_1V = (at_V * tl.cast(stride, tl.int64))[None, :]
        x_RV = tl.load(x_R1 + at_1V, mask=mask_RV, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
        x_RNGL = tl.reshape(x_RV, (BLOCK_R, LOADS, GROUPS, LANES))
        risen_RG = tl.maximum(top_RG, tl.max(tl.max(x_RNGL, 3), 1))
        base_RG = _base(risen_RG)
        weight_RNGL = _exp(x_RNGL - base_RG[:, None, :, None])
        weight_RG = weight_RG * _exp(top_RG - base_RG) + tl.sum(tl.sum(weight_RNGL, 3), 1)
        top_RG = risen_RG
        if SMOOTH:
            x_RNGL = tl.reshape(tl.where(mask_RV, x_RV, 0.0), (BLOCK_R, LOADS, GROUPS, LANES))
            sum_RG += tl.sum(tl.sum(x_RNGL, 3), 1)
    top_R = tl.max(top_RG, 1)
    weight_R = tl.sum(weight_RG * _exp(top_RG - _base(top_R)[:, None]), 1)
    plane = tl.cast(rows, tl.int64) * chunks
    partials_R = partials + row_R.to(tl.int64) * chunks + chunk
    tl.store(partials_R, top_R, mask=keep_R)
    tl.store(partials_R + plane, weight_R, mask=keep_R)
    if SMOOTH:
        tl.store(partials_R + 2 * plane, tl.sum(sum_RG, 1), mask=keep_R)


@triton.jit(do_not_specialize=["rows"])  # 1 row is summed as it is among many
def losses_kernel(
    logits,
    target,
    partials,
    loss,
    lse,
    sums,
    rows,
    classes,
    row_stride,
    stride,
    target_stride,
    ignore_index,
    chunks,
    smoothing,
    z_loss,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SMOOTH: tl.constexpr,
    UNIFORM: tl.constexpr,
    REDUCE: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Of each row the loss, unless REDUCE, and lse, unless None. Their sum or mean goes to loss if REDUCE and there are
    no sums; else each program's sum and count go to sums (2, programs). UNIFORM: smoothing is 1."""
    at_C = tl.arange(0, BLOCK_C)
    total_R = tl.zeros((BLOCK_R,), tl.float32)
    count_R = tl.zeros((BLOCK_R,), tl.int32)
    plane = tl.cast(rows, tl.int64) * chunks
    for first in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        row_R = first + tl.arange(0, BLOCK_R)
        target_R, keep_R = _targets(target, row_R, rows, target_stride, ignore_index)
        # A row whose target is no class is NaN, and nothing beside the logits is read.
        known_R = keep_R & (target_R >= 0) & (target_R < classes)
        at_R = row_R.to(tl.int64) * tl.cast(row_stride, tl.int64) + target_R * tl.cast(stride, tl.int64)
        chosen_R = tl.load(logits + at_R, mask=known_R, other=float("nan")).to(tl.float32)
        partials_RC = partials + row_R.to(tl.int64)[:, None] * chunks + at_C[None, :]
        mask_RC = keep_R[:, None] & (at_C < chunks)[None, :]
        top_RC = tl.load(partials_RC, mask=mask_RC, other=float("-inf"))
        weight_RC = tl.load(partials_RC + plane, mask=mask_RC, other=0.0)
        top_R = tl.max(top_RC, 1)
        log_R = tl.log(tl.sum(weight_RC * _exp(top_RC - _base(top_R)[:, None]), 1))
        lse_R = top_R + log_R
        # The maximum meets the logit before the logarithm: near a loss of 0 no digit is lost to a large lse.
        loss_R = (top_R - chosen_R) + log_R
        if SMOOTH:
            mean_R = tl.sum(tl.load(partials_RC + 2 * plane, mask=mask_RC, other=0.0), 1) / classes
            uniform_R = (top_R - mean_R) + log_R
            if UNIFORM:
                loss_R = tl.where(known_R, uniform_R, chosen_R)
            else:
                loss_R = (1.0 - smoothing) * loss_R + smoothing * uniform_R
        if z_loss is not None:
            loss_R += z_loss * lse_R * lse_R
        loss_R = tl.where(keep_R, loss_R, 0.0)
        if lse is not None:
            tl.store(lse + row_R, tl.where(keep_R, lse_R, 0.0), mask=row_R < rows)
        if REDUCE:
            total_R += loss_R
            count_R += keep_R.to(tl.int32)
        else:
            tl.store(loss + row_R, loss_R, mask=row_R < rows)
    if REDUCE:
        total, count = tl.sum(total_R, 0), tl.sum(count_R, 0)
        if sums is None:
            _store_total(loss, total, count, MEAN)
        else:
            tl.store(sums + tl.program_id(0), total)
            tl.store(sums + tl.num_programs(0) + tl.program_id(0), count.to(tl.float32))


@triton.jit
def _store_total(loss, total, count, MEAN: tl.constexpr):
    """The sum, or (MEAN) the sum over the number of rows that count."""
    if MEAN:
        total /= tl.maximum(count, 1).to(tl.float32)
    tl.store(loss, total)


@triton.jit
def total_kernel(sums, loss, programs, BLOCK_P: tl.constexpr, MEAN: tl.constexpr):
    """The sum or mean of what each program of `losses_kernel` left; one program."""
    at_P = tl.arange(0, BLOCK_P)
    total = tl.sum(tl.load(sums + at_P, mask=at_P < programs, other=0.0), 0)
    count = tl.sum(tl.load(sums + programs + at_P, mask=at_P < programs, other=0.0).to(tl.int32), 0)
    _store_total(loss, total, count, MEAN)


@triton.jit
def share_kernel(target, dloss, share, rows, target_stride, ignore_index, BLOCK_R: tl.constexpr):
    """dloss over the number of rows that count: the share of each in the gradient of a mean; one program."""
    count_R = tl.zeros((BLOCK_R,), tl.int32)
    for first in range(0, rows, BLOCK_R):
        _, keep_R = _targets(target, first + tl.arange(0, BLOCK_R), rows, target_stride, ignore_index)
        count_R += keep_R.to(tl.int32)
    tl.store(share, tl.load(dloss).to(tl.float32) / tl.maximum(tl.sum(count_R, 0), 1).to(tl.float32))


@triton.jit
def gradient_kernel(
    logits,
    target,
    lse,
    share,
    dlogits,
    rows,
    classes,
    row_stride,
    stride,
    target_stride,
    share_stride,
    ignore_index,
    smoothing,
    z_loss,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """dlogits = share·[exp(x − lse)·(1 + 2z·lse) − (1 − s)·onehot − s/classes], 0 in rows that do not count.

    share is a number for each row, or one for all with a stride of 0.
    """
    across = tl.cdiv(classes, BLOCK_V)
    row_R = tl.program_id(0) // across * BLOCK_R + tl.arange(0, BLOCK_R)
    at_V = tl.program_id(0) % across * BLOCK_V + tl.arange(0, BLOCK_V)
    target_R, keep_R = _targets(target, row_R, rows, target_stride, ignore_index)
    share_R = tl.load(share + row_R * tl.cast(share_stride, tl.int64), mask=keep_R, other=0.0).to(tl.float32)
    lse_R = tl.load(lse + row_R, mask=keep_R, other=0.0)
    in_V = (at_V < classes)[None, :]
    at_RV = (row_R.to(tl.int64) * tl.cast(row_stride, tl.int64))[:, None] + (at_V * tl.cast(stride, tl.int64))[None, :]
    x_RV = tl.load(logits + at_RV, mask=keep_R[:, None] & in_V, other=0.0, eviction_policy="evict_first").to(tl.float32)
    factor_R = share_R
    if z_loss is not None:
        factor_R *= 1.0 + 2.0 * z_loss * lse_R
    d_RV = _exp(x_RV - lse_R[:, None]) * factor_R[:, None]
    # Compared in 32 bits, which hold every class.
    class_R = tl.where((target_R >= 0) & (target_R < classes), target_R, -1).to(tl.int32)
    d_RV -= tl.where(at_V[None, :] == class_R[:, None], (share_R * (1.0 - smoothing))[:, None], 0.0)
    d_RV -= (share_R * (smoothing / classes))[:, None]
    d_RV = tl.where(keep_R[:, None], d_RV, 0.0)
    out_RV = row_R.to(tl.int64)[:, None] * classes + at_V[None, :]
    tl.store(dlogits + out_RV, d_RV.to(dlogits.dtype.element_ty), mask=(row_R < rows)[:, None] & in_V)
