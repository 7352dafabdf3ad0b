"""Settings: sources and their order, values that mean nothing, unknown names, booleans, no stale state."""

from __future__ import annotations

import logging
import os
import pickle
import threading

import pytest
import torch

import hal
from hal import settings
from hal.errors import ConfigError, FileError, HalError


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No HAL_* variable from outside; every test may be the first to warn."""
    for name in list(os.environ):
        if name.startswith("HAL_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setattr(settings, "_typed", {})


def call():
    return hal.ops.rms_norm(torch.ones(1, 4))


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (v, r"auto, .*cpu, .*portable:<torch device>")
        for v in ("tritn", "CPU", "cpu ", " ", "none-such", "0", "reference")
    ]
    + [
        ("portable", "portable:cpu"),
        ("cpu:0", "write cpu"),
        ("portable:nonsense", "nonsense"),
        ("portable:", "portable:cpu"),
    ],
)
def test_a_backend_that_means_nothing_is_an_error(monkeypatch, value, match):
    """vllm-project/vllm#22217, #50292: an unknown value quietly selects the default."""
    monkeypatch.setenv("HAL_BACKEND", value)
    with pytest.raises(ConfigError, match=match):
        call()


def test_the_error_for_an_unknown_backend_lists_the_legal_names_and_the_nearest(monkeypatch):
    monkeypatch.setenv("HAL_BACKEND", "cpuu")
    with pytest.raises(ConfigError, match=r"auto, .*cpu, .*did you mean 'cpu'"):
        call()


def test_a_backend_for_other_devices_is_an_error_and_no_fallback(monkeypatch):
    monkeypatch.setenv("HAL_BACKEND", "portable:cuda")
    with pytest.raises(HalError, match="cpu"):
        call()


def test_values_are_read_anew_when_they_change(monkeypatch):
    """vllm-project/vllm#22217: no cache may outlive a change of the variable."""
    call()
    monkeypatch.setenv("HAL_BACKEND", "tritn")
    with pytest.raises(ConfigError):
        call()
    monkeypatch.setenv("HAL_BACKEND", "cpu")
    assert call().tolist() == [[pytest.approx(1.0)] * 4]
    monkeypatch.setenv("HAL_IMPL", "rms_norm=none-such")
    with pytest.raises(ConfigError, match="none-such"):
        call()
    monkeypatch.setenv("HAL_IMPL", "rms_norm=reference")
    call()
    monkeypatch.delenv("HAL_BACKEND")
    monkeypatch.delenv("HAL_IMPL")
    call()


@pytest.mark.parametrize("name", settings.NAMES)
def test_empty_means_unset(monkeypatch, name):
    before = settings.current()
    monkeypatch.setenv(f"HAL_{name.upper()}", "")
    assert settings.current() == before
    call()


@pytest.mark.parametrize(("variable", "suggestion"), [("HAL_BAKEND", "HAL_BACKEND"), ("HAL_FALBACK", "HAL_FALLBACK")])
def test_an_unknown_name_is_warned_about_once_with_a_suggestion(monkeypatch, caplog, variable, suggestion):
    """vllm-project/vllm#50292: a variable that nobody reads has no effect, and nobody says so."""
    monkeypatch.setenv(variable, "cpu")
    with caplog.at_level(logging.WARNING, "hal"):
        settings.current()
        monkeypatch.setenv("HAL_CHECK", "1")
        settings.current()
        call()
    warnings = [r.getMessage() for r in caplog.records if variable in r.getMessage()]
    assert len(warnings) == 1
    assert suggestion in warnings[0]


def test_an_unknown_name_like_no_other_is_warned_about_with_the_known_ones(monkeypatch, caplog):
    monkeypatch.setenv("HAL_XYZZY", "1")
    with caplog.at_level(logging.WARNING, "hal"):
        settings.current()
    (warning,) = [r.getMessage() for r in caplog.records if "HAL_XYZZY" in r.getMessage()]
    assert "HAL_BACKEND" in warning


def test_names_of_other_case_are_no_settings(monkeypatch):
    monkeypatch.setenv("hal_backend", "tritn")
    assert settings.current().backend == "auto"


