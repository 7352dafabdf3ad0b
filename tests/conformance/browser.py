"""A headless Chromium over its debugging pipe: the page as a person's browser has it, with nothing but Python."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


def executable() -> str | None:
    """The browser that this machine has, if any."""
    return next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)


class Browser:
    """One page. `problems` collects console messages, exceptions, broken policies; `requests` what was fetched."""

    def __init__(self, profile: Path) -> None:
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()

        def place() -> None:  # the debugging pipe is descriptors 3 (to the browser) and 4 (from it)
            high = [os.dup(commands), os.dup(answers)]
            while min(high) < 5:
                high = [os.dup(fd) for fd in high]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self.process = subprocess.Popen(
            [str(executable()), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._rest, self._number, self._events = b"", 0, []
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.session: str | None = None
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # the clipboard is for a page that has the focus

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the debugging protocol and its answer; events on the way are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until it has loaded."""
        self.resize(width, height)
        self.scheme(dark)
        self._events.clear()
        self.call("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._events:
            self._read()
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )

    def scheme(self, dark: bool) -> None:
        value = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def value(self, expression: str) -> Any:
        """What a JavaScript expression (or promise) gives."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path, whole: bool = False) -> None:
        """A screenshot of the window, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.session = None
        try:
            self.call("Browser.close")
            self.process.wait(10)
        except (OSError, EOFError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self._in)
        os.close(self._out)

    def _read(self, seconds: float = 60.0) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser said nothing for {seconds:.0f} s")
            more = os.read(self._in, 1 << 16)
            if not more:
                raise EOFError("the browser ended")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, told: dict[str, Any]) -> None:
        if method is None:
            return
        self._events.append(method)
        if method == "Runtime.consoleAPICalled":
            self.problems.append(f"console.{told['type']}: {[a.get('value') for a in told['args']]}")
        elif method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {told['exceptionDetails']}")
        elif method == "Log.entryAdded":
            self.problems.append(f"{told['entry']['level']}: {told['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {told['message']}")
