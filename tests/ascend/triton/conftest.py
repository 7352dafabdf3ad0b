"""Chooses the modules that this process can run.

The kernels are compiled and interpreted in an environment of their own, with triton-ascend, and in processes of their
own, since triton reads TRITON_INTERPRET when it is imported: `make ascend-triton` runs both. Everywhere else only what
holds without triton-ascend is collected, and the header says so.
"""

from __future__ import annotations

import os

from hal.backends.ascend.triton import missing

WHY = missing() or ("TRITON_INTERPRET=1" if os.environ.get("TRITON_INTERPRET") == "1" else "compiling")
RUNS = {"TRITON_INTERPRET=1": "test_numerics.py", "compiling": "test_compile.py"}.get(WHY, "test_without_triton.py")
MODULES = ("test_compile.py", "test_numerics.py", "test_without_triton.py")
collect_ignore = [name for name in MODULES if name != RUNS]


def pytest_report_header() -> str:
    return f"tests/ascend/triton: {WHY}, so only {RUNS} is collected; `make ascend-triton` runs the others"
