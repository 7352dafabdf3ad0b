from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def devices():
    """The simulated devices; only for modules that run in a process of their own."""
    from hal.backends.portable import simdev

    return simdev.install()
