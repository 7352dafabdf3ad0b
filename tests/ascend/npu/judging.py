"""Judges one implementation of the adapter on one case."""

from __future__ import annotations

from dataclasses import replace

from hal import registry
from hal.backends.ascend.kv_cache import without_skips
from hal.conformance.case import make
from hal.conformance.judge import judge


def judged(op, name, dtype, params):
    """The verdict. Where a case of write_kv_cache skips no slot, its slots are marked so, as a caller would."""
    registry.devices("ascend")
    found = next(i for i in registry.implementations("ascend", op) if i.name == name)
    if op == "write_kv_cache" and params.get("skip") == "never":
        # What is not registered is called without a device's architecture to go by.
        anywhere = replace(found.supports, architectures=None)
        found = replace(found, forward=_marking(found.forward), supports=anywhere)
    return judge(make(op, dtype, params, {"grid"}), found, "npu:0", backend="ascend")


def _marking(write):
    def forward(k, v, k_cache, v_cache, slot_mapping, **options):
        write(k, v, k_cache, v_cache, without_skips(slot_mapping), **options)

    return forward
