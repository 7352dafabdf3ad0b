"""`hal conformance report`, and the forms that `run` writes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hal.cli import app


def hal(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a run in every form."""
    folder = tmp_path_factory.mktemp("run")
    forms = [("--json", "r.json"), ("--html", "r.html"), ("--markdown", "r.md"), ("--junit", "r.xml")]
    options = [word for option, name in forms for word in (option, folder / name)]
    done = hal("conformance", "run", "--backend", "cpu", "--op", "copy_kv_blocks", "--workers", "0", *options)
    assert done.exit_code == 0, done.output
    return folder


def test_a_report_rendered_later_is_the_one_that_the_run_wrote(made, tmp_path):
    names = {"--html": "r.html", "--markdown": "r.md", "--junit": "r.xml"}
    options = [word for option, name in names.items() for word in (option, tmp_path / name)]
    done = hal("conformance", "report", made / "r.json", *options)
    assert done.exit_code == 0, done.output
    assert "Every judged case passed" in done.output
    for name in names.values():
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes()


def test_a_run_says_what_each_judged_implementation_accepts_and_declares(made):
    offers = json.loads((made / "r.json").read_text())["offers"]
    assert [(found["op"], found["implementation"]) for found in offers] == [("copy_kv_blocks", "reference")]
    assert offers[0]["declares"]["run_to_run"] is True


def spoiled(text, how):
    document = json.loads(text)
    if how == "cut":
        return text[: len(text) // 2]
    if how == "newer":
        document["version"] = 99
    if how == "foreign":
        document["format"] = "other"
    if how == "changed":
        document["results"][0]["status"] = "fine"
    return json.dumps(document)


@pytest.mark.parametrize("how", ["cut", "newer", "foreign", "changed"])
def test_what_is_no_whole_report_of_a_known_version_is_refused_and_nothing_is_written(made, tmp_path, how):
    bad = tmp_path / "bad.json"
    bad.write_text(spoiled((made / "r.json").read_text(), how))
    done = hal("conformance", "report", made / "r.json", bad, "--html", tmp_path / "r.html")
    assert done.exit_code == 2
    assert "bad.json" in done.output
    assert not (tmp_path / "r.html").exists()


def test_a_report_of_the_first_version_still_renders(made, tmp_path):
    document = json.loads((made / "r.json").read_text())
    for name in ("offers", "waivers"):
        document.pop(name)
    old = tmp_path / "old.json"
    old.write_text(json.dumps(document | {"version": 1}))
    assert hal("conformance", "report", old, "--html", tmp_path / "r.html").exit_code == 0


def test_junit_takes_one_report(made, tmp_path):
    done = hal("conformance", "report", made / "r.json", made / "r.json", "--junit", tmp_path / "r.xml")
    assert done.exit_code == 2
    assert "--junit takes one report, not 2" in done.output


@pytest.mark.parametrize("command", ["report", "kit"])
def test_the_help_has_examples(command):
    done = hal("conformance", command, "--help")
    assert done.exit_code == 0
    assert f"hal conformance {command}" in done.output
