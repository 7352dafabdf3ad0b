"""What the judge says: findings by rule, and the figures behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["passed", "failed", "mistrusted", "skipped", "unsupported", "waived"]
Rule = Literal["R1", "R2", "R3", "R4", "R5", "R6", "R8"]


@dataclass(frozen=True)
class Finding:
    """One broken rule; the message reads `y[3,7] = 1.25, but should be 1.5 ± 0.01 [case id]`."""

    rule: Rule
    message: str
    result: str = ""

    def to_dict(self) -> dict[str, str]:
        """For the JSON report."""
        return {"rule": self.rule, "message": self.message, "result": self.result}


@dataclass(frozen=True)
class Verdict:
    """The judgement of one case on one implementation.

    budget: the largest share of R1's budget used, max of (|y−Y| − u_out|Y| − ω)⁺ / (4E); above 1 is a failure,
        None where no element was judged by R1.
    c_max: the same maximum of (…)⁺ / E, so budget = c_max / 4.
    r2: RMSE(y, Y) over its limit; r3: |Σ sgn(Y)(y−Y)| / Σ|y−Y|; None where the rule does not apply.
    reasons: why it is unsupported, skipped or waived.
    """

    case_id: str
    op: str
    dtype: str
    implementation: str
    device: str
    status: Status
    findings: tuple[Finding, ...] = ()
    reasons: tuple[str, ...] = ()
    budget: float | None = None
    c_max: float | None = None
    r2: float | None = None
    r3: float | None = None
    rules: tuple[Rule, ...] = ()
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether a run with this verdict may count as a success."""
        return self.status in ("passed", "skipped", "unsupported", "waived")

    def to_dict(self) -> dict[str, Any]:
        """For the JSON report; infinite figures become the string "inf"."""
        figures = {name: getattr(self, name) for name in ("budget", "c_max", "r2", "r3")}
        return {
            "case": self.case_id,
            "op": self.op,
            "dtype": self.dtype,
            "implementation": self.implementation,
            "device": self.device,
            "status": self.status,
            "findings": [finding.to_dict() for finding in self.findings],
            "reasons": list(self.reasons),
            **{name: "inf" if value == float("inf") else value for name, value in figures.items()},
            "rules": list(self.rules),
            "seconds": self.seconds,
        }
