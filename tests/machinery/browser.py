"""A headless Chromium for tests, driven over its debugging pipe: messages are JSON, each ends with a zero byte."""

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
LOOK = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-3d-apis", "--hide-scrollbars")


class Page:
    """A page that is open in a Chromium."""

    def __init__(self, to, back, address: str):
        self.to, self.back, self.numbers, self.session = to, back, itertools.count(1), {}
        target = self.ask("Target.createTarget", url=address)["targetId"]
        self.session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def ask(self, method: str, **words) -> dict:
        """What the browser answers to a command of its DevTools protocol."""
        number = next(self.numbers)
        self.to.write(json.dumps({"id": number, "method": method, "params": words, **self.session}).encode() + b"\0")
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
        """What a JavaScript expression gives."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str):
        """Waits until a JavaScript expression gives something true, and gives that."""
        return until(lambda: self.value(expression), what=expression)

    def screenshot(self) -> bytes:
        """The page as a PNG."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def opened(address: str, folder, size: str = "1280,860"):
    """A Page; its browser lives in `folder` and ends with the block."""
    theirs, ours = os.pipe(), os.pipe()
    words = [CHROMIUM, *LOOK, f"--window-size={size}", f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    line = f"exec {shlex.join(map(str, words))} 3<&{theirs[0]} 4>&{ours[1]}"
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
