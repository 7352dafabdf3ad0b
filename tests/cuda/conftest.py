"""Chooses the modules that this process can run.

Kernels are interpreted, and compiled, in an environment with triton and in processes of their own, since triton reads
TRITON_INTERPRET when it is imported: `make triton` runs both. Elsewhere only what holds without triton is collected,
and the header says so.
"""

from __future__ import annotations

import os

from hal.backends.cuda.offers import missing

WHY = missing() or ("TRITON_INTERPRET=1" if os.environ.get("TRITON_INTERPRET") == "1" else "compiling")
INTERPRETED, COMPILED, WITHOUT = "test_interpreted_", "test_compiled_", "test_without_"
RUNS = {"TRITON_INTERPRET=1": INTERPRETED, "compiling": COMPILED}.get(WHY, WITHOUT)
collect_ignore_glob = [f"{prefix}*.py" for prefix in (INTERPRETED, COMPILED, WITHOUT) if prefix != RUNS]


def pytest_report_header() -> str:
    return f"tests/cuda: {WHY}, so only {RUNS}*.py are collected; `make triton` runs the others"
