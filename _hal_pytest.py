"""Declares hal's pytest options; costs one small import in projects that do not use them.

It stands outside the package because loading any module of `hal` imports torch, and pytest loads every plug-in that
is installed. The plug-in itself, hal.conformance.plugin, is loaded when an option is used or the suite is named.
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    import pytest

OPTIONS = ("hal_backend", "hal_suite", "hal_op", "hal_impl", "hal_case", "hal_device", "hal_shard", "hal_waivers")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hal", "hal conformance (pytest --pyargs hal.conformance)")
    group.addoption("--hal-backend", metavar="NAME", help="backend to judge; default: HAL_BACKEND, else auto")
    group.addoption("--hal-suite", metavar="quick|full", help="which cases; default: quick")
    group.addoption("--hal-op", action="append", metavar="OP", help="only this operator (repeatable)")
    group.addoption("--hal-impl", action="append", metavar="IMPL", help="only this implementation (repeatable)")
    group.addoption("--hal-case", action="append", metavar="ID", help="only this case (repeatable)")
    group.addoption(
        "--hal-device",
        metavar="DEVICE[,DEVICE…]",
        help="judge on these; pytest-xdist's worker k takes the k-th in turn; default: with xdist all, else the first",
    )
    group.addoption("--hal-shard", metavar="I/N", help="only share I of N of the cases")
    group.addoption("--hal-waivers", metavar="PATH", help="known failures, TOML or JSON, which fail no run")


def pytest_configure(config: pytest.Config) -> None:
    named = any("hal.conformance" in argument for argument in config.invocation_params.args)
    if named or any(config.getoption(name) for name in OPTIONS):
        from hal.conformance import plugin

        config.pluginmanager.register(plugin, "hal.conformance.plugin")
