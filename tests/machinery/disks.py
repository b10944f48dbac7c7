"""A full disk, for tests."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(room):
    """No file may grow beyond `room` bytes: what is written then ends short, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
