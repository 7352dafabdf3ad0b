"""The documented constraints, one module a family: the ROWS of every module of this package hold."""

from __future__ import annotations
