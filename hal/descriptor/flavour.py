"""Whose chip answers to torch.cuda: NVIDIA's, a HIP one, or one that imitates CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Flavour", "TorchBuild", "cuda_flavour"]

Flavour = Literal["nvidia", "hip", "cuda-like"]

# Drivers since 2021 say "NVIDIA …"; the others are names of older boards, virtual GPUs and Jetson modules.
_NVIDIA = (
    "nvidia", "tesla ", "geforce ", "quadro ", "titan ", "grid ",
    "a100-", "a30-", "a40-", "orin", "xavier", "thor",
)  # fmt: skip


@dataclass(frozen=True)
class TorchBuild:
    """What a torch build says of itself: its version, and the CUDA or HIP release it was compiled for."""

    version: str
    cuda: str | None = None
    hip: str | None = None

    @classmethod
    def current(cls) -> TorchBuild:
        import torch

        return cls(str(torch.__version__), torch.version.cuda, torch.version.hip)


def cuda_flavour(device_name: str, build: TorchBuild | None = None) -> Flavour:
    """The flavour of a device that torch calls cuda, by its name and torch's build (this process's).

    HIP builds (AMD, Hygon) say so themselves. MetaX, Iluvatar and T-Head present themselves as CUDA, so a
    device counts as NVIDIA only if its name is one of NVIDIA's: an unknown name is "cuda-like", which no
    CUDA kernel of hal's claims.
    """
    build = TorchBuild.current() if build is None else build
    if build.hip is not None:
        return "hip"
    return "nvidia" if device_name.strip().lower().startswith(_NVIDIA) else "cuda-like"
