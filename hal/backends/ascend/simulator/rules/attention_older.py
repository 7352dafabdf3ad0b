"""Rules of prompt and incremental flash attention, the operators before the fused one."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from hal.backends.ascend.simulator.constraints import A5, P310, Constraint
from hal.backends.ascend.simulator.rules._calls import PROMPT, PROMPT_PAGE, STEP, STEP_PAGE, one, single
from hal.backends.ascend.simulator.rules._common import no_bfloat16

_UNLIMITED = 2**31 - 1
_prompt = partial(Constraint, PROMPT, page=PROMPT_PAGE, enforced_by="document", socs=P310)
_step = partial(Constraint, STEP, page=STEP_PAGE, enforced_by="document")


def _paged_lengths(block_table: Tensor | None, actual_seq_lengths: list[int] | None) -> str | None:
    return "none" if block_table is not None and not actual_seq_lengths else None


def _tokens_310p(pre_tokens: int, next_tokens: int) -> str | None:
    fits = pre_tokens == _UNLIMITED and next_tokens in (0, _UNLIMITED)
    return None if fits else f"{pre_tokens} and {next_tokens}"


def _batch_310p(query: Tensor) -> str | None:
    return None if query.shape[0] <= 128 else f"{query.shape[0]}"


def _step_query(query: Tensor, input_layout: str, num_heads: int) -> str | None:
    return None if single(query, input_layout, num_heads) else f"{tuple(query.shape)} as {input_layout}"


def _step_block(block_table: Tensor | None, block_size: int) -> str | None:
    return None if block_table is None or (block_size > 0 and block_size % 16 == 0) else f"{block_size}"


def _step_cache(key: list[Tensor], input_layout: str, block_table: Tensor | None) -> str | None:
    if block_table is None or one(key).dim() == 3 or input_layout == "BNSD":
        return None
    return f"{tuple(one(key).shape)} with {input_layout}"


ROWS = (
    _prompt(
        rule="sparse_mode is 0 on the 310P", check=lambda sparse_mode: None if sparse_mode == 0 else f"{sparse_mode}"
    ),
    _prompt(rule="pre_tokens is 2147483647 and next_tokens 0 or 2147483647 on the 310P", check=_tokens_310p),
    _prompt(rule="there are at most 128 sequences on the 310P", check=_batch_310p),
    no_bfloat16((PROMPT, STEP), STEP_PAGE, "query", "key", "value"),
    _step(rule="there is one query a sequence", check=_step_query),
    _step(rule="with a block_table actual_seq_lengths is given", check=_paged_lengths),
    _step(rule="block_size is a multiple of 16", check=_step_block),
    _step(rule="a cache (blocks, heads, block size, head dim) comes with layout BNSD", check=_step_cache),
    _step(
        rule="inner_precise is 0 or 1",
        check=lambda inner_precise: None if inner_precise in (0, 1) else f"{inner_precise}",
    ),
    Constraint(
        operator=(PROMPT, STEP),
        rule="the 950 takes the fused operator instead",
        page="torch_npu's own check",
        enforced_by="wheel",
        socs=A5,
    ),
)
