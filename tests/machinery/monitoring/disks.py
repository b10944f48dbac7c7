"""A full disk, for tests."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(room):
    """Limit files to `room` bytes: later writes are cut short, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
