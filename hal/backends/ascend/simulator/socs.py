"""The chips that can be simulated: what torch_npu asks a device for, and what decides which rules hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ALIASES", "SOCS", "Family", "Soc"]

Family = Literal["310P", "A2", "A3", "950"]

MIB = 2**20


@dataclass(frozen=True)
class Soc:
    """A chip: its name in CANN, family, core counts and L2 (bytes; 0: not known, and so not reported).

    saturates: its arithmetic has no Inf and NaN; Inf becomes the greatest finite value and NaN becomes 0.
    """

    name: str
    family: Family
    cube_cores: int
    vector_cores: int
    l2: int = 0

    @property
    def saturates(self) -> bool:
        return self.family == "310P"

    @property
    def bfloat16(self) -> bool:
        return self.family != "310P"


# Core counts: the target tables of bishengir-compile; L2 of 910B2 and 910B4: CANN's public configuration files.
SOCS: dict[str, Soc] = {
    "310P3": Soc("Ascend310P3", "310P", 8, 7),
    "910B1": Soc("Ascend910B1", "A2", 24, 48),
    "910B2": Soc("Ascend910B2", "A2", 24, 48, 192 * MIB),
    "910B3": Soc("Ascend910B3", "A2", 20, 40),
    "910B4": Soc("Ascend910B4", "A2", 20, 40, 96 * MIB),
    "910_9362": Soc("Ascend910_9362", "A3", 20, 40),
    "910_9372": Soc("Ascend910_9372", "A3", 20, 40),
    "910_9381": Soc("Ascend910_9381", "A3", 24, 48),
    "910_9382": Soc("Ascend910_9382", "A3", 24, 48),
    "910_9391": Soc("Ascend910_9391", "A3", 24, 48),
    "910_9392": Soc("Ascend910_9392", "A3", 24, 48),
    "950PR_9579": Soc("Ascend950PR_9579", "950", 28, 56),
    "950PR_9589": Soc("Ascend950PR_9589", "950", 32, 64),
    "950PR_9599": Soc("Ascend950PR_9599", "950", 36, 72),
}
ALIASES = {"A2": "910B3", "A3": "910_9391", "950": "950PR_9589", "950PR": "950PR_9589"}