@pytest.mark.parametrize("name", ["check", "invariant"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [(t, True) for t in ("1", "true", "True", "yes", "on", "ON")]
    + [(f, False) for f in ("0", "false", "FALSE", "no", "off", "Off", "")],
)
def test_booleans(monkeypatch, name, text, expected):
    """vllm-project/vllm#28159, flashinfer-ai/flashinfer#3488: any text that is not empty, "0" too, counts as
    on."""
    monkeypatch.setenv(f"HAL_{name.upper()}", text)
    assert getattr(settings.current(), name) is expected


@pytest.mark.parametrize("name", ["check", "invariant"])
@pytest.mark.parametrize("text", ["maybe", "2", "2x", "-1", " 1", "t", "y", "none"])
def test_other_texts_are_no_booleans(monkeypatch, name, text):
    monkeypatch.setenv(f"HAL_{name.upper()}", text)
    with pytest.raises(ConfigError, match=rf"HAL_{name.upper()} = '{text}'.*1, true, yes, on"):
        settings.current()


@pytest.mark.parametrize(
    ("name", "text", "legal"),
    [
        ("fallback", "gpu", "error, portable or cpu"),
        ("fallback", "ERROR", "error, portable or cpu"),
        ("sync", "deny", "allow, warn or error"),
        ("impl", "rms_norm", "op=implementation"),
        ("impl", "=aten", "op=implementation"),
        ("impl", "rms_norm=", "op=implementation"),
    ],
)
def test_values_that_mean_nothing_are_errors_with_the_legal_ones(monkeypatch, name, text, legal):
    monkeypatch.setenv(f"HAL_{name.upper()}", text)
    with pytest.raises(ConfigError, match=legal):
        call()


def test_forcing_an_operator_that_does_not_exist_is_an_error_with_a_suggestion(monkeypatch):
    monkeypatch.setenv("HAL_IMPL", "rms_nrm=reference")
    with pytest.raises(ConfigError, match="did you mean rms_norm"):
        call()


def test_use_beats_environment_beats_file_beats_default(monkeypatch, tmp_path):
    file = tmp_path / "hal.toml"
    file.write_text('fallback = "portable"\nsync = "warn"\ncheck = true\n')
    monkeypatch.setenv("HAL_CONFIG", str(file))
    monkeypatch.setenv("HAL_SYNC", "error")
    assert (settings.current().fallback, settings.current().sync, settings.current().check) == (
        "portable",
        "error",
        True,
    )
    with hal.use(fallback="cpu", sync="allow"):
        assert (settings.current().fallback, settings.current().sync) == ("cpu", "allow")
        assert settings.sources() | {"config": "environment"} == settings.sources()
        assert [settings.sources()[n] for n in ("fallback", "sync", "check", "backend")] == [
            "use", "use", "config file", "default",
        ]  # fmt: skip
    assert settings.current().sync == "error"


def divide_under(expected):
    assert (settings.current().backend, settings.current().check) == expected
    raise ZeroDivisionError


def test_use_nests_and_ends_when_its_block_raises():
    with hal.use(backend="cpu", check=True):
        block = hal.use(fallback="cpu", check=False)
        with pytest.raises(ZeroDivisionError), block:
            divide_under(("cpu", False))
        assert (settings.current().backend, settings.current().check) == ("cpu", True)
        assert settings.current().fallback == "error"
    assert settings.current().backend == "auto"


BAD_USE = [{"fallback": "gpu"}, {"check": "maybe"}, {"impl": "x"}, {"sync": 3}, {"backend": ["cpu"]}, {"impl": ["x"]}]


@pytest.mark.parametrize("bad", [*BAD_USE, {"check": 1}, {"check": {}}, {"invariant": 0.0}])
def test_use_refuses_values_that_mean_nothing_at_once(bad):
    with hal.use(check=True, invariant=False):  # settings that equal some of the bad ones are known by now
        pass
    with pytest.raises(ConfigError, match=next(iter(bad))), hal.use(**bad):
        pytest.fail("the block must not run")
    assert settings.current().fallback == "error"


def test_use_holds_in_its_own_thread_only():
    seen = []
    with hal.use(fallback="cpu"):
        thread = threading.Thread(target=lambda: seen.append(settings.current().fallback))
        thread.start()
        thread.join()
    assert seen == ["error"]


@pytest.mark.parametrize(
    ("content", "error", "match"),
    [
        (None, FileError, "cannot be read"),
        ("fallback = ", ConfigError, "not TOML"),
        ('fall_back = "cpu"', ConfigError, "fall_back"),
        ('fallback = "gpu"', ConfigError, "config file.*error, portable or cpu"),
        ("check = 2", ConfigError, "check|CHECK"),
        (b"\xff\xfe", FileError, "cannot be read"),
    ],
)
def test_a_config_file_that_is_wrong_is_a_typed_error(monkeypatch, tmp_path, content, error, match):
    file = tmp_path / "hal.toml"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        file.write_text(content)
    monkeypatch.setenv("HAL_CONFIG", str(file))
    with pytest.raises(error, match=match):
        call()


def test_settings_pickle():
    with hal.use(backend="cpu", impl={"rms_norm": "reference"}, invariant=False):
        current = settings.current()
    copy = pickle.loads(pickle.dumps(current))
    assert copy == current
    assert copy.implementations == {"rms_norm": "reference"}


def test_settings_cannot_be_changed():
    with pytest.raises(Exception, match="frozen"):
        settings.current().backend = "cpu"
