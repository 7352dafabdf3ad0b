"""Ragged batches: from packed rows and prefix sums to padded sequences and back, by index and without the host.

T packed rows, B sequences, S rows of the longest one. `cu_B1` holds B + 1 prefix sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hal.errors import ArgumentError

__all__ = ["check_cu", "check_same_lengths", "lengths", "owners", "pad", "unpad"]


def lengths(cu_B1: Tensor) -> Tensor:
    """Rows of each sequence, int64."""
    return (cu_B1[1:] - cu_B1[:-1]).to(torch.int64).clamp(min=0)


def pad(x_T: Tensor, cu_B1: Tensor, longest: int) -> Tensor:
    """(T, …) to (B, longest, …); rows past a sequence's end are zero and pass no gradient on."""
    T = x_T.shape[0]
    i_S = torch.arange(longest, device=x_T.device)
    row_BS = cu_B1[:-1, None].to(torch.int64) + i_S
    owned = (i_S < lengths(cu_B1)[:, None]) & (row_BS >= 0) & (row_BS < T)
    zero = x_T.new_zeros(1, *x_T.shape[1:])
    index = torch.where(owned, row_BS, T).flatten()
    rows = torch.cat((x_T, zero)).index_select(0, index)
    return rows.view(cu_B1.shape[0] - 1, longest, *x_T.shape[1:])


def owners(cu_B1: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `total` packed rows: its sequence, its place in it (int64), and whether it has any."""
    t_T = torch.arange(total, device=cu_B1.device)
    cu = cu_B1.to(torch.int64).contiguous()
    b_T = torch.searchsorted(cu, t_T, right=True) - 1
    owned_T = (t_T < cu[-1]) & (b_T >= 0) & (b_T < cu.shape[0] - 1)
    b_T = torch.where(owned_T, b_T, 0)
    return b_T, torch.where(owned_T, t_T - cu[b_T], 0), owned_T


def unpad(x_BS: Tensor, cu_B1: Tensor, total: int) -> Tensor:
    """(B, S, …) to (total, …); rows that belong to no sequence are zero and pass no gradient on."""
    B, S = x_BS.shape[:2]
    b_T, place_T, owned_T = owners(cu_B1, total)
    zero = x_BS.new_zeros(1, *x_BS.shape[2:])
    index = torch.where(owned_T & (place_T < S), b_T * S + place_T, B * S)
    return torch.cat((x_BS.flatten(0, 1), zero)).index_select(0, index)


def check_cu(
    op: str, name: str, cu_B1: Tensor | Sequence[int], rows: int, rows_name: str, longest: int | None, longest_name: str
) -> list[int]:
    """The prefix sums as a list, or ArgumentError when they are not such of at most `rows` rows."""
    cu = cu_B1.tolist() if isinstance(cu_B1, Tensor) else list(cu_B1)
    if cu[0] != 0:
        raise ArgumentError(f"{op}: {name}[0] is {cu[0]}; prefix sums start with 0: put a 0 in front of the sums")
    previous = 0
    for b, now in enumerate(cu[1:]):
        if now < previous:
            raise ArgumentError(
                f"{op}: {name} decreases from {previous} to {now} at entry {b + 1}; it must hold prefix sums of "
                "lengths that are not negative"
            )
        if longest is not None and now - previous > longest:
            raise ArgumentError(
                f"{op}: sequence {b} has {now - previous} rows by {name}, more than {longest_name}={longest}; "
                f"pass an upper bound of all lengths as {longest_name}"
            )
        previous = now
    if previous > rows:
        raise ArgumentError(f"{op}: {name}[-1] is {previous}, but {rows_name} is only {rows}; it may be less, not more")
    return cu


def check_same_lengths(op: str, name: str, device_copy: Tensor, host_copy: Tensor | None) -> None:
    """ArgumentError when the host's copy of lengths tells another story than the device's."""
    if host_copy is not None and device_copy.tolist() != host_copy.tolist():
        raise ArgumentError(
            f"{op}: {name}_cpu is {host_copy.tolist()}, {name} is {device_copy.tolist()}; pass a copy of it, or None"
        )
