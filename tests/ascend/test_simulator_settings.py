"""The simulator's settings: texts that mean something, and clear errors for those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hal.backends.ascend.simulator import settings
from hal.backends.ascend.simulator.settings import SimulatorSettings
from hal.backends.ascend.simulator.socs import SOCS
from hal.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("SOC", "CANN", "DEVICES", "MEMORY", "NUMERICS", "STRICT", "TRACE", "LIBRARIES", "CACHE"):
        monkeypatch.delenv(settings.PREFIX + name, raising=False)


def test_unset_and_empty_mean_the_defaults(monkeypatch):
    monkeypatch.setenv("ASCEND_SIM_SOC", "")
    assert settings.from_environment() == SimulatorSettings()


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("SOC", "910B1", "soc", SOCS["910B1"]),
        ("SOC", "Ascend910B1", "soc", SOCS["910B1"]),
        ("SOC", "A3", "soc", SOCS["910_9391"]),
        ("CANN", "8.2.RC1", "cann", "8.2.RC1"),
        ("DEVICES", "16", "devices", 16),
        ("MEMORY", "1.5GiB", "memory", 3 * 2**29),
        ("MEMORY", "1048576", "memory", 2**20),
        ("NUMERICS", "perturbed", "numerics", "perturbed"),
        ("STRICT", "Off", "strict", False),
        ("TRACE", "/tmp/t", "trace", Path("/tmp/t")),
    ],
)
def test_a_variable_sets_its_field_alone(monkeypatch, name, text, field, value):
    monkeypatch.setenv(settings.PREFIX + name, text)
    found = settings.from_environment()
    assert getattr(found, field) == value
    assert found == SimulatorSettings(**{field: value})


@pytest.mark.parametrize(
    ("name", "text", "legal"),
    [
        ("SOC", "910B9", "did you mean 910B"),
        ("SOC", "H100", "310P3"),
        ("CANN", "latest", "8.5.0"),
        ("DEVICES", "0", "1 to 16"),
        ("DEVICES", "17", "1 to 16"),
        ("DEVICES", "²", "1 to 16"),
        ("MEMORY", "4GB", "4GiB"),
        ("MEMORY", "1KiB", "between 1MiB and 1TiB"),
        ("NUMERICS", "fast", "exact or perturbed"),
        ("STRICT", "maybe", "yes"),
    ],
)
def test_a_value_that_means_nothing_is_an_error_that_names_variable_value_and_what_is_legal(
    monkeypatch, name, text, legal
):
    monkeypatch.setenv(settings.PREFIX + name, text)
    with pytest.raises(ConfigError) as caught:
        settings.from_environment()
    assert f"ASCEND_SIM_{name} = " in str(caught.value)
    assert repr(text) in str(caught.value)
    assert legal in str(caught.value)


def test_a_name_that_no_setting_has_is_an_error(monkeypatch):
    monkeypatch.setenv("ASCEND_SIM_DEVICE", "1")
    with pytest.raises(ConfigError, match=r"ASCEND_SIM_DEVICE: .*ASCEND_SIM_DEVICES"):
        settings.from_environment()


def test_texts_make_the_same_settings_again():
    for made in (
        SimulatorSettings(),
        SimulatorSettings(SOCS["310P3"], "9.0.0", 1, 2**30, "perturbed", False, Path("/tmp/trace.jsonl")),
    ):
        assert SimulatorSettings.parse(made.texts()) == made


@pytest.mark.parametrize("name", SOCS)
def test_every_chip_can_be_asked_for_by_its_own_name(name):
    assert SimulatorSettings.parse({"soc": SOCS[name].name}).soc is SOCS[name]


def test_results_saturate_only_perturbed_and_on_a_chip_that_does():
    found = {
        (name, numerics): SimulatorSettings(soc=SOCS[name], numerics=numerics).saturate
        for name in ("310P3", "910B3")
        for numerics in ("exact", "perturbed")
    }
    assert [case for case, saturate in found.items() if saturate] == [("310P3", "perturbed")]


def test_the_cache_is_the_users_unless_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings.cache_root() == tmp_path / "torch-hal" / "ascend-simulator"
    monkeypatch.setenv("ASCEND_SIM_CACHE", str(tmp_path / "mine"))
    assert settings.cache_root() == tmp_path / "mine"


def test_paths_are_those_of_the_directory_in_which_they_were_given(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASCEND_SIM_CACHE", "mine")
    monkeypatch.setenv("ASCEND_SIM_TRACE", "trace.jsonl")
    assert settings.cache_root() == tmp_path / "mine"
    assert settings.from_environment().trace == tmp_path / "trace.jsonl"
