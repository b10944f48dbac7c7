"""How a start ends: by which signals, with which exit code, and the one exception that is the user's to mend."""

import difflib
import signal

FINISHED, FAILED, USAGE, STOPPED, ABORTED = 0, 1, 2, 75, 130  # 75 is EX_TEMPFAIL: try again, it goes on
EXIT_CODES = {"finished": FINISHED, "stopped": STOPPED, "failed": FAILED}
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class UsageError(Exception):
    """What was asked cannot be done. The message is one line: the flag, the value given, and what would be right."""


def close(name: str, there) -> str:
    """What a misspelt name may mean of those that are there, in words; "" if nothing comes near."""
    text = name.lstrip("-")
    starts = [other for other in there if text and other.lstrip("-").startswith(text)]
    close = starts or difflib.get_close_matches(name, there, n=3)
    return f" (do you mean {' or '.join(dict.fromkeys(close))}?)" if close else ""
