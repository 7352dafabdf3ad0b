"""Compiles the operators on paged caches, and merge_attention, as the host side launches them: no spills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_only import SHARED, Launched, compiling

from hal.backends.cuda.implementations import IMPLEMENTATIONS

KERNELS = {found.op: found for found in IMPLEMENTATIONS if found.name == "triton"}
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
Call = Callable[[torch.dtype], None]


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(
    sequences: int,
    queries: int,
    keys: int,
    page: int = 16,
    heads: int = 32,
    kv_heads: int = 8,
    widths: tuple[int, int] = (128, 128),
    cache: torch.dtype | None = None,
    **arguments: Any,
) -> Call:
    """A call of paged_attention; a cache of codes has scales."""

    def call(dtype: torch.dtype) -> None:
        caches = {
            f"{name}_cache": on_meta(4096, page, kv_heads, width, dtype=cache or dtype)
            for name, width in zip("kv", widths, strict=True)
        }
        scales = {} if cache is None else {"k_scale": on_meta(), "v_scale": on_meta(kv_heads)}
        KERNELS["paged_attention"].forward(
            on_meta(sequences * queries, heads, widths[0], dtype=dtype),
            **caches,
            block_table=on_meta(sequences, keys // page, dtype=torch.int32),
            seq_lens=on_meta(sequences, dtype=torch.int32),
            cu_seqlens_q=on_meta(sequences + 1, dtype=torch.int32),
            max_seqlen_q=queries,
            **scales,
            **arguments,
        )

    return call


def write(tokens: int, cache: torch.dtype | None = None) -> Call:
    def call(dtype: torch.dtype) -> None:
        x, into = on_meta(tokens, 8, 128, dtype=dtype), on_meta(2**20, 16, 8, 128, dtype=cache or dtype)
        scales = {} if cache is None else {"k_scale": on_meta(), "v_scale": on_meta(8)}
        slots = on_meta(tokens, dtype=torch.int64)
        KERNELS["write_kv_cache"].forward(x, x, into, torch.empty_like(into), slots, **scales)

    return call


def gather(cache: torch.dtype | None = None) -> Call:
    def call(dtype: torch.dtype) -> None:
        stored = on_meta(4096, 16, 8, 128, dtype=cache or dtype)
        table, cu = on_meta(3, 100, dtype=torch.int32), on_meta(4, dtype=torch.int32)
        scales = {} if cache is None else {"k_scale": on_meta(), "v_scale": on_meta(8)}
        KERNELS["gather_kv_cache"].forward(stored, stored, table, cu, 4000, out_dtype=dtype, **scales)

    return call


def copy(layers: int) -> Call:
    def call(dtype: torch.dtype) -> None:
        caches = [on_meta(4096, 16, 8, 128, dtype=dtype) for _ in range(layers)]
        pairs = on_meta(5, dtype=torch.int64)
        KERNELS["copy_kv_blocks"].forward(caches, caches, pairs, pairs)

    return call


def merge(dtype: torch.dtype) -> None:
    out, lse = on_meta(4096, 32, 128, dtype=dtype), on_meta(4096, 32)
    KERNELS["merge_attention"].forward(out, lse, out, lse)


# Calls whose keys are divided, so that a second launch adds up the parts.
DIVIDED = {
    "decode 1 × 1,024": attention(1, 1, 1024),
    "decode 1 × 131,072": attention(1, 1, 131_072),
    "decode 64 × 8,192": attention(64, 1, 8192),
    "decode 64 × 8,192 in pages of 64": attention(64, 1, 8192, page=64),
    "decode 64 × 8,190 in pages of 5": attention(64, 1, 8190, page=5),
    "decode from int8": attention(64, 1, 8192, cache=torch.int8),
    "decode from fp8": attention(64, 1, 8192, cache=FP8),
    "decode of all options": attention(64, 1, 8192, window=(1023, 0), softcap=30.0, sinks=on_meta(32), return_lse=True),
    "decode of heads of 256": attention(64, 1, 8192, widths=(256, 256)),
    "decode of heads of 576": attention(64, 1, 8192, heads=16, kv_heads=1, widths=(576, 512)),
}
WHOLE = {
    "prefill 4 × 2,048": attention(4, 2048, 2048),
    "prefill with a window": attention(4, 2048, 2048, window=(127, 0), return_lse=True),
    "prefill of heads of 256": attention(8, 2048, 2048, widths=(256, 256)),
    "prefill from fp8": attention(4, 2048, 2048, cache=FP8),
}
MOVES = {
    "write 16,384": write(16_384),
    "write 3": write(3),
    "write int8": write(16_384, torch.int8),
    "write fp8": write(16_384, FP8),
    "gather": gather(),
    "gather fp8": gather(FP8),
    "merge": merge,
}


def compiled(arch: int, call: Call, dtype: torch.dtype = BF16) -> list[Launched]:
    """The launches of a call: none of them spills, or asks for more shared memory than there is."""
    with compiling(arch) as launched:
        call(dtype)
        for each in launched:
            assert each.spilled == 0
            assert each.shared <= SHARED[arch]
        return list(launched)


# The architectures other than sm_90 compile what may differ there; to compile everything takes long.
ELSEWHERE = ("decode 64 × 8,192", "decode from fp8", "decode of heads of 576", "prefill 4 × 2,048")


def on_architectures(calls: dict[str, Call]) -> list[Any]:
    """(architecture, name) of the calls to compile."""
    chosen = [(arch, name) for name in calls for arch in SHARED if arch == 90 or name in ELSEWHERE]
    return [pytest.param(*each, id=f"sm_{each[0]}-{each[1]}") for each in chosen]


@pytest.mark.parametrize(("arch", "call"), on_architectures(DIVIDED))
def test_decoding_streams_its_keys_through_shared_memory_to_the_matrix_units(arch: int, call: str) -> None:
    attend, combine = compiled(arch, DIVIDED[call])
    assert attend.counts(r"LDGSTS\S*128")
    assert attend.counts("HMMA")
    assert combine.name == "combine_kernel"


@pytest.mark.parametrize(("arch", "call"), on_architectures(WHOLE))
def test_prefill_is_one_launch_on_the_matrix_units(arch: int, call: str) -> None:
    (only,) = compiled(arch, WHOLE[call])
    assert only.counts({80: "HMMA", 90: "HGMMA"}.get(arch, "HMMA|UTCHMMA"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("call", ["decode 64 × 8,192", "prefill 4 × 2,048"])
def test_other_dtypes_compile_without_spills(call: str, dtype: torch.dtype) -> None:
    assert compiled(90, (DIVIDED | WHOLE)[call], dtype)


@pytest.mark.parametrize("call", MOVES)
@pytest.mark.parametrize("arch", SHARED, ids=lambda arch: f"sm_{arch}")
def test_a_move_is_one_launch_of_wide_accesses(arch: int, call: str) -> None:
    (only,) = compiled(arch, MOVES[call])
    assert only.counts(r"LDG\S*(64|128)")


def test_few_keys_of_one_sequence_are_spread_over_the_device() -> None:
    attend, _ = compiled(90, DIVIDED["decode 1 × 1,024"])
    assert attend.grid == (8 * 16, 1, 1)


def test_keys_of_one_long_sequence_fill_the_device_once() -> None:
    attend, _ = compiled(90, DIVIDED["decode 1 × 131,072"])
    assert 0.95 * 3 * 132 < attend.grid[0] <= 3 * 132


def test_batches_of_any_size_and_length_share_what_is_compiled() -> None:
    (first, _), (second, _) = (compiled(90, attention(*shape)) for shape in ((64, 1, 8192), (3, 1, 1040)))
    assert first.machine_code is second.machine_code


def test_three_programs_of_decoding_fit_a_multiprocessor() -> None:
    attend, _ = compiled(90, DIVIDED["decode 64 × 8,192"])
    assert 3 * (attend.shared + 1024) <= 228 * 1024
    assert 3 * attend.usage["REG"] * 32 * attend.warps <= 65_536


def test_blocks_of_all_layers_are_copied_by_two_launches_for_each_16_caches() -> None:
    launched = compiled(90, copy(10))
    assert [each.grid for each in launched] == [(5, 16, 4)] * 2 + [(5, 4, 4)] * 2
    assert all(each.counts(r"LDG\S*128") for each in launched)
