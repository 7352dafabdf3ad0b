"""Bundles as files: written whole and the same bytes each time, read with suspicion.

Reading extracts nothing to disk, follows no name in the archive and executes nothing. A file that is not exactly a
bundle is refused with BundleError, and so is a bundle of a newer major version; what a newer minor version adds
(fields, members) is passed over.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from hal.conformance.bundle import MAJOR, Manifest
from hal.conformance.evidence import digest, unpack
from hal.errors import BundleError, FileError
from hal.files import write_whole

__all__ = ["MANIFEST_LIMIT", "Bundle", "read_bundle", "write_bundle"]

MANIFEST = "manifest.json"
MANIFEST_LIMIT = 64 << 20
"""Bytes of the manifest, unpacked; the full suite takes a few million."""
MEMBERS_LIMIT = 1 << 18
_TENSOR = re.compile(r"tensors/([0-9a-f]{64})\.safetensors")
_CHUNK = 1 << 20
# What zipfile raises for archives that are cut, overwritten, encrypted or packed in a way that it does not know.
_BROKEN = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, OSError, RuntimeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Bundle:
    """A manifest, and the stored results as safetensors by digest."""

    manifest: Manifest
    packed: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def tensor(self, wanted: str) -> Tensor | None:
        """The stored result of that digest, on the CPU; None where it is not stored."""
        return unpack(self.packed[wanted]) if wanted in self.packed else None


def write_bundle(bundle: Bundle, path: Path) -> None:
    """Write the bundle, whole or not at all. FileError where that is not possible."""
    buffer = io.BytesIO()
    text = json.dumps(bundle.manifest.model_dump(mode="json"), separators=(",", ":"), sort_keys=True)
    with zipfile.ZipFile(buffer, "w") as archive:
        _add(archive, MANIFEST, text.encode())
        for name, content in sorted(bundle.packed.items()):
            # not packed: so nothing but the manifest can unpack to more than the file's own size
            _add(archive, f"tensors/{name}.safetensors", content, zipfile.ZIP_STORED)
    write_whole(path, buffer.getvalue())


def read_bundle(path: Path) -> Bundle:
    """Read and check a bundle.

    Raises BundleError for what is no bundle, is damaged, or is of a newer version; FileError for a file that
    cannot be read at all.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError(f"{'a directory' if path.is_dir() else 'no plain file'}")
        with path.open("rb") as stream:
            return _read(stream)
    except _Refused as error:
        raise BundleError(f"{str(path)!r} {error}") from error.__cause__
    except OSError as error:
        raise FileError(
            f"cannot read the bundle {str(path)!r}: {error.strerror or error}. Name a file written by "
            "'hal conformance record'"
        ) from error


class _Refused(Exception):
    """Why a file is refused; the message goes on from the file's name."""


def _foreign(why: str) -> _Refused:
    return _Refused(f"is no bundle of a conformance run: {why}. Name a file written by 'hal conformance record'")


def _damaged(why: str) -> _Refused:
    return _Refused(f"is a damaged bundle: {why}. Copy it again from the machine that wrote it")


def _add(archive: zipfile.ZipFile, name: str, content: bytes, how: int = zipfile.ZIP_DEFLATED) -> None:
    # the default entry holds the time, and the system that wrote it
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    info.create_system = 3
    info.external_attr = 0o644 << 16
    info.compress_type = how
    archive.writestr(info, content, compresslevel=9)


def _read(stream: BinaryIO) -> Bundle:
    start = stream.read(4)
    if not start:
        raise _foreign("it is empty")
    try:
        with zipfile.ZipFile(stream) as archive:
            members = _members(archive)
            manifest = _manifest(_unpacked(archive, members[MANIFEST], MANIFEST_LIMIT))
            packed = {}
            for name, info in members.items():
                match = _TENSOR.fullmatch(name)
                if match is not None:
                    packed[match[1]] = _stored(archive, info)
    except _BROKEN as error:
        if start == b"PK\x03\x04":
            raise _damaged(f"{type(error).__name__}: {error}") from error
        raise _foreign(f"it is no zip archive ({error})") from error
    lost = set(manifest.stored) - set(packed)
    if lost:
        raise _damaged(f"{len(lost)} of the results that the manifest lists are not there")
    for name, data in packed.items():
        _check_tensor(name, data)
    return Bundle(manifest, packed)


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    infos = archive.infolist()
    if len(infos) > MEMBERS_LIMIT:
        raise _Refused(f"is refused: {len(infos)} members, and a bundle has at most {MEMBERS_LIMIT}")
    for info in infos:
        name = info.orig_filename
        parts = name.replace("\\", "/").split("/")
        if name != info.filename or "\\" in name or ":" in name or name.startswith("/") or ".." in parts:
            raise _Refused(f"is refused: the member name {name!r} points outside the archive; no bundle has such names")
    twice = [name for name, count in Counter(info.filename for info in infos).items() if count > 1]
    if twice:
        raise _Refused(
            f"is refused: the member {twice[0]!r} stands in it twice, so that what it says depends on who reads"
        )
    if MANIFEST not in archive.namelist():
        raise _foreign(f"the archive has no {MANIFEST}")
    return {info.filename: info for info in infos}


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> bytes:
    """A member's bytes. The limit holds for what comes out, whatever the header claims."""
    told = f"is refused: the member {info.filename!r} takes more than {limit} bytes"
    if info.file_size > limit:
        raise _Refused(told)
    pieces, size = [], 0
    with archive.open(info) as stream:
        while piece := stream.read(_CHUNK):
            size += len(piece)
            if size > limit:
                raise _Refused(told)
            pieces.append(piece)
    if size != info.file_size:
        raise _damaged(f"the member {info.filename!r} has {size} bytes instead of {info.file_size}")
    return b"".join(pieces)


def _stored(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise _damaged(f"the member {info.filename!r} is packed, and results never are")
    return _unpacked(archive, info, info.file_size)


class _Head(BaseModel):
    model_config = ConfigDict(extra="ignore")
    format: Literal["hal-conformance-bundle"]
    version: int


def _manifest(text: bytes) -> Manifest:
    try:
        head = _Head.model_validate_json(text)
    except ValidationError as error:
        raise _foreign(f"its {MANIFEST}: {_first(error)}") from error
    if head.version > MAJOR:
        raise _Refused(
            f"is a bundle of version {head.version}, and this hal reads up to {MAJOR}. Upgrade torch-hal to read it"
        )
    if head.version < 1:
        raise _foreign(f"its {MANIFEST} claims version {head.version}")
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        raise _damaged(f"its {MANIFEST}: {_first(error)}") from error


def _check_tensor(name: str, data: bytes) -> None:
    try:
        found = digest(unpack(data))
    except Exception as error:  # safetensors has no common base for its errors
        raise _damaged(f"the result {name[:12]}… does not read ({type(error).__name__}: {error})") from error
    if found != name:
        raise _damaged(f"the result {name[:12]}… holds other values than its digest says")


def _first(error: ValidationError) -> str:
    first: Any = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])
