"""Processes of their own for what cannot be tested in the one that runs the tests: imports, forks,
plug-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

MARK = "answer:"


def python(script, *, path=(), env=None, code=0):
    """Run a script; it calls `answer(data)`. Returns the data, with the log and warnings as "stderr"."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HAL_")}
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, path))} | (env or {})
    head = f"import json\ndef answer(data):\n    print({MARK!r} + json.dumps(data))\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(script)],
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert answers, done.stdout + done.stderr
    return json.loads(answers[-1]), done.stderr
