"""Operators and constraints: what fits is bound to the right arguments, what does not fit is refused at once."""

from __future__ import annotations

import itertools

import pytest

from hal.backends.ascend.simulator import constraints, operators
from hal.backends.ascend.simulator.constraints import A2, P310, Constraint
from hal.backends.ascend.simulator.operators import Operator, operator
from hal.backends.ascend.simulator.settings import SimulatorSettings
from hal.backends.ascend.simulator.socs import SOCS
from hal.errors import PluginError


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(operators, "OPERATORS", {})
    return operators.OPERATORS


def test_one_function_serves_several_names(registry):
    @operator("aclnnTwice", "tt")
    @operator("aclnnDouble", "tk")
    def twice(self, out):
        pass

    assert set(registry) == {"aclnnTwice", "aclnnDouble"}
    assert registry["aclnnDouble"] == Operator("aclnnDouble", "tk", ("self", "out"), twice)


@pytest.mark.parametrize(
    ("name", "signature", "told"),
    [
        ("Twice", "tt", "begins with aclnn"),
        ("aclnnTwice", "tz", "made of"),
        ("aclnnTwice", "", "made of"),
        ("aclnnTwice", "t", "1 arguments"),
        ("aclnnTwice", "ttt", "3 arguments"),
    ],
)
def test_name_signature_and_function_must_fit(registry, name, signature, told):
    with pytest.raises(PluginError, match=told):
        operator(name, signature)(lambda self, out: None)
    assert not registry


def test_a_name_is_registered_once(registry):
    operator("aclnnTwice", "t")(lambda self: None)
    with pytest.raises(PluginError, match="twice"):
        operator("aclnnTwice", "t")(lambda self: None)


def even(**settings):
    return Constraint(
        operator="aclnnRotate",
        rule="the head dim is even",
        page="rotate",
        enforced_by="document",
        check=lambda dim: None if dim % 2 == 0 else f"head dim {dim}",
        **settings,
    )


ROTATE = {"aclnnRotate": Operator("aclnnRotate", "tiit", ("x", "count", "dim", "out"), lambda x, count, dim, out: None)}


def test_a_check_gets_its_parameters_by_name():
    (check,) = constraints.bind([even()], ROTATE, SimulatorSettings())["aclnnRotate"]
    check([None, 3, 4, None])
    with pytest.raises(ValueError, match=r"the head dim is even, but found head dim 5 \(page rotate\)"):
        check([None, 4, 5, None])


@pytest.mark.parametrize(
    ("cann", "version", "holds"),
    [
        ("", "8.5.0", True),
        (">=8.2,<9.0", "8.5.0", True),
        (">=8.2,<9.0", "9.0.0", False),
        (">=8.2", "8.2.RC1", False),
        (">=8.2.RC1", "8.2.RC2", True),
        ("<8.2", "8.2.RC1", True),
        ("==8.5", "8.5.0", True),
        (">8.5", "8.5.0", False),
        ("<=8.10", "8.9.1", True),
    ],
)
def test_a_rule_holds_for_its_versions(cann, version, holds):
    assert even(cann=cann).holds_for(SimulatorSettings(cann=version)) == holds
    bound = constraints.bind([even(cann=cann)], ROTATE, SimulatorSettings(cann=version))
    assert bool(bound) == holds


def test_a_rule_holds_for_its_chips():
    found = {name: even(socs=P310 | A2).holds_for(SimulatorSettings(soc=soc)) for name, soc in SOCS.items()}
    assert {name for name, holds in found.items() if holds} == {"310P3", "910B1", "910B2", "910B3", "910B4"}


@pytest.mark.parametrize("cann", ["8", "~=8.0", ">=8.0;<9", "newest"])
def test_a_version_range_that_means_nothing_is_refused(cann):
    with pytest.raises(PluginError, match="no CANN version range"):
        even(cann=cann)


def test_a_row_needs_known_chips_and_a_check_unless_the_wheel_enforces_it():
    with pytest.raises(PluginError, match="H100"):
        even(socs=frozenset({"H100"}))
    with pytest.raises(PluginError, match="needs a check"):
        Constraint("aclnnRotate", "rule", "page", "field")
    assert not constraints.bind([Constraint("aclnnRotate", "rule", "page", "wheel")], ROTATE, SimulatorSettings())


def test_a_check_of_a_parameter_that_the_operator_has_not_is_refused():
    row = Constraint("aclnnRotate", "rule", "page", "document", check=lambda heads: None)
    with pytest.raises(PluginError, match=r"heads.*x, count, dim, out"):
        constraints.bind([row], ROTATE, SimulatorSettings())


def test_the_rows_and_operators_of_the_tree_fit_together_on_every_chip():
    loaded = operators.load()
    rows = constraints.load()
    assert loaded and rows
    for soc, cann in itertools.product(SOCS.values(), ("8.0.0", "8.5.0", "9.0.0")):
        constraints.bind(rows, loaded, SimulatorSettings(soc=soc, cann=cann))
    for row in rows:
        assert set(row.operators) & set(loaded), f"no operator of {row.operators} is simulated"
