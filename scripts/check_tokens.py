"""Finds files of other formats among token files, whose bytes would pass for tokens."""

import numpy as np

from lib.utils.errors import UsageError

HEADERS = (b"\x93NUMPY", b"PK\x03\x04", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\x80\x04\x95")  # .npy, zip, pickle


def check(tokens: np.ndarray, is_certain: bool, message: str) -> None:
    """Raise UsageError with a message, whose {} says what the tokens look like; without guesses if `is_certain`."""
    if tokens.tobytes().startswith(HEADERS):
        raise UsageError(message.format("begins with the header of another format"))
    if not is_certain and (fault := fault_of(tokens)):
        raise UsageError(message.format(fault))


def are_bytes(tokens: np.ndarray) -> bool:
    """Return whether low and high bytes are alike, as of tokens of one byte: neither few nor 0, none near 255."""
    columns = tokens.view(np.uint8).reshape(len(tokens), -1)
    low, high = len(np.unique(columns[:, 0])), len(np.unique(columns[:, -1]))
    chance = ((1 + int(columns.max())) / 256) ** len(tokens)  # that the low bytes of real tokens are all so small
    return bool(columns[:, -1].any()) and 2 * high >= low > 1 and chance < 1e-6


def fault_of(tokens: np.ndarray) -> str:
    """Return what else these look like: bytes, wider numbers (every second or fourth is 0), swapped bytes; or ""."""
    rows = tokens[: len(tokens) // 4 * 4].reshape(-1, 4)
    used = rows.any(axis=0)
    if len(rows) >= 16 and used.any() and not used.all():
        return f"looks like a wider type than {tokens.dtype}, as int32, int64 or floats"
    if len(rows) >= 16 and not (tokens & 255).any():
        return "holds multiples of 256 alone, as zeros, or numbers whose bytes are in the other order"
    return "is a text, or holds tokens of one byte" if are_bytes(tokens) else ""
