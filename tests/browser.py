"""Headless Chromium over its debugging pipe, in plain Python: open a page, run script in it, press keys, take pictures.

Every request that a page makes and every message of its console is kept, so that tests can say that there was none.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
CODES = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, " ": 32, "Tab": 9}


class Browser:
    """One page. requests: addresses asked for, the page's own file among them; messages: errors and warnings."""

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        self.folder = tempfile.mkdtemp(prefix="browser-")
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()

        def pipes() -> None:  # Chromium reads 3 and writes 4
            kept = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(kept[0], 3)
            os.dup2(kept[1], 4)

        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={self.folder}", f"--window-size={width},{height}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, preexec_fn=pipes, close_fds=False, **quiet)  # type: ignore[call-overload]
        os.close(theirs_in)
        os.close(theirs_out)
        self.out, self.read = ours_out, ours_in
        self.waiting, self.count, self.session = b"", 0, ""
        self.requests: list[str] = []
        self.messages: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.read)
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, method: str, **settings: Any) -> Any:
        """The result of a command of the protocol. Raises RuntimeError with what the browser says is wrong."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": settings}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self.count:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.waiting:
            part = os.read(self.read, 2**20)
            if not part:
                raise RuntimeError("Chromium ended")
            self.waiting += part
        first, _, self.waiting = self.waiting.partition(b"\0")
        found: dict[str, Any] = json.loads(first)
        self._note(found.get("method"), found.get("params", {}))
        return found

    def _note(self, method: str | None, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            if not told["request"]["url"].startswith(("data:", "blob:")):  # which ask nobody
                self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.messages.append(f"{details['text']} {details.get('exception', {}).get('description', '')}")
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.messages.append(" ".join(str(one.get("value", one)) for one in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.messages.append(told["entry"]["text"])

    def open(self, page: Path) -> float:
        """Load a file; seconds until its load event's end."""
        began = time.monotonic()
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.until("document.readyState === 'complete'")
        return time.monotonic() - began

    def run(self, script: str) -> Any:
        """The value of an expression, of a promise too."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 20) -> None:
        """Wait until an expression is true. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(script)
            time.sleep(0.02)

    def press(self, key: str, shift: bool = False) -> None:
        """A key, down and up, where the focus is."""
        told = {"key": key, "code": key, "windowsVirtualKeyCode": CODES.get(key, ord(key[0])), "modifiers": 8 * shift}
        text = {"text": key} if len(key) == 1 else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **told, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **told)

    def move(self, x: float, y: float) -> None:
        """The mouse, without a button."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def look(self, width: int, height: int, dark: bool = False, media: str = "") -> None:
        """Size of the window, light or dark, and the medium ("print")."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def picture(self, file: Path, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))
