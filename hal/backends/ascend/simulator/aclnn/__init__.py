"""The simulated operators, one module a family: every module of this package is imported when the simulator starts."""

from __future__ import annotations
