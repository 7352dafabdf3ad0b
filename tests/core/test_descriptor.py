"""Descriptors, the data sheets that ship with hal, their audit, and what live devices answer."""

from __future__ import annotations

import copy
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from hal.descriptor import (
    DeviceDescriptor,
    Figure,
    TorchBuild,
    audit,
    cuda_flavour,
    describe,
    find,
    pick,
    sheets,
)
from hal.descriptor import live as live_module
from hal.descriptor.model import DTYPES, FEATURES, UNITS
from hal.descriptor.sheets import read
from hal.errors import DeviceError, FileError

VENDOR = {"source": "a data sheet", "date": "2024-05", "kind": "vendor"}
SOUND = {
    "vendor": "Maker",
    "name": "Chip 1",
    "aliases": ["Maker Chip-1 PCIe"],
    "memory": [{"name": "device", "size": [{"value": 80, "unit": "GB", **VENDOR}]}],
    "rates": [{"dtype": "bf16", "dense": [{"value": 100, "unit": "TFLOP/s", **VENDOR}]}],
    "features": {"bf16": [{"value": True, "unit": "flag", **VENDOR}]},
}


def figure(value=1.0, unit="GB", kind="vendor", **more):
    return Figure(value=value, unit=unit, source="s", date="2024", kind=kind, **more)


def damaged(change):
    data = copy.deepcopy(SOUND)
    change(data)
    return data


def test_a_sound_sheet_has_no_findings():
    assert audit([SOUND]) == []


DAMAGES = {
    "no source": (lambda d: d["memory"][0]["size"][0].pop("source"), "memory.0.size.0.source", "required"),
    "empty source": (lambda d: d["memory"][0]["size"][0].update(source=" "), "memory.0.size.0.source", "empty"),
    "no date": (lambda d: d["memory"][0]["size"][0].pop("date"), "memory.0.size.0.date", "required"),
    "impossible date": (lambda d: d["memory"][0]["size"][0].update(date="2024-13"), "memory.0.size.0.date", "YYYY"),
    "no class": (lambda d: d["rates"][0]["dense"][0].pop("kind"), "rates.0.dense.0.kind", "required"),
    "unknown class": (lambda d: d["rates"][0]["dense"][0].update(kind="rumour"), "rates.0.dense.0.kind", "'press'"),
    "unknown unit": (lambda d: d["memory"][0]["size"][0].update(unit="Gb"), "memory.0.size.0.unit", "unknown unit"),
    "unit of another kind": (lambda d: d["memory"][0]["size"][0].update(unit="GB/s"), "memory.0.size", "cannot"),
    "text for a number": (lambda d: d["memory"][0]["size"][0].update(value="80"), "memory.0.size.0", "does not fit"),
    "flag for a number": (lambda d: d["memory"][0]["size"][0].update(value=True), "memory.0.size.0", "does not fit"),
    "negative": (lambda d: d["memory"][0]["size"][0].update(value=-80), "memory.0.size.0", "negative"),
    "bare number": (lambda d: d["memory"][0].update(size=80), "memory.0.size", "tuple"),
    "unknown field": (lambda d: d.update(speed="fast"), "speed", "not permitted"),
    "unknown dtype": (lambda d: d["rates"][0].update(dtype="fp12"), "rates.0.dtype", "unknown rate"),
    "unknown feature": (lambda d: d["features"].update(magic=d["features"]["bf16"]), "", "unknown feature 'magic'"),
    "rate given twice": (lambda d: d["rates"].append(d["rates"][0]), "", "rate named twice"),
    "figure given twice": (lambda d: d["rates"][0]["dense"].extend(d["rates"][0]["dense"]), "rates.0.dense", "twice"),
    "no figure at all": (lambda d: [d.pop(k) for k in ("memory", "rates", "features")], "", "no figure"),
    "family without a sheet": (lambda d: d.update(family="Chip 0"), "family", "no sheet of the family"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "where", "problem"), DAMAGES.values(), ids=DAMAGES.keys())
