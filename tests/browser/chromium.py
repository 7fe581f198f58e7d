"""A headless Chromium, driven by its own protocol over two pipes: no network, no package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 120.0  # seconds
BROKEN = (
    "Runtime.exceptionThrown",
    "Runtime.consoleAPICalled",
    "Log.entryAdded",
    "Network.loadingFailed",
)


def find() -> str | None:
    """$CLIP_TRAIN_CHROMIUM, or the first that is on the path."""
    return os.environ.get("CLIP_TRAIN_CHROMIUM") or next(
        filter(None, map(shutil.which, NAMES)), None
    )


class Chromium:
    """One page. `events` are all that it has sent: requests, exceptions, what it writes to its console."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        theirs_read, self._write = os.pipe()
        self._read, theirs_write = os.pipe()
        line = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}",
                "about:blank"]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_read} 4>&{theirs_write}', "-", *line],
            pass_fds=(theirs_read, theirs_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_read)
        os.close(theirs_write)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.kill()
        self._process.wait()
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def show(self, page: Path | str, width: int, *, dark: bool, fragment: str = "") -> None:
        """Load a file or a URL anew, in a window of so many CSS pixels."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Page.navigate", url=(page if isinstance(page, str) else page.as_uri()) + fragment
        )
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def evaluate(self, expression: str) -> Any:
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def asked(self) -> list[str]:
        """URLs that the page has asked for, without those that are data themselves."""
        sent = [
            e["params"]["request"]["url"]
            for e in self.events
            if e["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in sent if not url.startswith("data:")]

    def broken(self) -> list[dict[str, Any]]:
        """What it has thrown, logged or failed to load; not what the next page has cut off."""
        found = [event for event in self.events if event["method"] in BROKEN]
        return [event for event in found if not event["params"].get("canceled")]

    def screenshot(self, width: int, height: int, top: int = 0) -> bytes:
        """PNG of the page from `top` on."""
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        shot = self.call(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        return base64.b64decode(shot["data"])

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, "Chromium has gone, or does not answer"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        parsed = json.loads(message)
        if "method" in parsed:
            self.events.append(parsed)
        return parsed
