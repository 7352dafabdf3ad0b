"""A simulated accelerator: a real PrivateUse1 device stack of torch, made in Python.

Its tensors are true device tensors (device type, index, storage, dispatch key, autograd) whose bytes lie in
host memory: DLPack's device type for extensions is imported by torch as PrivateUse1, so re-tagging a
capsule lets a CPU tensor and a device tensor share bytes. Every ATen kernel runs on the CPU alias through a
boxed fallback; metadata-only kernels run on the device tensor itself, so that views share its storage. Like
a real device it refuses operands on other devices, and `trace()` counts what real hardware would charge
for: transfers and synchronisations.

It shows dispatch, device handling and the absence of hidden host work; never numerics or speed of any chip.
Limits of torch's Python device guards: no streams, events, generators of its own, autocast, deepcopy or
torch.load, and backward passes must run on the thread that called `install`. One stack a process (torch
renames PrivateUse1 once).
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hal.errors import DeviceError

__all__ = ["NAME", "SimulatedDevices", "Trace", "install", "installed"]

NAME = "simdev"

_DL_CPU, _DL_EXTENSION = 1, 12
_UNRENAMED = "privateuseone"

# Kernels that touch metadata only: ATen's CPU ones work on any storage. The fallback would lose the shared
# storage.
_METADATA_KERNELS = (
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "view_as_real",
    "view_as_complex",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
)
# Kernels whose result reaches the host, or whose result shape depends on values: the caller waits for the
# device.
_SYNCHRONISING = frozenset(
    {
        "_local_scalar_dense",
        "equal",
        "nonzero",
        "masked_select",
        "repeat_interleave",
        "_unique2",
        "unique_dim",
        "bincount",
    }
)
# Indices may live on the host, as on other accelerators.
_HOST_OPERANDS = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("index", ctypes.c_int))


class _DLTensorHead(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device", _DLDevice))


@dataclass
class Trace:
    """What ran while tracing: ATen kernels by name, and which of them moved data or made the host wait."""

    kernels: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)
    synchronisations: list[str] = field(default_factory=list)


class SimulatedDevices(types.ModuleType):
    """The module that torch knows as `torch.simdev`; it holds all state there is."""

    simulated = True

    def __init__(self, name: str, count: int) -> None:
        super().__init__(f"torch.{name}", __doc__)
        self.device_name = name
        self._count = count
        self._current = 0
        self._traces: list[Trace] = []
        self._libraries: list[torch.library.Library] = []

    # The functions that torch and its users look up on a device module.
    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._count

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: int | str | torch.device) -> None:
        self._current = self._index(device)

    def get_device_name(self, device: int | str | torch.device | None = None) -> str:
        return f"{self.device_name} (simulated)"

    def synchronize(self, device: int | str | torch.device | None = None) -> None:
        """Nothing to wait for: every kernel has finished when it returns."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        """Random kernels draw from the host's generator, which torch.manual_seed has seeded."""

    def _is_in_bad_fork(self) -> bool:
        return False

    @contextmanager
    def device(self, device: int | str | torch.device) -> Iterator[None]:
        """Make `device` the current one inside the block."""
        previous, self._current = self._current, self._index(device)
        try:
            yield
        finally:
            self._current = previous

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record kernels, transfers and synchronisations inside the block."""
        trace = Trace()
        self._traces.append(trace)
        try:
            yield trace
        finally:
            self._traces.remove(trace)

    def _index(self, device: int | str | torch.device) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        index = self._current if index is None else index
        if not 0 <= index < self._count:
            raise DeviceError(
                f"{self.device_name}:{index} was asked for; there are {self._count} simulated devices, "
                f"0 to {self._count - 1}"
            )
        return index

    def _note(self, kernel: str, kind: str = "kernels") -> None:
        for trace in self._traces:
            getattr(trace, kind).append(kernel)

    def holds(self, value: object) -> bool:
        """Whether `value` is a tensor on one of these devices."""
        return isinstance(value, Tensor) and value.device.type == self.device_name


def installed() -> SimulatedDevices | None:
    """The stack of this process, if there is one."""
    module = getattr(torch, torch._C._get_privateuse1_backend_name(), None)
    return module if isinstance(module, SimulatedDevices) else None


def install(devices: int = 2) -> SimulatedDevices:
    """Register `devices` simulated devices with torch as `simdev:0`, `simdev:1` …

    A second call changes nothing and returns the same stack.

    Raises DeviceError where another device stack (such as torch_npu) already has torch's PrivateUse1 slot.
    """
    if (stack := installed()) is not None:
        return stack
    if (taken := torch._C._get_privateuse1_backend_name()) != _UNRENAMED:
        raise DeviceError(
            f"{NAME} was asked for, but torch has one PrivateUse1 slot a process and {taken} holds it; "
            f"run it in a process (or environment) that does not load the package behind {taken}"
        )
    stack = SimulatedDevices(NAME, devices)
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, stack, _hooks(), _guard())
    _register_kernels(stack)
    # torch's Python guard reports one device, so the engine has no thread for the second: run on the
    # caller's.
    torch.autograd.set_multithreading_enabled(False)
    return stack


def _hooks() -> Any:
    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, index: int) -> bool:
            return True

    return Hooks()


def _guard() -> Any:
    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    return Guard()


def _register_kernels(stack: SimulatedDevices) -> None:
    every = torch.library.Library("_", "IMPL")
    every.fallback(_fallback(stack), "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in _METADATA_KERNELS:
        aten.impl(name, _metadata_kernel(name), "PrivateUse1")
    aten.impl("_copy_from", _copy_from(stack), "PrivateUse1")
    aten.impl("_copy_from_and_resize", _copy_from_and_resize(stack), "PrivateUse1")
    aten.impl("resize_", _resize(stack), "PrivateUse1")
    # A library's registrations end with the object.
    stack._libraries += [every, aten]


def _retag(t: Tensor, device_type: int, index: int) -> Tensor:
    """The same bytes as a tensor of another device."""
    capsule = torch._C._to_dlpack(t)
    head = _DLTensorHead.from_address(_capsule_pointer(capsule, b"dltensor"))
    head.device.type, head.device.index = device_type, index
    alias = torch._C._from_dlpack(capsule)
    assert isinstance(alias, Tensor)
    return alias


def _capsule_pointer(capsule: object, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    pointer = get(capsule, name)
    assert isinstance(pointer, int)
    return pointer


def _on_host(t: Tensor) -> Tensor:
    # DLPack carries neither the conjugate nor the negative bit.
    return _retag(t.detach().resolve_conj().resolve_neg(), _DL_CPU, 0)


def _on_device(t: Tensor, index: int) -> Tensor:
    return _retag(t.detach(), _DL_EXTENSION, index)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _metadata_kernel(name: str) -> Callable[..., Any]:
    overload = _overload(name)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *args, **kwargs: overload.redispatch(keys, *args, **kwargs)


def _take(t: Tensor, content: Tensor) -> None:
    """Make `t` the tensor `content`, storage, shape and all."""
    t.set_(content.untyped_storage(), content.storage_offset(), content.shape, content.stride())


def _fallback(stack: SimulatedDevices) -> Callable[..., Any]:
    def kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
        namespace, _, name = op.name().partition("::")
        name = name.partition(".")[0]
        if namespace != "aten":
            raise NotImplementedError(
                f"{op.name()} has no kernel for {stack.device_name}; register one for it"
            )
        stack._note(name)
        if name in _SYNCHRONISING or (name in _HOST_OPERANDS and _indexed_by_mask(args)):
            stack._note(name, "synchronisations")
        return _run_on_alias(stack, op, name, args, kwargs)

    return kernel


def _run_on_alias(
    stack: SimulatedDevices, op: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    index = _common_index(stack, name, leaves)
    growing = _written(op, args, kwargs)
    originals: dict[int, Tensor] = {}

    def to_host(leaf: Any) -> Any:
        if stack.holds(leaf):
            # A kernel may resize an empty out= tensor; memory that came through DLPack cannot grow.
            fresh = id(leaf) in growing and leaf.numel() == 0
            alias = torch.empty(leaf.shape, dtype=leaf.dtype) if fresh else _on_host(leaf)
            originals[id(alias)] = leaf
            return alias
        if isinstance(leaf, torch.device) and leaf.type == stack.device_name:
            return torch.device("cpu")
        return leaf

    # `aliases` keeps every alias alive, so that no id is handed out twice.
    aliases = [to_host(leaf) for leaf in leaves]
    host_args, host_kwargs = pytree.tree_unflatten(aliases, spec)
    if host_kwargs.get("pin_memory"):
        host_kwargs["pin_memory"] = False
    results = op(*host_args, **host_kwargs)

    def to_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        original = originals.get(id(value))
        if original is None:
            return _on_device(value, index)
        if original.shape != value.shape:
            _take(original, _on_device(value, original.device.index))
        return original

    return pytree.tree_map(to_device, results)


def _common_index(stack: SimulatedDevices, name: str, leaves: list[Any]) -> int:
    """The index of the one device that all operands share; a refusal such as real devices give otherwise."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # A tensor without axes counts as a number, as everywhere in torch.
    devices = {t.device for t in tensors if stack.holds(t) or (t.dim() > 0 and name not in _HOST_OPERANDS)}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} found {found}")
    if devices:
        return int(next(iter(devices)).index)
    asked = [d for d in leaves if isinstance(d, torch.device) and d.type == stack.device_name]
    return stack._index(asked[0]) if asked else stack.current_device()


