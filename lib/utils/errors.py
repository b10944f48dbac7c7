"""How a start ends: by which signals, with which exit code, and the one exception that is the user's to mend."""

import contextlib
import difflib
import signal
import traceback
from pathlib import Path

FINISHED, FAILED, USAGE, STOPPED, ABORTED = 0, 1, 2, 75, 130  # 75 is EX_TEMPFAIL: try again, it goes on
EXIT_CODES = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class UsageError(Exception):
    """What was asked cannot be done. The message is one line: the flag, the value given, and what would be right."""


@contextlib.contextmanager
def no_exit():
    """Turns sys.exit in the block, by a plugin or an argparse of its own, into a failure: code 0 means finished.

    Raises RuntimeError, which names the plugin.
    """
    try:
        yield
    except SystemExit as error:
        frames = traceback.extract_tb(error.__traceback__)
        plugins = [one for one in frames if Path(one.filename).parent.name in ("dataset", "arch", "trainer")]
        place = (plugins or frames)[-1]
        raise RuntimeError(f"{place.filename}, line {place.lineno}: sys.exit({error.code!r}) was called, and the run "
                           "is not finished") from error  # fmt: skip


def close(name: str, there) -> str:
    """What a misspelt name may mean of those that are there, in words; "" if nothing comes near."""
    text = name.lstrip("-")
    starts = [other for other in there if text and other.lstrip("-").startswith(text)]
    close = starts or difflib.get_close_matches(name, there, n=3)
    return f" (do you mean {' or '.join(dict.fromkeys(close))}?)" if close else ""