def test_audit_finds_each_damage_and_says_where(change, where, problem):
    findings = audit([damaged(change)])
    assert [f.sheet for f in findings] == ["Chip 1"] * len(findings)
    assert any(f.where == where and problem in f.problem for f in findings), findings


def test_audit_finds_two_chips_of_one_name_and_a_shared_alias():
    other = damaged(lambda d: d.update(name="chip-1", aliases=[]))
    assert any("shares the name" in f.problem for f in audit([SOUND, other]))
    other = damaged(lambda d: d.update(name="Chip 2"))
    assert any("makerchip1pcie" in f.problem for f in audit([SOUND, other]))


def test_audit_reports_a_broken_file_and_goes_on(tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text(json.dumps(damaged(lambda d: d["rates"][0]["dense"][0].pop("date"))))
    (tmp_path / "c.json").write_bytes(b"\xff\xfe\x00")
    findings = audit([tmp_path / name for name in ("a.json", "b.json", "c.json", "none.json")])
    assert {f.sheet for f in findings} == {"a.json", "b.json", "c.json", "none.json"}


def test_reading_a_damaged_sheet_is_a_typed_error_that_names_file_and_fault(tmp_path):
    path = tmp_path / "chip.json"
    path.write_text(json.dumps(damaged(lambda d: d["rates"][0]["dense"][0].pop("source"))))
    with pytest.raises(FileError, match=r"chip\.json.*rates\.0\.dense\.0\.source"):
        read(path)
    with pytest.raises(FileError, match="cannot be read"):
        read(tmp_path / "missing.json")


def test_the_sheets_that_ship_are_sound():
    assert audit() == []


CHIPS = [
    "NVIDIA A100 40GB", "NVIDIA A100 80GB", "NVIDIA H100 SXM", "NVIDIA H200 SXM", "NVIDIA H20", "Huawei Ascend 310",
    "Huawei Ascend 310P3", "Huawei Ascend 610", "Huawei Ascend 910B", "Ascend910B1", "Ascend910B2", "Ascend910B2C",
    "Ascend910B3", "Ascend910B4", "Ascend910B4-1", "Ascend 910C", "Ascend910_9362", "Ascend910_9392",
    "Ascend950PR_9589", "Ascend950DT_9595", "Ascend 960", "Ascend 970", "Baidu Kunlun P800", "Hygon DCU Shensuan 1",
    "Hygon DCU Shensuan 2", "Hygon DCU BW1000", "Iluvatar Tiangang 100", "Iluvatar Tiangang 150",
    "Iluvatar Zhikai 50", "Iluvatar Zhikai 100", "Iluvatar Zhikai 150", "MetaX C500", "MetaX C600", "MetaX C700",
    "Moore Threads S5000", "T-Head Zhenwu PPU", "Google TPU",
]  # fmt: skip


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_has_a_sheet(name):
    assert find(name) is not None


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("Ascend910B3", "Ascend 910B3"),
        ("Ascend950PR_957c", "Ascend 950PR (28 cube cores)"),
        ("MTT S5000", "S5000"),
    ],
)
def test_find_knows_the_names_that_torch_reports(reported, name):
    assert find(reported).name == name


@pytest.mark.parametrize("name", ["", "NVIDIA", "NVIDIA H100 PCIe", "Ascend910", "H2"])
def test_find_does_not_guess(name):
    assert find(name) is None


