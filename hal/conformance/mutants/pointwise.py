"""Faulty gated activations, softmax, rotary embedding and linear."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.conformance.mutants import _gates, _linear, _rotary, _softmax

if TYPE_CHECKING:
    from hal.conformance.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS: list[Mutant] = [*_gates.MUTANTS, *_softmax.MUTANTS, *_rotary.MUTANTS, *_linear.MUTANTS]
