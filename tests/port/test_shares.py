"""Shares of work: hal's operators by their cost, others by torch's count or by the element."""

from __future__ import annotations

import pytest
import torch

from hal import ops
from hal.port.shares import Watch


def test_arithmetic_is_counted_inside_and_outside_hal():
    x_TF, weight_GF = torch.randn(4, 8), torch.randn(16, 8)
    with Watch() as watch:
        y_TG = ops.linear(x_TF, weight_GF)
        y_TG @ torch.ones(16, 2)
        y_TG + y_TG
        y_TG.view(16, 4)
    shares = watch.shares
    assert dict(shares.hal_flops) == {"linear_fwd": 2 * 4 * 8 * 16}
    assert shares.other_flops["mm"] == 2 * 4 * 16 * 2
    assert shares.other_flops["add"] == 4 * 16
    assert "view" not in shares.other_flops
    assert shares.flops == pytest.approx(1024 / (1024 + 256 + 64))
    assert 0 < shares.seconds < 1


def test_operators_inside_an_implementation_are_not_counted_twice():
    with Watch() as watch:
        ops.rms_norm(torch.randn(4, 8), torch.ones(8))
    assert set(watch.shares.hal_flops) == {"rms_norm_fwd"}
    assert watch.shares.other_flops.keys() <= {"randn", "ones"}


def test_nothing_watched_is_a_share_of_nothing():
    with Watch() as watch:
        pass
    assert watch.shares.flops == watch.shares.seconds == 0
