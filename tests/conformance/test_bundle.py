"""Bundle files: what they hold, that they are the same each time, and everything that is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import tarfile
import zipfile

import pytest
import torch

from hal.conformance import archive, bundle, evidence, record, runner
from hal.conformance.archive import Bundle, read_bundle, write_bundle
from hal.conformance.bundle import Manifest
from hal.conformance.case import cases, find
from hal.conformance.site import Site
from hal.errors import BundleError, FileError, HalError

# Written by version 1.0 of the format. Never change it: it stands for the bundles that people have.
FIRST = {
    "format": "hal-conformance-bundle",
    "version": 1,
    "minor": 0,
    "recorded": {"started": "2026-01-02T03:04:05+00:00", "seconds": 1.5},
    "complete": True,
    "planned": 1,
    "request": {"suite": "quick", "ops": ["rms_norm"], "implementations": [], "cases": []},
    "target": {"backend": "portable:cuda", "device": "cuda:0", "descriptor": "NVIDIA H200", "simulated": False},
    "environment": {
        "hal": "0.2.0", "git_commit": None, "git_dirty": None, "torch": "2.11.0", "python": "3.12.3",
        "platform": "Linux", "numerics": {"threads": "2"}, "settings": {"backend": "auto"}, "plugin_failures": [],
    },
    "device": {"vendor": "NVIDIA", "name": "NVIDIA H200"},
    "missing": [],
    "stored": [],
    "cases": [
        {
            "id": "rms_norm/float32/T=7~abcd", "op": "rms_norm", "dtype": "float32", "seed": 1, "tags": ["grid"],
            "inputs": "0" * 64,
            "verdicts": [
                {
                    "implementation": "composed", "kind": "composed", "status": "failed", "share": "Infinity",
                    "r2": "NaN", "r3": None,
                    "findings": [{"rule": "R1", "message": "y[0] = 1, but should be 2", "result": "y"}],
                    "reasons": [],
                    "outputs": [{"name": "y", "dtype": "float32", "shape": [7, 576], "digest": "1" * 64}],
                }
            ],
        }
    ],
}  # fmt: skip


def some_ids(op="rms_norm", dtype="float32", count=2):
    return tuple(case.id for case in cases(op) if case.dtype == dtype and case.tags == {"grid"})[:count]


def recorded(tensors="none", ids=None):
    what = runner.plan(Site.of("cpu"), implementations=("reference",), case_ids=ids or some_ids())
    return record.record(what, tensors=tensors)[1]


@pytest.fixture(scope="module")
def made():
    return recorded("all")


@pytest.fixture
def good(made, tmp_path):
    path = tmp_path / "run.hal"
    write_bundle(made, path)
    return path


def zipped(path, members, how=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", how) as file:
        for name, content in members:
            file.writestr(name, content)
    return path


def changed(**fields):
    return json.dumps(FIRST | fields)


def told(path):
    with pytest.raises(BundleError) as refusal:
        read_bundle(path)
    assert str(path) in str(refusal.value)
    assert isinstance(refusal.value, HalError) and isinstance(refusal.value, ValueError)
    return str(refusal.value)


def test_a_bundle_reads_back_equal(made, good):
    found = read_bundle(good)
    assert found.manifest == made.manifest
    assert found.packed == made.packed


def test_a_bundle_says_what_ran_where_and_how_it_went(made):
    told = made.manifest
    assert (told.format, told.version) == ("hal-conformance-bundle", 1)
    assert told.target.backend == "cpu"
    assert told.environment.torch == torch.__version__
    assert "threads" in told.environment.numerics
    assert told.device["torch_device"] == "cpu"
    assert [case.id for case in told.cases] == list(some_ids())
    for case in told.cases:
        assert case.seed == find(case.id).seed
        (verdict,) = case.verdicts
        assert (verdict.implementation, verdict.status) == ("reference", "passed")
        assert verdict.share is not None
        assert [output.name for output in verdict.outputs] == ["y"]


def test_the_digest_of_a_result_is_that_of_the_op_called_plainly(made):
    import hal.ops

    case = find(some_ids()[0])
    with hal.use(backend="cpu", impl="rms_norm=reference"):
        y = hal.ops.rms_norm(**case.build("cpu").args)
    (output,) = made.manifest.cases[0].verdicts[0].outputs
    assert evidence.digest(y) == output.digest
    assert tuple(y.shape) == output.shape
    assert torch.equal(made.tensor(output.digest), y)


def test_a_digest_is_over_dtype_shape_and_bytes_of_the_contiguous_tensor():
    t = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    plain = b"int16[2, 3]\n" + bytes([0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0])
    assert evidence.digest(t) == hashlib.sha256(plain).hexdigest()
    assert evidence.digest(t.t().contiguous().t()) == evidence.digest(t)
    others = (t.flatten(), t.view(torch.float16), t.view(torch.bfloat16), t.t(), t + 1)
    assert len({evidence.digest(t), *map(evidence.digest, others)}) == 6


@pytest.mark.parametrize(
    "t", [torch.empty(0, 3), torch.tensor(1.5), torch.ones(2, dtype=torch.bool), torch.ones(3).to(torch.float8_e5m2)]
)
def test_digests_and_storage_take_any_tensor_that_an_op_returns(t):
    back = evidence.unpack(evidence.pack(t))
    assert (back.dtype, back.shape) == (t.dtype, t.shape)
    assert evidence.digest(back) == evidence.digest(t)


def test_inputs_have_one_digest_per_case_which_sees_every_bit(monkeypatch):
    case = find(some_ids()[0])
    assert evidence.inputs_digest(case) == evidence.inputs_digest(find(case.id))
    spoilt = case.build("cpu")
    spoilt.args["x"].view(torch.int32)[0, 0] ^= 1
    before = evidence.inputs_digest(case)
    monkeypatch.setattr(type(case), "build", lambda self, device: spoilt)
    assert evidence.inputs_digest(case) != before


def test_bad_input_and_refusals_have_no_results():
    bad = next(case.id for case in cases("rms_norm") if case.bad_input)
    (case,) = recorded(ids=(bad,)).manifest.cases
    assert case.verdicts[0].status == "passed"
    assert case.verdicts[0].outputs == ()


def test_ops_that_write_their_arguments_have_those_for_results():
    (case,) = recorded(ids=some_ids("write_kv_cache", count=1)).manifest.cases
    assert {output.name for output in case.verdicts[0].outputs} == {"k_cache", "v_cache"}


@pytest.mark.parametrize(("tensors", "stored"), [("none", 0), ("failures", 0), ("all", 2)])
def test_results_are_stored_only_where_asked_for(tensors, stored):
    assert len(recorded(tensors).packed) == stored


def test_a_failure_is_stored_and_what_passed_is_not(registered):
    registered("y = y * 1.01")
    what = runner.plan(Site.of("cpu"), implementations=("reference", "throwaway"), case_ids=some_ids(count=1))
    _, made = record.record(what, tensors="failures")
    by_name = {verdict.implementation: verdict for verdict in made.manifest.cases[0].verdicts}
    assert by_name["throwaway"].status == "failed"
    assert set(made.packed) == {output.digest for output in by_name["throwaway"].outputs}


def test_the_same_run_twice_gives_the_same_bytes_but_for_the_clock(made, tmp_path):
    again = recorded("all")
    clock = {"recorded": made.manifest.recorded}
    write_bundle(made, tmp_path / "a.hal")
    write_bundle(dataclasses.replace(again, manifest=again.manifest.model_copy(update=clock)), tmp_path / "b.hal")
    assert (tmp_path / "a.hal").read_bytes() == (tmp_path / "b.hal").read_bytes()


def test_workers_gather_what_one_process_gathers():
    what = runner.plan(Site.of("cpu"), implementations=("reference",), case_ids=some_ids())
    alone, shared = (record.record(what, workers)[1].manifest for workers in (0, 2))
    assert alone.cases == shared.cases


def test_a_write_that_fails_leaves_the_old_file(made, tmp_path, monkeypatch):
    path = tmp_path / "run.hal"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="No space left"):
        write_bundle(made, path)
    assert [found.name for found in tmp_path.iterdir()] == ["run.hal"]
    assert path.read_text() == "old"


def test_bundles_of_the_first_version_stay_readable(tmp_path):
    manifest = read_bundle(zipped(tmp_path / "first.hal", [("manifest.json", json.dumps(FIRST))])).manifest
    (verdict,) = manifest.cases[0].verdicts
    assert verdict.share == float("inf") and verdict.r2 != verdict.r2
    assert verdict.why == ("R1: y[0] = 1, but should be 2",)
    assert json.loads(manifest.model_dump_json()).keys() >= FIRST.keys()


def test_what_a_later_minor_version_adds_is_passed_over(tmp_path):
    later = json.loads(json.dumps(FIRST))
    later |= {"minor": 7, "weather": "fine"}
    for part in ("request", "target", "environment", "recorded"):
        later[part]["more"] = [1]
    later["cases"][0]["more"] = later["cases"][0]["verdicts"][0]["more"] = {}
    later["cases"][0]["verdicts"][0]["outputs"][0]["more"] = later["cases"][0]["verdicts"][0]["findings"][0]["more"] = 1
    path = zipped(tmp_path / "later.hal", [("manifest.json", json.dumps(later)), ("notes/more.txt", "hello")])
    want = Manifest.model_validate(FIRST | {"minor": 7})
    assert read_bundle(path).manifest.model_dump_json() == want.model_dump_json()


def test_a_newer_version_is_refused_with_what_to_do(tmp_path):
    said = told(zipped(tmp_path / "new.hal", [("manifest.json", changed(version=2))]))
    assert "version 2" in said and "reads up to 1" in said and "Upgrade" in said


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"hello\n", "no zip archive"),
        (b'{"format": "hal-conformance-report", "version": 1}', "no zip archive"),
        (b"PK\x05\x06" + bytes(18), "no manifest.json"),
    ],
    ids=["empty", "text", "a report", "an empty zip"],
)
def test_what_is_no_bundle_is_refused(tmp_path, content, word):
    path = tmp_path / "x.hal"
    path.write_bytes(content)
    assert word in told(path)


def test_a_tar_is_refused(tmp_path):
    path = tmp_path / "x.hal"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("manifest.json")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"{}"))
    assert "no zip archive" in told(path)


@pytest.mark.parametrize(
    ("members", "word"),
    [
        ([("a.py", "x")], "no manifest.json"),
        ([("manifest.json", "{}")], "format"),
        ([("manifest.json", '{"manifest_version": 3, "name": "a browser extension"}')], "format"),
        ([("manifest.json", "not json")], "Invalid JSON"),
        ([("manifest.json", b"\xff\xfe")], "is no bundle"),
        ([("manifest.json", "[" * 100_000)], "is no bundle"),
        ([("manifest.json", changed(version=0))], "version 0"),
        ([("manifest.json", changed(version="one"))], "version"),
    ],
)
def test_another_zip_is_refused(tmp_path, members, word):
    assert word in told(zipped(tmp_path / "x.hal", members))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"cases": None}, "cases"),
        ({"cases": FIRST["cases"] * 2}, "twice"),
        ({"cases": [FIRST["cases"][0] | {"verdicts": FIRST["cases"][0]["verdicts"] * 2}]}, "twice"),
        ({"cases": [FIRST["cases"][0] | {"inputs": "../../etc/passwd"}]}, "inputs"),
        ({"cases": [FIRST["cases"][0] | {"verdicts": [{"status": "fine"}]}]}, "verdicts"),
        ({"target": {}}, "target.backend"),
        ({"stored": ["2" * 64]}, "not there"),
    ],
)  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_a_damaged_bundle(tmp_path, fields, word):
    said = told(zipped(tmp_path / "x.hal", [("manifest.json", changed(**fields))]))
    assert "damaged" in said and word in said


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd", "../up", "tensors/../../up", "a/..", "..", "\\\\host\\share", "..\\up", "C:\\x", "c:x", "a\0.py",
    ],
)  # fmt: skip
def test_member_names_that_point_outside_are_refused(tmp_path, name):
    path = tmp_path / "x.hal"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("manifest.json", json.dumps(FIRST))
        info = zipfile.ZipInfo("placeholder")
        info.filename = name  # the constructor would clean it
        file.writestr(info, "x")
    assert "refused" in told(path) or "damaged" in told(path)
    assert not (tmp_path.parent / "up").exists()


def test_a_member_that_stands_there_twice_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"):
        path = zipped(tmp_path / "x.hal", [("manifest.json", json.dumps(FIRST)), ("manifest.json", changed(minor=1))])
    assert "twice" in told(path)


def test_an_oversized_manifest_is_refused_before_it_is_unpacked(tmp_path):
    path = zipped(tmp_path / "x.hal", [("manifest.json", b" " * (archive.MANIFEST_LIMIT + 1))])
    assert path.stat().st_size < 1 << 20
    assert "more than" in told(path)


def test_a_header_that_lies_about_the_size_does_not_get_round_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MANIFEST_LIMIT", 1000)
    content = b" " * 5000 + json.dumps(FIRST).encode()
    path = zipped(tmp_path / "x.hal", [("manifest.json", content)])
    size = len(content).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(size, (500).to_bytes(4, "little")))
    assert "refused" in told(path) or "damaged" in told(path)


def test_too_many_members_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MEMBERS_LIMIT", 3)
    members = [("manifest.json", json.dumps(FIRST)), *((f"{i}", "") for i in range(3))]
    assert "4 members" in told(zipped(tmp_path / "x.hal", members))


def test_an_encrypted_member_is_refused(good):
    content = bytearray(good.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + offset] |= 1
    good.write_bytes(content)
    assert "damaged" in told(good)


def test_packed_results_are_refused_so_that_nothing_small_becomes_large(made, tmp_path):
    members = [("manifest.json", made.manifest.model_dump_json())]
    members += [(f"tensors/{name}.safetensors", data) for name, data in made.packed.items()]
    assert "packed" in told(zipped(tmp_path / "x.hal", members))


@pytest.mark.parametrize("damage", ["other values", "no safetensors", "lost"])
def test_a_stored_result_that_is_not_what_its_digest_says_is_damage(made, tmp_path, damage):
    packed = dict(made.packed)
    name = min(packed)
    if damage == "other values":
        packed[name] = evidence.pack(evidence.unpack(packed[name]) + 1)
    elif damage == "no safetensors":
        packed[name] = b"import os"
    else:
        del packed[name]
    write_bundle(Bundle(made.manifest, packed), tmp_path / "x.hal")
    assert "damaged" in told(tmp_path / "x.hal")


def small(path):
    """A whole bundle of about a kilobyte, with a stored result."""
    t = torch.tensor([1.0, 2.0])
    fields = json.loads(json.dumps(FIRST))
    fields["stored"] = [evidence.digest(t)]
    manifest = bundle.Manifest.model_validate(fields)
    write_bundle(Bundle(manifest, {evidence.digest(t): evidence.pack(t)}), path)
    return path.read_bytes()


def test_a_bundle_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "x.hal"
    whole = small(path)
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        told(path)


def test_a_bundle_with_any_byte_changed_is_refused_or_says_the_same(tmp_path):
    path = tmp_path / "x.hal"
    whole = small(path)
    want = read_bundle(path)
    refused = 0
    for at in range(len(whole)):
        content = bytearray(whole)
        content[at] ^= 0xA5
        path.write_bytes(content)
        try:
            found = read_bundle(path)
        except BundleError:
            refused += 1
        else:
            # dates and modes of members mean nothing to a bundle
            assert found.manifest.model_dump_json() == want.manifest.model_dump_json()
            assert found.packed == want.packed
    assert refused > len(whole) * 0.8


@pytest.mark.parametrize("name", ["absent.hal", "."])
def test_a_file_that_cannot_be_read_is_a_file_error(tmp_path, name):
    with pytest.raises(FileError, match="cannot read the bundle"):
        read_bundle(tmp_path / name)


def test_a_device_is_not_read_without_end():
    from pathlib import Path

    with pytest.raises(FileError, match="no plain file"):
        read_bundle(Path("/dev/zero"))


def test_the_parts_of_a_bundle_cannot_run_code(tmp_path):
    import pickle

    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    trap = pickle.dumps(Trap())
    fields = json.loads(json.dumps(FIRST)) | {"stored": ["3" * 64]}
    path = zipped(
        tmp_path / "x.hal",
        [("manifest.json", json.dumps(fields)), (f"tensors/{'3' * 64}.safetensors", trap), ("data.pkl", trap)],
        zipfile.ZIP_STORED,
    )
    assert "damaged" in told(path)
    assert not (tmp_path / "sprung").exists()
