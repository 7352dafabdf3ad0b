"""Plug-ins as distributions of their own: found by entry point, loaded when asked for, and failing without
harm.

Each test writes modules and the metadata of a distribution into a temporary folder and runs a process that
has it on its path.
"""

from __future__ import annotations

import re

import pytest
from core_processes import python

GOOD = """
from hal.capability import Implementation
from hal.hookspec import Backend, hookimpl

def forward(x, weight=None, eps=1e-6, *, weight_offset=0.0, round_before_weight=False):
    return x * 0 + 7

@hookimpl
def hal_backend():
    return Backend({name!r}, ("cpu",), "answers seven")

@hookimpl
def hal_implementations(backend):
    return [Implementation("rms_norm", "seven", forward)] if backend == {name!r} else []
"""

EXTENSION = """
from hal.capability import Implementation
from hal.hookspec import hookimpl

def forward(x, weight=None, eps=1e-6, *, weight_offset=0.0, round_before_weight=False):
    return x * 0 + {value}

@hookimpl
def hal_implementations(backend):
    return [Implementation("rms_norm", {name!r}, forward, priority={priority})] if backend == "cpu" else []
"""

PRELUDE = """
import logging, torch, hal
from hal import registry
x = torch.ones(1, 2)

def attempt(run):
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def first(**choice):
    with hal.use(**choice):
        return attempt(lambda: round(hal.ops.rms_norm(x)[0, 0].item(), 3))

def failures():
    return [[f.name, f.type, f.message] for f in registry.failures()]
"""


def install(folder, distribution, modules, entries):
    """A distribution: its modules by name, and entry points of the group hal.backends."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[hal.backends]\n{lines}")


def ask(folder, script, **env):
    return python(PRELUDE + script, path=[folder], env=env)


def good(name):
    return GOOD.format(name=name)


def extension(name, value=5, priority=1000):
    return EXTENSION.format(name=name, value=value, priority=priority)


def test_one_broken_plug_in_neither_hides_the_others_nor_fails_in_silence(tmp_path):
    """vllm-project/vllm#48277, #52238: the exception is swallowed, and the CPU path is taken."""
    modules = {
        "fine": good("fine"),
        "no_module": "import none_such_module\n",
        "no_library": "raise OSError('libfoo.so.3: cannot open shared object file')\n",
        "no_attribute": "import torch\ntorch.none_such_attribute\n",
        "no_syntax": "def (:\n",
    }
    entries = {name: name for name in modules} | {"none": "fine:nothing", "absent": "fine:not_there"}
    modules["fine"] += "\nnothing = None\n"
    install(tmp_path, "many-plugins", modules, entries)
    (answers, failed), log = ask(
        tmp_path,
        """
names = ["fine", "no_module", "no_library", "no_attribute", "no_syntax", "none", "absent", "cpu"]
answers = {name: first(backend=name) for name in names}
answers["auto"] = first(backend="auto")
answers["again"] = first(backend="no_library")
registry.load_all()
answer([answers, failures()])
""",
    )
    assert answers["fine"] == 7
    assert answers["cpu"] == answers["auto"] == 1
    kinds = {name: kind for name, kind, _ in failed}
    expected = {
        "no_module": "ModuleNotFoundError",
        "no_library": "OSError",
        "no_attribute": "AttributeError",
        "no_syntax": "SyntaxError",
        "absent": "AttributeError",
        "none": "PluginError",
    }
    assert expected.items() <= kinds.items()
    assert "fine" not in kinds
    for name, kind in expected.items():
        assert answers[name].startswith("PluginError"), answers[name]
        assert repr(name) in answers[name]
        assert kind in answers[name]
        assert len(re.findall(rf"plug-in {name} .*{kind}", log)) == 1, "one warning per failure, with name and type"
    assert "libfoo.so.3: cannot open shared object file" in log
    assert "libfoo.so.3" in answers["again"]


def test_a_plug_in_that_calls_sys_exit_does_not_end_the_process(tmp_path):
    install(tmp_path, "leaving", {"leaves": "import sys\nsys.exit(3)\n"}, {"leaves": "leaves"})
    (answered, value, failed), _ = ask(tmp_path, "answer([first(backend='leaves'), first(), failures()])")
    assert answered.startswith("PluginError")
    assert "SystemExit" in answered
    assert value == 1
    assert [name for name, _, _ in failed] == ["leaves"]


def test_the_command_line_lists_failures(tmp_path):
    install(tmp_path, "broken-plugin", {"broken": "raise OSError('libbar.so: not found')\n"}, {"broken": "broken"})
    text, _ = python(
        """
        from typer.testing import CliRunner
        from hal.cli import app
        result = CliRunner().invoke(app, ["doctor", "--json"])
        answer(result.output)
        """,
        path=[tmp_path],
    )
    assert "broken" in text
    assert "OSError" in text
    assert "libbar.so: not found" in text


