"""qemu-user, which runs the tests as programs of another machine: what it can't show them."""

from __future__ import annotations

import os

import pytest

IS_PROGRAM = "is the program of all its processes"
ANSWERS_FOR_MAPS = "answers for /proc/self/maps, without /proc too"


def _is_emulated() -> bool:
    # qemu-user answers for /proc/self/exe, but not for that of a thread.
    try:
        program = os.readlink(f"/proc/self/task/{os.getpid()}/exe")
    except OSError:
        return False
    return os.path.basename(program).startswith("qemu-")


def not_in_qemu(reason: str) -> pytest.MarkDecorator:
    """Skip a test in qemu-user; ``reason`` says what that does otherwise than the kernel."""
    return pytest.mark.skipif(_is_emulated(), reason=f"qemu-user {reason}")
