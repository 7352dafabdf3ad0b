"""Faults of the operators on a paged KV cache: reading it, writing into it, and the codes it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.conformance.mutants import _cache_codes, _cache_reading, _cache_writing

if TYPE_CHECKING:
    from hal.conformance.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS: list[Mutant] = [*_cache_reading.MUTANTS, *_cache_writing.MUTANTS, *_cache_codes.MUTANTS]
