"""What the rules of attention for inference ask of a call: operators, pages, and the meaning of its layout."""

from __future__ import annotations

from torch import Tensor

from hal.backends.ascend.simulator.constraints import Constraint

__all__ = [
    "ALL",
    "FUSED",
    "PAGE",
    "PROMPT",
    "PROMPT_PAGE",
    "ROWS",
    "SINKING",
    "STEP",
    "STEP_PAGE",
    "V2_PAGE",
    "head_dim",
    "key_rows",
    "one",
    "packed",
    "query_dims",
    "single",
]

PAGE, V2_PAGE = "torch_npu-npu_fused_infer_attention_score", "torch_npu-npu_fused_infer_attention_score_v2"
PROMPT_PAGE, STEP_PAGE = "torch_npu-npu_prompt_flash_attention", "torch_npu-npu_incre_flash_attention"
FUSED = tuple(f"aclnnFusedInferAttentionScoreV{version}" for version in (2, 3, 4, 5))
SINKING = FUSED[2:]
PROMPT, STEP = "aclnnPromptFlashAttentionV3", "aclnnIncreFlashAttentionV4"
ALL = (*FUSED, PROMPT, STEP)

ROWS: tuple[Constraint, ...] = ()


def one(t: Tensor | list[Tensor]) -> Tensor:
    return t[0] if isinstance(t, list) else t


def packed(input_layout: str) -> bool:
    return input_layout.startswith(("TND", "NTD"))


def query_dims(query: Tensor, input_layout: str, num_heads: int) -> tuple[int, int, int, int]:
    """Sequences, heads, queries and head dim of a call in a dense layout."""
    given = input_layout.partition("_")[0]
    if given == "BSH":
        return query.shape[0], num_heads, query.shape[1], query.shape[2] // num_heads
    if given == "BSND":
        return query.shape[0], query.shape[2], query.shape[1], query.shape[3]
    return query.shape[0], query.shape[1], query.shape[2], query.shape[3]


def single(query: Tensor, input_layout: str, num_heads: int) -> bool:
    return not packed(input_layout) and query_dims(query, input_layout, num_heads)[2] == 1


def head_dim(query: Tensor, input_layout: str, num_heads: int) -> int:
    return query.shape[-1] // num_heads if input_layout.startswith("BSH") else query.shape[-1]


def key_rows(key: list[Tensor] | Tensor, input_layout: str, num_heads: int, num_key_value_heads: int) -> int:
    """The key rows of a dense, unpaged call."""
    return query_dims(one(key), input_layout, num_key_value_heads or num_heads)[2]
