"""Small calls of every operator, for what PyTorch asks of a torch op: opcheck, compile, export, gradcheck.

`SAMPLES[op]` is a list of callables; each returns (args, kwargs) anew, the same values each time. Tensors that
require grad are differentiated; float64 samples go through gradcheck. The first sample is the one that compiles.
Each `samples_*.py` beside this file holds a `SAMPLES` of its own operators.
"""

from __future__ import annotations

import importlib
from pathlib import Path

SAMPLES = {}
for path in sorted(Path(__file__).parent.glob("samples_*.py")):
    for name, calls in importlib.import_module(path.stem).SAMPLES.items():
        SAMPLES.setdefault(name, []).extend(calls)