def test_a_failed_backend_asked_for_by_the_environment_is_an_error(tmp_path):
    install(tmp_path, "broken-plugin", {"broken": "raise ImportError('no driver')\n"}, {"broken": "broken"})
    answered, _ = ask(tmp_path, "answer(attempt(lambda: hal.ops.rms_norm(x)))", HAL_BACKEND="broken")
    assert answered.startswith("PluginError")
    assert "ImportError" in answered
    assert "no driver" in answered


def test_a_plug_in_is_imported_only_when_its_backend_is_considered(tmp_path):
    modules = dict.fromkeys(("eager", "ext"), "import sys\nsys.loaded = getattr(sys, 'loaded', []) + [__name__]\n")
    modules["eager"] += good("eager")
    modules["ext"] += extension("mine")
    install(tmp_path, "two-plugins", modules, {"eager": "eager", "cpu.mine": "ext"})
    answers, _ = ask(
        tmp_path,
        """
import sys
loaded = lambda: list(getattr(sys, "loaded", []))
steps = [loaded()]
names = registry.backend_names(); steps.append(loaded())
first(backend="portable:cpu"); steps.append(loaded())
value = first(backend="cpu"); steps.append(loaded())
seven = first(backend="eager"); steps.append(loaded())
answer([names, value, seven, steps])
""",
    )
    names, value, seven, steps = answers
    assert {"cpu", "eager", "portable"} <= set(names)
    assert "cpu.mine" not in names
    assert (value, seven) == (5, 7)
    assert steps == [[], [], [], ["ext"], ["ext", "eager"]]


def test_an_extension_of_an_existing_backend_can_be_forced_and_outranked(tmp_path):
    modules = {"low": extension("low", 3, -5), "high": extension("high", 4, 500)}
    install(tmp_path, "extensions", modules, {"cpu.low": "low", "cpu.high": "high"})
    answers, _ = ask(
        tmp_path,
        "answer([first(), first(impl='rms_norm=low'), first(impl='rms_norm=reference'), first(impl='rms_norm=none')])",
    )
    assert answers[:3] == [4, 3, 1]
    assert answers[3].startswith("ConfigError")
    assert "low" in answers[3]


WRONG = {
    "no backend": (
        "from hal.hookspec import hookimpl\n@hookimpl\ndef hal_implementations(backend):\n    return []\n",
        "must give a Backend",
    ),
    "not a Backend": (
        "from hal.hookspec import hookimpl\n@hookimpl\ndef hal_backend():\n    return {'name': 'wrong'}\n",
        "gives dict from hal_backend",
    ),
    "another name": (good("other"), "names must be equal"),
    "unknown operator": (good("wrong").replace('"rms_norm"', '"rms_nrm"'), "operator that hal does not have"),
    "missing parameter": (good("wrong").replace("weight_offset=0.0, ", ""), "has the signature"),
    "other default": (good("wrong").replace("eps=1e-6", "eps=1e-5"), "has the signature"),
    "positional for keyword-only": (good("wrong").replace("*, weight_offset", "weight_offset"), "has the signature"),
    "other parameter name": (good("wrong").replace("(x, weight=None", "(input, weight=None"), "has the signature"),
    "not an Implementation": (
        good("wrong").replace('Implementation("rms_norm", "seven", forward)', "forward"),
        "gives function, not Implementation",
    ),
    "name with a comma": (good("wrong").replace('"seven"', '"se,ven"'), "without commas"),
    "twice the same name": (
        good("wrong").replace("[Implementation(", "2 * [Implementation("),
        "rms_norm:seven is registered already",
    ),
    "unknown hook": (
        good("wrong") + "\n@hookimpl\ndef hal_implementation(backend):\n    return []\n",
        "hal_implementation",
    ),
    "unknown hook argument": (
        good("wrong").replace("def hal_implementations(backend)", "def hal_implementations(backend, device)"),
        "device",
    ),
    "unknown feature": (
        "from hal.capability import Supports\n"
        + good("wrong").replace('"seven", forward)', '"seven", forward, Supports(features=frozenset({"wieght"})))'),
        "unknown features wieght",
    ),
    "unknown limit": (
        "from hal.capability import Limit, Supports\n"
        + good("wrong").replace('"seven", forward)', '"seven", forward, Supports(limits={"faetures": Limit(max=8)}))'),
        "unknown limits faetures; there are features",
    ),
    "unknown dtype": (
        "from hal.capability import Supports\n"
        + good("wrong").replace('"seven", forward)', '"seven", forward, Supports(dtypes=frozenset({"bf16"})))'),
        "unknown dtypes bf16",
    ),
    "hook that raises": (
        good("wrong").replace("    return [Imp", "    raise KeyError('table')\n    return [Imp"),
        "table",
    ),
}


