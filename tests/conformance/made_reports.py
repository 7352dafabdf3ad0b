"""Reports made by hand for the tests of their forms."""

from __future__ import annotations

from datetime import date

from hal.conformance.report import (
    Accepts,
    Bounds,
    Environment,
    Finding,
    Offer,
    Report,
    Request,
    Result,
    Target,
    WaiverNote,
)

HOSTILE = (
    "<script>window.hacked = 1; alert(1)</script><img src=x onerror=alert(2)> & \"quoted\" 'single' ]]> --> | ` \u202e"
)

SOFTWARE = {"torch_chip": "2.13.0.post4", "toolkit": "9.1 (simulated)"}


def result(op="rms_norm", dtype="float32", implementation="aten", status="passed", **changes):
    """One result; `changes` replaces fields."""
    fields = {
        "case": f"{op}/{dtype}/T=7~0000", "op": op, "dtype": dtype, "implementation": implementation,
        "kind": "native", "status": status, "seed": 7, "share": 0.25, "seconds": 0.5,
        "repeat": f"hal conformance run --case '{op}/{dtype}/T=7~0000' --backend cpu --impl {implementation}",
    }  # fmt: skip
    return Result(**(fields | changes))


def offer(op="rms_norm", implementation="aten", **declares):
    """One implementation's declaration."""
    said = {"run_to_run": True, "batch_invariant": False, "u_p": {"bfloat16": 2.0**-9}, "copies": ("x",)} | declares
    accepts = Accepts(dtypes=("float32",), limits={"head_dim": Bounds(max=256, multiple_of=8)}, where="on Tuesdays")
    return Offer(op=op, implementation=implementation, kind="native", accepts=accepts, declares=said)


def report(*results, backend="cpu", descriptor="a CPU", complete=True, planned=None, **changes):
    """A report of these results."""
    fields = {
        "started": "2026-01-02T03:04:05+00:00", "seconds": 1.5, "complete": complete,
        "planned": len(results) if planned is None else planned,
        "request": Request(suite="quick"),
        "target": Target(backend=backend, device="cpu", descriptor=descriptor, simulated=False),
        "environment": Environment(
            hal="0.1.0", git_commit=None, git_dirty=None, torch="2.13.0", software=SOFTWARE, python="3.11.7",
            platform="Linux", numerics={"threads": "2"}, settings={"backend": backend},
        ),
        "offers": (offer(),),
        "results": results,
    }  # fmt: skip
    return Report(**(fields | changes))


def mixed():
    """Every status, two implementations, three dtypes, a failure with findings and one with a reason."""
    findings = (
        Finding(rule="R1", message="y[3,7] = 1.25, but should be 1.5 ± 0.01", result="y"),
        Finding(rule="R3", message="biased: 0.83, at most 0.41", result="y"),
    )
    return report(
        result(share=0.0), result(share=0.6, case="rms_norm/float32/T=9~1111"),
        result(dtype="bfloat16", status="failed", share=3.2, findings=findings),
        result(dtype="float16", implementation="reference", status="mistrusted", reasons=("zeros would pass",)),
        result("softmax", share=None),
        result("softmax", dtype="bfloat16", status="unsupported", share=None, reasons=("bfloat16 is not supported",)),
        result("softmax", dtype="float16", status="waived", share=1.5, reasons=("known",)),
        result("softmax", implementation="reference", status="skipped", share=None),
        missing=("linear",),
        waivers=(
            WaiverNote(case="softmax/*", reason="known", tracker="T-1", expires=date(2027, 1, 1), judged=1, failing=1),
        ),
    )  # fmt: skip


def hostile():
    """Markup wherever a report has text that others write."""
    return report(
        result(
            status="failed", case=f"rms_norm/float32/{HOSTILE}",
            implementation=HOSTILE, repeat=f"hal {HOSTILE}\nrm -rf x",
            findings=(Finding(rule="R1", message=HOSTILE),), reasons=(HOSTILE,),
        ),
        result(HOSTILE, HOSTILE, status="unsupported", reasons=(HOSTILE,)),
        descriptor=HOSTILE, backend=HOSTILE, missing=(HOSTILE,),
        offers=(offer(HOSTILE, HOSTILE, **{HOSTILE: True, "copies": (HOSTILE,)}),),
        waivers=(WaiverNote(case=HOSTILE, reason=HOSTILE, tracker="javascript:alert(1)", expires=date(2027, 1, 1)),),
        environment=Environment(
            hal=HOSTILE, git_commit=HOSTILE, git_dirty=True, torch=HOSTILE, python=HOSTILE, platform=HOSTILE,
            software={HOSTILE: HOSTILE}, numerics={HOSTILE: HOSTILE}, settings={HOSTILE: HOSTILE},
            plugin_failures=(HOSTILE,),
        ),
    )  # fmt: skip
