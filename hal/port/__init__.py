"""Bringing models to hal: `hal.port.transformers.apply(model)`."""

from __future__ import annotations
