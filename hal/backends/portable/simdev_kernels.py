"""The kernels of the simulated device: ATen's CPU kernels on an alias of the same bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from hal.backends.portable.simdev import SimulatedDevices

__all__ = ["register"]

_DL_CPU, _DL_EXTENSION = 1, 12

# Kernels that touch metadata only: ATen's CPU ones work on any storage. The fallback would lose the shared one.
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
# Kernels whose result reaches the host, or has a shape that depends on values: the caller waits for the device.
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


def register(stack: SimulatedDevices) -> list[torch.library.Library]:
    """Give every ATen operator a kernel for the devices; the kernels live as long as the libraries returned."""
    every = torch.library.Library("_", "IMPL")
    every.fallback(_fallback(stack), "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in _METADATA_KERNELS:
        aten.impl(name, _metadata_kernel(name), "PrivateUse1")
    aten.impl("_copy_from", _copy_from(stack), "PrivateUse1")
    aten.impl("_copy_from_and_resize", _copy_from_and_resize(stack), "PrivateUse1")
    aten.impl("resize_", _resize(stack), "PrivateUse1")
    return [every, aten]


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
            raise NotImplementedError(f"{op.name()} has no kernel for {stack.device_name}; register one for it")
        stack._note(name)
        if name in _SYNCHRONISING or (name in _HOST_OPERANDS and _indexed_by_mask(args)):
            stack._note(name, "synchronisations")
        return _run_on_alias(stack, op, name, args, kwargs)

    return kernel


def _run_on_alias(stack: SimulatedDevices, op: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    # torch hands a number that stood for a tensor over as a number again; another overload takes it.
    callee = op.overloadpacket if _has_bare_number(op, host_args, host_kwargs) else op
    results = callee(*host_args, **host_kwargs)

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


def _has_bare_number(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a number stands where the schema says Tensor."""
    for position, argument in enumerate(op._schema.arguments):
        value = kwargs.get(argument.name, args[position] if position < len(args) else None)
        if isinstance(value, bool | int | float | complex) and isinstance(argument.type, torch.TensorType):
            return True
    return False


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
            # Contiguous tensors only: what resize_ keeps of others, torch leaves open.
            grown.reshape(-1)[:kept] = _on_host(t).reshape(-1)[:kept]
        _take(t, _on_device(grown, t.device.index))
        return t

    return resize
