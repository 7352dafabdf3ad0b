"""What holds where triton is not installed: imports cost nothing, requests are told why, launches are bound right."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from core_processes import python

import hal.ops
from hal.backends import cuda
from hal.backends.cuda import launch, offers
from hal.backends.cuda.implementations import IMPLEMENTATIONS
from hal.backends.cuda.rows import Rows
from hal.capability import Rejected
from hal.op import OPS

KERNELS = {found.op: found for found in IMPLEMENTATIONS if found.name == "triton"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Lets a test say which triton is found."""
    offers.missing.cache_clear()
    yield monkeypatch
    offers.missing.cache_clear()


def answer(op: str, *arguments: torch.Tensor) -> object:
    contract = OPS[op]
    return KERNELS[op].judge(contract, contract.bind(arguments, {}), "cuda")


def test_importing_the_implementations_imports_no_triton() -> None:
    script = """
        import sys
        from hal.backends.cuda.implementations import IMPLEMENTATIONS
        answer([len(IMPLEMENTATIONS) > 0, "triton" in sys.modules])
    """
    assert python(script)[0] == [True, False]


def test_a_request_is_rejected_because_triton_is_not_installed(installed: pytest.MonkeyPatch) -> None:
    installed.setattr(importlib.util, "find_spec", lambda name: None)
    assert answer("rms_norm", torch.ones(2, 8)) == Rejected(("triton is not installed",))


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0"])
def test_a_request_is_rejected_because_of_the_release_of_triton(installed: pytest.MonkeyPatch, version: str) -> None:
    installed.setattr(importlib.util, "find_spec", lambda name: object())
    installed.setattr(importlib.metadata, "version", lambda name: version)
    reason = f"triton {version} is installed, and the kernels are for 3.6 up to, but without, 3.10"
    assert answer("rms_norm", torch.ones(2, 8)) == Rejected((reason,))


@pytest.mark.parametrize("version", ["3.6.0", "3.9.1"])
def test_a_release_that_the_kernels_are_compiled_with_is_taken(installed: pytest.MonkeyPatch, version: str) -> None:
    installed.setattr(importlib.util, "find_spec", lambda name: object())
    installed.setattr(importlib.metadata, "version", lambda name: version)
    assert offers.missing() is None


def test_a_triton_that_is_not_the_package_is_refused(installed: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    installed.setattr(importlib.util, "find_spec", lambda name: object())
    installed.setattr(importlib.metadata, "version", version)
    assert offers.missing() == "what is imported as triton is not the package triton"


def test_no_device_is_served_without_one() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert cuda.serves(torch.device("cuda", 0)) is False
    assert list(cuda.hal_devices("cuda")) == []


class FakeKernel:
    """Has the face of a compiled Triton function, and says with what it was launched."""

    arg_names = ("x", "y", "n", "BLOCK")
    __name__ = "fake"
    device_caches = None


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> tuple[launch.Launch, list[Any], list[Any]]:
    compiled: list[Any] = []
    ran: list[Any] = []

    def compile_(kernel: Any, grid: Any, arguments: tuple[Any, ...], options: dict[str, int]) -> Any:
        compiled.append((grid, tuple(a.data_ptr() % 16 if isinstance(a, torch.Tensor) else a for a in arguments)))
        number = len(compiled)
        return (lambda *given: ran.append((number, *given))), (lambda index: 7), "function", "metadata"

    monkeypatch.setattr(launch, "kernel", lambda name: FakeKernel())
    monkeypatch.setattr(launch, "_compiled", compile_)
    return launch.Launch("fake.kernel", (3,), torch.device("cpu"), {"num_warps": 4}, n=5, BLOCK=8), compiled, ran


def test_a_launch_specialises_once_for_each_alignment_of_its_pointers(
    bound: tuple[launch.Launch, list[Any], list[Any]],
) -> None:
    made, compiled, ran = bound
    base = torch.zeros(64)
    aligned, shifted = base[:8], base[1:9]
    assert aligned.data_ptr() % 16 == 0
    for x, y in ((aligned, aligned), (aligned, None), (shifted, aligned), (aligned, shifted), (shifted, aligned)):
        made(x, y)
    assert [arguments for _, arguments in compiled] == [(0, 0, 5, 8), (4, 0, 5, 8), (0, 4, 5, 8)]
    assert [run[0] for run in ran] == [1, 1, 2, 3, 2]
    pointers = shifted.data_ptr(), aligned.data_ptr()
    assert ran[2] == (2, 3, 1, 1, 7, "function", "metadata", None, None, None, *pointers, 5, 8)


def test_a_launch_that_does_not_fit_its_kernel_is_refused(bound: tuple[launch.Launch, list[Any], list[Any]]) -> None:
    with pytest.raises(TypeError, match="takes 2 pointers, not 1"):
        bound[0](torch.zeros(8))
    with pytest.raises(TypeError, match="without BLOCK"):
        launch.Launch("fake.kernel", (3,), torch.device("cpu"), {}, x=1, n=5, y=2)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3, 4), (12, 4, 1), Rows(6, 4, 4, False)),
        ((2, 3, 4), (24, 8, 1), Rows(6, 4, 8, False)),
        ((2, 3, 4), (4, 8, 1), Rows(6, 4, 4, True)),
        ((2, 3, 4), (0, 0, 1), Rows(6, 4, 0, False)),
        ((2, 1, 4), (5, 999, 1), Rows(2, 4, 5, False)),
        ((4,), (1,), Rows(1, 4, 4, False)),
        ((4,), (2,), Rows(1, 4, 4, True)),
        ((3, 1), (7, 5), Rows(3, 1, 7, False)),
        ((0, 4), (4, 1), Rows(0, 4, 4, False)),
        ((3, 0), (1, 1), Rows(0, 0, 0, False)),
    ],
)
def test_a_tensor_is_rows_without_a_copy_wherever_its_strides_allow(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: Rows
) -> None:
    x = torch.empty(64).as_strided(shape, strides)
    found = Rows.of(x)
    assert (found.rows, found.features, found.copied) == (expected.rows, expected.features, expected.copied)
    if found.rows > 1:
        assert found.stride == expected.stride
    assert found.lay(x).is_contiguous() if found.copied else found.lay(x) is x


def test_every_operator_of_the_contract_is_implemented() -> None:
    assert {found.op for found in IMPLEMENTATIONS} == {name for name in OPS if hasattr(hal.ops, name)}