def test_figures_of_known_chips():
    h200 = find("NVIDIA H200")
    assert h200.peak("bf16") == 989.4e12
    assert h200.peak("bf16", sparse=True) == 1979e12
    assert h200.bandwidth == 4800e9
    assert h200.memory_bytes == 141e9
    assert h200.units("SM") == 132
    assert h200.peak("int4") is None
    assert {f.kind for f in h200.level("L2").size} == {"press", "measured"}
    b4 = find("Ascend910B4")
    assert (b4.units("cube core"), b4.units("vector core")) == (20, 40)
    assert b4.memory_bytes == 32 * 2**30
    assert b4.level("UB").size[0].number == 192 * 2**10
    assert b4.bandwidth is None
    assert find("Ascend310P3").feature("inf_nan") == "saturate"


def test_conflicting_figures_stand_side_by_side():
    values = {f.value for rate in find("Ascend 910C").rates for f in rate.dense}
    assert values == {800, 752}


def test_nothing_unknown_is_filled_in():
    c500 = find("MetaX C500")
    assert (c500.memory_bytes, c500.bandwidth, c500.rates, c500.power) == (None, None, (), ())


def test_every_unit_rate_and_feature_in_the_tables_is_reachable():
    used = {f["unit"] for sheet in sheets() for f in figures(sheet.to_json())}
    assert used <= set(UNITS)
    assert {r.dtype for s in sheets() for r in s.rates} <= set(DTYPES)
    assert {name for s in sheets() for name in s.features} <= set(FEATURES)


def figures(data):
    if isinstance(data, dict):
        if "unit" in data:
            yield data
        data = list(data.values())
    if isinstance(data, list):
        for item in data:
            yield from figures(item)


def test_a_descriptor_survives_json_and_pickle_and_cannot_be_changed():
    for sheet in sheets():
        assert DeviceDescriptor.model_validate(json.loads(json.dumps(sheet.to_json()))) == sheet
    assert pickle.loads(pickle.dumps(sheet)) == sheet
    with pytest.raises(ValidationError):
        sheet.name = "other"


def test_figures_convert_to_base_units():
    assert figure(2, "TB/s").number == 2e12
    assert figure(1, "KiB").number == 1024
    assert figure(3, "TOP/s").number == 3e12
    with pytest.raises(TypeError):
        _ = figure("HBM3", "text").number


def test_pick_prefers_the_vendor_and_takes_the_order_it_is_given():
    press, measured, vendor = (figure(v, kind=k) for v, k in ((1, "press"), (2, "measured"), (3, "vendor")))
    assert pick((press, measured, vendor)) is vendor
    assert pick((press, measured)) is measured
    assert pick((vendor, measured), ("measured", "vendor", "press")) is measured
    assert pick(()) is None


FLAVOURS = [
    ("NVIDIA H200", "2.13.0", "13.0", None, "nvidia"),
    ("Tesla V100-SXM2-32GB", "2.10.0", "12.6", None, "nvidia"),
    ("A100-SXM4-40GB", "2.10.0", "12.6", None, "nvidia"),
    ("AMD Instinct MI300X", "2.13.0+rocm7.0", None, "7.0", "hip"),
    ("BW1000", "2.10.0+das", None, "6.3", "hip"),
    ("MetaX C500", "2.10.0+metax3.3", "11.6", None, "cuda-like"),
    ("Iluvatar BI-V150", "2.10.0+corex", "10.2", None, "cuda-like"),
    ("PPU-ZW810E", "2.10.0", "12.6", None, "cuda-like"),
    ("", "2.13.0", "13.0", None, "cuda-like"),
    ("Not NVIDIA", "2.13.0", "13.0", None, "cuda-like"),
]


@pytest.mark.parametrize(("name", "version", "cuda", "hip", "flavour"), FLAVOURS)
def test_flavour_of_what_answers_to_torch_cuda(name, version, cuda, hip, flavour):
    assert cuda_flavour(name, TorchBuild(version, cuda, hip)) == flavour


def test_the_current_build_is_read_from_torch():
    assert TorchBuild.current() == TorchBuild(str(torch.__version__), torch.version.cuda, torch.version.hip)