@pytest.fixture(scope="module")
def wrong_answers(tmp_path_factory):
    """What each wrong plug-in brings about, all in one process under names of their own."""
    folder = tmp_path_factory.mktemp("wrong")
    names = {label: f"wrong{i}" for i, label in enumerate(WRONG)}
    modules = {names[label]: source.replace("'wrong'", repr(names[label])) for label, (source, _) in WRONG.items()}
    install(folder, "wrong-plugins", modules, {name: name for name in modules})
    (answers, listed), log = ask(
        folder,
        f"answers = {{name: first(backend=name) for name in {sorted(modules)}}}\n"
        "answers['cpu'] = first(backend='cpu')\nanswer([answers, failures()])",
    )
    assert answers["cpu"] == 1
    return names, answers, {name: message for name, _, message in listed}, log


@pytest.mark.parametrize("label", WRONG)
def test_a_plug_in_that_does_not_fit_is_refused_at_registration_by_name(wrong_answers, label):
    names, answers, listed, log = wrong_answers
    name = names[label]
    assert str(answers[name]).startswith("PluginError"), answers[name]
    assert name in answers[name]
    assert WRONG[label][1] in answers[name]
    assert name in listed
    assert f"plug-in {name} cannot be used" in log


def test_two_distributions_with_a_plug_in_of_one_name(tmp_path):
    install(tmp_path, "first-dist", {"one": good("same")}, {"same": "one"})
    install(tmp_path, "second-dist", {"two": good("same")}, {"same": "two"})
    (answered, failed, cpu), log = ask(tmp_path, "answer([first(backend='same'), failures(), first()])")
    assert answered.startswith("PluginError")
    assert all(word in answered for word in ("same", "first-dist", "second-dist", "uninstall one"))
    assert [name for name, _, _ in failed] == ["same"]
    assert cpu == 1
    assert "first-dist" in log


def test_a_stranger_cannot_take_the_name_of_a_backend_in_the_tree(tmp_path):
    install(tmp_path, "usurper", {"usurper": good("cpu")}, {"cpu": "usurper"})
    (value, failed), log = ask(tmp_path, "answer([first(backend='cpu'), failures()])")
    assert value == 1
    assert any("usurper" in message for _, _, message in failed)
    assert "usurper" in log


def test_one_distribution_seen_twice_on_the_path_is_one_plug_in(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        install(tmp_path / name, "seen-twice", {"twice": good("twice")}, {"twice": "twice"})
    (value, failed), _ = python(
        PRELUDE + "answer([first(backend='twice'), failures()])", path=[tmp_path / "a", tmp_path / "b"]
    )
    assert (value, failed) == (7, [])


def test_an_extension_that_fails_leaves_its_backend_usable(tmp_path):
    backend = "\nfrom hal.hookspec import Backend\n@hookimpl\ndef hal_backend():\n    return Backend('cpu', ('cpu',))\n"
    modules = {
        "bad_ext": "raise RuntimeError('no kernel image')\n",
        "usurping": extension("x") + backend,
        "clash": extension("reference"),
    }
    install(
        tmp_path, "bad-extensions", modules, {"cpu.bad": "bad_ext", "cpu.usurping": "usurping", "cpu.clash": "clash"}
    )
    (value, failed), log = ask(tmp_path, "answer([first(backend='cpu'), failures()])")
    assert value == 1
    assert [name for name, _, _ in failed] == ["cpu.bad", "cpu.clash", "cpu.usurping"]
    assert "no kernel image" in log
    assert "may not bring a backend" in log
    assert "rms_norm:reference is registered already" in log


def test_software_is_the_versions_of_installed_packages_and_what_plug_ins_tell(tmp_path):
    told = "\n@hookimpl\ndef hal_software():\n    return {'toolkit': '9.1 (simulated)'}\n"
    modules = {
        "vendors": good("vendors").replace('"answers seven")', "packages=('chip-runtime', 'none-such'))") + told,
        "mute": "from hal.hookspec import hookimpl\n@hookimpl\ndef hal_software():\n    raise OSError('no libfoo')\n",
    }
    modules["broken"] = "raise OSError('libbar.so: cannot open')\n"
    install(tmp_path, "vendors", modules, {"vendors": "vendors", "cpu.mute": "mute", "broken": "broken"})
    install(tmp_path, "chip-runtime", {}, {})
    script = "registry.backend('cpu')\nanswer([registry.software(), sorted(registry._get().backends), failures()])"
    (found, loaded, failed), log = ask(tmp_path, script)
    own = {name: found[name] for name in ("chip-runtime", "toolkit", "cpu.mute")}
    assert own == {"chip-runtime": "1.0", "toolkit": "9.1 (simulated)", "cpu.mute": "unknown (OSError: no libfoo)"}
    assert "none-such" not in found
    assert (loaded, failed, log) == (["cpu"], [], ""), "asking for versions must neither load nor report a plug-in"


def test_an_implementation_that_raises_is_not_retried_elsewhere(tmp_path):
    source = extension("raising").replace("return x * 0 + 5", "raise RuntimeError('kernel failed')")
    install(tmp_path, "raising", {"raising": source}, {"cpu.raising": "raising"})
    answers, _ = ask(tmp_path, "answer([first(), first(fallback='cpu'), first(fallback='portable')])")
    assert answers == ["RuntimeError: kernel failed"] * 3
