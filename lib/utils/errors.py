"""The one exception that is the user's to mend: bad usage, told in one line, exit code 2."""


class UsageError(Exception):
    """What was asked cannot be done. The message is one line: the flag, the value given, and what would be right."""