def test_the_cpu_answers_for_itself():
    cpu = describe("cpu")
    assert (cpu.torch_device, cpu.device, cpu.simulated) == ("cpu", "cpu", False)
    assert cpu.name
    assert cpu.memory_bytes > 2**20
    assert cpu.units("hardware thread") >= 1
    assert all(f["source"] and f["kind"] == "measured" for f in figures(cpu.to_json()))
    assert audit([cpu]) == []


@pytest.mark.parametrize("device", ["quantum", "cuda:99", "meta"])
def test_a_device_that_is_not_here_is_a_typed_error(device):
    with pytest.raises(DeviceError, match=r"asked for|is no device"):
        describe(device)


class H200Properties(SimpleNamespace):
    name = "NVIDIA H200"
    major, minor = 9, 0
    total_memory = 150_109_880_320
    multi_processor_count = 132
    L2_cache_size = 62_914_560
    warp_size = 32
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_multiprocessor = 233_472


@pytest.fixture
def fake_cuda(monkeypatch):
    def show(properties, build):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: properties)
        monkeypatch.setattr(live_module, "_bf16_on", lambda where: True)
        monkeypatch.setattr(live_module, "cuda_flavour", lambda name: cuda_flavour(name, build))

    return show


def test_a_live_cuda_device_is_merged_with_its_sheet(fake_cuda):
    fake_cuda(H200Properties(), TorchBuild("2.13.0", "13.0"))
    found = describe("cuda")
    assert (found.device, found.vendor, found.flavour, found.architecture) == (
        "cuda:1",
        "NVIDIA",
        "nvidia",
        "sm_90",
    )
    assert found.memory_bytes == 150_109_880_320
    assert [f.value for f in found.level("device").size] == [150_109_880_320, 141]
    assert found.peak("bf16") == 989.4e12
    assert found.bandwidth == 4800e9
    assert found.units("SM") == 132
    assert [f.kind for f in found.compute[0].count] == ["measured", "vendor"]
    assert audit([found]) == []


def test_an_unknown_cuda_like_chip_is_described_by_what_it_answers_alone(fake_cuda):
    properties = SimpleNamespace(name="Newcomer X1", major=8, minor=0, total_memory=2**35, multi_processor_count=60)
    fake_cuda(properties, TorchBuild("2.13.0", "11.6"))
    found = describe("cuda:0")
    assert (found.flavour, found.vendor, found.memory_bytes) == ("cuda-like", "Newcomer", 2**35)
    assert (found.peak("bf16"), found.warp, found.resident_warps) == (None, (), ())


def test_a_known_cuda_like_chip_takes_its_makers_name_from_the_sheet(fake_cuda):
    properties = SimpleNamespace(name="MetaX C500", major=8, minor=0, total_memory=2**36)
    fake_cuda(properties, TorchBuild("2.10.0+metax", "11.6"))
    found = describe("cuda:0")
    assert (found.vendor, found.flavour, found.feature("comparable_to")) == ("MetaX", "cuda-like", "A100")


def test_an_ascend_device_is_merged_with_its_bin_and_family(monkeypatch):
    module = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda i: None,
        get_device_name=lambda i: "Ascend910B4",
        get_device_properties=lambda i: SimpleNamespace(
            total_memory=31 * 2**30, cube_core_num=20, vector_core_num=40, L2_cache_size=96 * 2**20
        ),
        get_soc_version=lambda: 223,
    )
    monkeypatch.setattr(live_module, "_module", lambda device_type: module)
    found = live_module._merge(live_module._npu(SimpleNamespace(type="npu", index=0)), find("Ascend910B4"))
    assert (found.vendor, found.family, found.feature("bf16")) == ("Huawei", "Ascend 910B", True)
    assert found.memory_bytes == 31 * 2**30
    assert [f.unit for f in found.level("device").size] == ["B", "GiB", "GB", "GB"]
    assert found.peak("fp16") == 280e12
    assert found.level("L0C").size[0].number == 128 * 2**10
