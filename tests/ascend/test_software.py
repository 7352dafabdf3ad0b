"""Which software an Ascend device needs: what goes together, what is missing, and the next step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hal import doctor
from hal.backends import ascend
from hal.backends.ascend import simulator, software
from hal.cli import app


@pytest.fixture(autouse=True)
def _cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)


def found(torch_version: str, torch_npu: str, cann: str | None = None) -> list[tuple[str, str]]:
    return [(c.what, c.wanted) for c in software.conflicts({"torch": torch_version, "torch_npu": torch_npu}, cann)]


@pytest.mark.parametrize(
    ("torch_version", "torch_npu", "cann"),
    [
        ("2.10.0+cpu", "2.10.0.post6", "9.1.0"),
        ("2.10.0", "2.10.0", "9.0.0"),
        ("2.12.0", "2.12.0", None),
        ("2.13.0+cpu", "2.13.0", "9.2.0"),
        ("2.13.0+cpu", "2.13.0", "8.5.1"),  # another line of CANN, which the vendor calls compatible
        ("2.15.0+cpu", "2.15.0", "9.9.9"),  # not in the table: nothing is known against it
        ("2.13.0+cpu", "2.13.0+gitabc", None),
        ("2.13.0", "2.13.0.dev20260901", None),
        ("2.10.0", "2.10.0.post5+gitabc", "9.1.1"),  # between two of the table: the line of CANN is known
        ("2.10.0", "2.10.0.post6+gitabc", "9.1.0"),
    ],
)
def test_versions_that_go_together(torch_version: str, torch_npu: str, cann: str | None) -> None:
    assert found(torch_version, torch_npu, cann) == []


def test_torch_npu_of_another_torch() -> None:
    assert found("2.13.0+cpu", "2.12.0.post2") == [("torch and torch_npu", "torch_npu built for this torch")]
    (conflict,) = software.conflicts({"torch": "2.10.0", "torch_npu": "2.11.0"}, None)
    assert "torch==2.11.0" in conflict.remedy and "2.10.0.post7" in conflict.remedy


def test_a_cuda_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert found("2.12.0", "2.12.0") == [("torch and torch_npu", "a CPU build of torch")]


@pytest.mark.parametrize("cann", ["8.3.RC1", "9.20.0"])
def test_cann_that_the_vendor_does_not_name_is_a_conflict_that_says_which_it_names(cann: str) -> None:
    (conflict,) = software.conflicts({"torch": "2.10.0", "torch_npu": "2.10.0.post6"}, cann)
    assert (conflict.found, conflict.wanted) == (f"torch_npu 2.10.0.post6, CANN {cann}", "CANN 9.1")
    assert conflict.remedy == "install CANN 9.1; the vendor names 8.5, 9.0, 9.1, 9.2 as compatible"


@pytest.mark.parametrize(
    ("torch_npu", "wanted"),
    [
        ("2.10.0.post6+gitabc", "CANN 9.1"),
        ("2.10.0.post5", "CANN 9.1, as for torch_npu 2.10.0.post4, the nearest whose is known"),
        ("2.10.0.post9", "CANN 9.2, as for torch_npu 2.10.0.post7, the nearest whose is known"),
        ("2.10.0.post2", "CANN 9.0, as for torch_npu 2.10.0, the nearest whose is known"),
    ],
)
def test_a_wheel_that_the_table_lacks_is_held_to_its_nearest(torch_npu: str, wanted: str) -> None:
    assert found("2.10.0", torch_npu, "8.3.RC1") == [("torch_npu and CANN", wanted)]


def test_the_table_says_where_it_is_from_and_only_pairs_equal_torches() -> None:
    for table in software.tables():
        assert table["source"].startswith("Ascend/pytorch, ") and table["read"]
    for row in software.releases():
        assert row.torch_npu.startswith(row.torch)


def test_the_table_has_every_torch_that_hal_supports_the_newest_first() -> None:
    low, high = (tuple(map(int, bound.split("."))) for bound in doctor.SUPPORTED["torch"])
    supported = {f"{major}.{minor}.0" for major, minor in ((low[0], n) for n in range(low[1], high[1]))}
    assert supported <= {row.torch for row in software.releases()}
    assert [row.torch_npu for row in software.releases_for("2.10.0+cu128")] == [
        "2.10.0.post7", "2.10.0.post6", "2.10.0.post4", "2.10.0",
    ]  # fmt: skip


def test_cann_is_read_from_the_toolkits_record(tmp_path: Path) -> None:
    assert software.cann_version("") is None
    assert software.cann_version(str(tmp_path)) is None
    (tmp_path / "x86_64-linux").mkdir()
    (tmp_path / "x86_64-linux" / "ascend_toolkit_install.info").write_text("package_name=toolkit\nversion=9.1.0\n")
    assert software.cann_version(str(tmp_path)) == "9.1.0"


def test_what_is_missing_comes_with_the_next_step() -> None:
    without = software.missing("2.12.0+cpu", None, None)
    assert without is not None and "torch_npu==2.12.0.post3" in without and "hal simulate ascend" in without
    unknown = software.missing("2.15.0", None, None)
    assert unknown is not None and "built for torch 2.15.0" in unknown
    no_cann = software.missing("2.12.0", "2.12.0", None)
    assert no_cann is not None and "set_env.sh" in no_cann
    assert software.missing("2.12.0", "2.12.0", None, simulated=True) is None
    assert software.missing("2.12.0", "2.12.0", "9.1.0") is None


def test_no_cann_is_a_conflict_but_for_libraries_and_the_simulator(tmp_path: Path) -> None:
    def told(torch_npu: str | None = "2.13.0", cann: str | None = None, home: str = "", simulated: bool = False) -> int:
        return len(list(software.without_cann(torch_npu, cann, home, simulated)))

    assert told() == told(home=str(tmp_path)) == 1
    assert told(torch_npu=None) == told(cann="9.1.0") == told(simulated=True) == 0
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libascendcl.so").touch()
    assert told(home=str(tmp_path)) == 0


def test_the_record_names_cann_and_says_where_it_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(torch_npu: dict[str, str], cann: str | None, simulated: bool = False) -> Mapping[str, str]:
        monkeypatch.setattr(software, "present", lambda: ({"torch": "2.10.0", **torch_npu}, cann))
        monkeypatch.setattr(simulator, "active", lambda: simulated)
        return ascend.hal_software()

    wheel = {"torch_npu": "2.10.0"}
    assert told({}, "9.0.0") == {}
    assert told(wheel, "9.0.0") == {"CANN": "9.0.0"}
    assert told(wheel, None) == {"CANN": "unknown"}
    monkeypatch.setenv("ASCEND_SIM_CANN", "8.3.RC1")
    assert told(wheel, "9.0.0", simulated=True) == {"CANN": "8.3.RC1 (simulated)"}


def test_doctor_says_how_to_set_cann_up_where_torch_npu_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = doctor.Package(
        name="torch_npu", module="torch_npu", status="broken", version="2.13.0", detail="ImportError: libhccl.so"
    )
    monkeypatch.setattr(doctor, "probe", lambda timeout_s: (broken,))
    monkeypatch.setattr(software, "present", lambda: ({"torch": "2.13.0", "torch_npu": "2.13.0"}, None))
    monkeypatch.setattr(simulator, "active", lambda: False)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    text = " ".join(done.output.split())
    assert "source /usr/local/Ascend/cann/set_env.sh" in text and "hal simulate ascend" in text
