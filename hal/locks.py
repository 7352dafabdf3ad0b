"""The one lock of everything off the fast path: settings, plug-ins, plans.

One lock cannot be taken in two orders. A fork waits for it, so that a child finds what it guards whole and free.
"""

from __future__ import annotations

import os
import threading

__all__ = ["LOCK"]

LOCK = threading.RLock()

os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
