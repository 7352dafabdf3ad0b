"""`python -m hal.cli`."""

from __future__ import annotations

from hal.cli import main

if __name__ == "__main__":
    main()
