"""The `hal` command. It stands outside the package because importing any module of `hal` imports torch.

torch loads the packages of other devices by itself, and torch_npu cannot load without a CANN. `hal simulate` brings
one, for the program that it starts, and `hal doctor` tells that there is none; so both must do without them.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the `hal` command."""
    if sys.argv[1:2] in (["simulate"], ["doctor"]):
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    from hal.cli import main as run

    run()