def _indexed_by_mask(args: tuple[Any, ...]) -> bool:
    """Whether an indexing kernel has to count the True elements of a mask first."""
    indices = args[1] if len(args) > 1 else ()
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices or ())


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The ids of the tensors that the schema says the kernel writes."""
    ids: set[int] = set()
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            ids.update(id(t) for t in pytree.tree_leaves(value) if isinstance(t, Tensor))
    return ids


def _copy_from(stack: SimulatedDevices) -> Callable[..., Tensor]:
    def copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        stack._note("_copy_from")
        if stack.holds(source) and not stack.holds(target):
            stack._note("_copy_from", "downloads")
            if not non_blocking:
                stack._note("_copy_from", "synchronisations")
        elif stack.holds(target) and not stack.holds(source):
            stack._note("_copy_from", "uploads")
        a = _on_host(source) if stack.holds(source) else source
        b = _on_host(target) if stack.holds(target) else target
        b.copy_(a)
        return target

    return copy


def _copy_from_and_resize(stack: SimulatedDevices) -> Callable[..., Tensor]:
    copy = _copy_from(stack)

    def copy_and_resize(source: Tensor, target: Tensor) -> Tensor:
        target.resize_(source.shape)
        return copy(source, target)

    return copy_and_resize


def _resize(stack: SimulatedDevices) -> Callable[..., Tensor]:
    def resize(t: Tensor, size: Any, memory_format: torch.memory_format | None = None) -> Tensor:
        stack._note("resize_")
        if tuple(t.shape) == tuple(size):
            return t
        grown = torch.empty(tuple(size), dtype=t.dtype)
        kept = min(t.numel(), grown.numel())
        if kept:
            # `t` may have any strides; resize_ keeps the elements in row-major order for contiguous ones
            # only.
            grown.reshape(-1)[:kept] = _on_host(t).reshape(-1)[:kept]
        _take(t, _on_device(grown, t.device.index))
        return t

    return resize
