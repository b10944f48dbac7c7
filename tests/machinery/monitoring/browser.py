"""A headless Chromium for tests, controlled over its debugging pipe by JSON messages that end with a zero byte."""

import base64
import contextlib
import itertools
import json
import os
import shlex
import shutil
import subprocess

from processes import until

CHROMIUM = shutil.which("chromium")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-3d-apis", "--hide-scrollbars")


class Page:
    """A page opened in a Chromium."""

    def __init__(self, to, back, address: str):
        self.to, self.back, self.numbers, self.session = to, back, itertools.count(1), {}
        target = self.call("Target.createTarget", url=address)["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def call(self, method: str, **parameters) -> dict:
        """The browser's answer to a command of its DevTools protocol."""
        number = next(self.numbers)
        self.to.write(
            json.dumps({"id": number, "method": method, "params": parameters, **self.session}).encode() + b"\0"
        )
        while (answer := self._message()).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _message(self):
        text = b""
        while (letter := self.back.read(1)) != b"\0":
            assert letter, "the browser is gone"
            text += letter
        return json.loads(text)

    def value(self, expression: str):
        """The value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str):
        """Wait until a JavaScript expression is true and return its value."""
        return until(lambda: self.value(expression), what=expression)

    def screenshot(self) -> bytes:
        """The page as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def open_page(address: str, folder, size: str = "1280,860"):
    """Open a Page. Its browser has its profile in `folder` and ends with the block."""
    theirs, ours = os.pipe(), os.pipe()
    command = [CHROMIUM, *OPTIONS, f"--window-size={size}", f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    line = f"exec {shlex.join(map(str, command))} 3<&{theirs[0]} 4>&{ours[1]}"
    process = subprocess.Popen(
        ["bash", "-c", line], pass_fds=(theirs[0], ours[1]), stderr=subprocess.DEVNULL, start_new_session=True
    )
    os.close(theirs[0])
    os.close(ours[1])
    try:
        with os.fdopen(theirs[1], "wb", 0) as to, os.fdopen(ours[0], "rb") as back:
            yield Page(to, back, address)
    finally:
        process.terminate()
        process.wait()
