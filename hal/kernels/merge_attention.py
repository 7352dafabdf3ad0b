"""merge_attention: attention over two disjoint sets of keys, from attention over each.

Scope: outs are (B, S, H, E) with any strides, float32, float16 or bfloat16; their log-sum-exps are float32 (B, H, S)
with any strides; results are contiguous. Arithmetic is float32; a piece of weight 0 is not multiplied. A tile is
BLOCK_R rows, of one batch, query and head each, by BLOCK_E columns.

Limits: no float64.

Floor, s bytes an element: (3s·E + 12) bytes a row, which the kernel meets, at 3·E + 8 flops.

Shape suffixes: R rows of the tile, E its columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["merge_kernel"]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _places(row_R, queries, heads, batch_stride, query_stride, head_stride):
    """Where each row begins."""
    row_R, head_R = row_R // heads, row_R % heads
    return row_R // queries * batch_stride + row_R % queries * query_stride + head_R * head_stride


@triton.jit(do_not_specialize=["rows", "queries"])  # 1 row is merged as it is among many
def merge_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    rows,
    queries,
    heads,
    columns,
    a_batch_stride,
    a_query_stride,
    a_head_stride,
    a_stride,
    b_batch_stride,
    b_query_stride,
    b_head_stride,
    b_stride,
    lse_a_batch_stride,
    lse_a_query_stride,
    lse_a_head_stride,
    lse_b_batch_stride,
    lse_b_query_stride,
    lse_b_head_stride,
    lse_batch_stride,
    lse_query_stride,
    lse_head_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """out (B, S, H, E) and lse (B, H, S) of both pieces; rows = B·S·H."""
    row_R = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_R = row_R < rows
    lse_a += _places(row_R, queries, heads, lse_a_batch_stride, lse_a_query_stride, lse_a_head_stride)
    lse_b += _places(row_R, queries, heads, lse_b_batch_stride, lse_b_query_stride, lse_b_head_stride)
    lse += _places(row_R, queries, heads, lse_batch_stride, lse_query_stride, lse_head_stride)
    a_R, b_R = tl.load(lse_a, mask=mask_R, other=0.0), tl.load(lse_b, mask=mask_R, other=0.0)
    top_R = tl.maximum(a_R, b_R)
    top_R = tl.where(top_R == float("-inf"), 0.0, top_R)
    a_R, b_R = tl.exp2((a_R - top_R) * LOG2_E), tl.exp2((b_R - top_R) * LOG2_E)
    total_R = a_R + b_R
    lse_R = tl.where(total_R == 0.0, float("-inf"), top_R + tl.log(total_R))
    tl.store(lse, lse_R, mask=mask_R)
    total_R = tl.where(total_R == 0.0, 1.0, total_R)
    a_from_R1 = _places(row_R, queries, heads, a_batch_stride, a_query_stride, a_head_stride)[:, None]
    b_from_R1 = _places(row_R, queries, heads, b_batch_stride, b_query_stride, b_head_stride)[:, None]
    for start in range(0, columns, BLOCK_E):
        at_E = start + tl.arange(0, BLOCK_E)
        mask_RE = mask_R[:, None] & (at_E < columns)[None, :]
        at_1E = at_E.to(tl.int64)[None, :]
        # What weighs nothing is not even loaded.
        a_RE = tl.load(out_a + a_from_R1 + at_1E * a_stride, mask=mask_RE & (a_R != 0.0)[:, None], other=0.0)
        b_RE = tl.load(out_b + b_from_R1 + at_1E * b_stride, mask=mask_RE & (b_R != 0.0)[:, None], other=0.0)
        sum_RE = a_R[:, None] * a_RE.to(tl.float32) + b_R[:, None] * b_RE.to(tl.float32)
        tl.store(out + row_R[:, None] * columns + at_1E, (sum_RE / total_R[:, None]).to(out.dtype.element_ty), mask_RE)
