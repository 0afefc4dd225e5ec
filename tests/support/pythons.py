"""Processes of Python that tests look at."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MB = 1_000_000
ALLOCATED = 100 * MB
# What a Python of its own takes, with room.
INTERPRETER = 40 * MB


@contextmanager
def python(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python that has printed a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline()
        yield process
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()
