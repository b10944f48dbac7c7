"""How a start ends: the exit codes, and the one exception that is the user's to mend, told in one line."""

FINISHED, FAILED, USAGE, STOPPED, ABORTED = 0, 1, 2, 75, 130  # 75 is EX_TEMPFAIL: try again, it goes on


class UsageError(Exception):
    """What was asked cannot be done. The message is one line: the flag, the value given, and what would be right."""
