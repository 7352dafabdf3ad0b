"""Without torch_npu there are no NPUs: nobody minds, but for who asked for the backend."""

from __future__ import annotations

import pytest

import hal
from hal.backends.ascend import devices
from hal.errors import DeviceError


@pytest.fixture(autouse=True)
def _no_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_torch_npu", lambda: None)
    monkeypatch.setattr(devices.software, "present", lambda: ({"torch": "2.10.0"}, None))


@pytest.mark.parametrize("backend", ["auto", "cpu", "portable:cpu"])
def test_there_is_no_device_and_no_error_where_another_backend_is_asked_for(backend: str) -> None:
    with hal.use(backend=backend):
        assert devices.present() == []


def test_who_asks_for_the_backend_is_told_what_is_missing_and_what_to_do() -> None:
    with hal.use(backend="ascend"), pytest.raises(DeviceError) as raised:
        devices.present()
    text = str(raised.value)
    assert "torch_npu is not installed" in text
    assert "pip install torch_npu==2.10.0" in text and "hal simulate ascend" in text
