"""Memory of process trees, of real processes."""

from __future__ import annotations

import psutil

from pytest_negativa.processes.programs import (
    MemoryPeaks,
    descendants,
    memory_of,
)
from tests.support.pythons import ALLOCATED, INTERPRETER, python

SHARED = f"""
import os, sys
data = bytearray(os.urandom({ALLOCATED}))
if os.fork() == 0:
    print("child", flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
os.wait()
"""


def test_what_is_shared_counts_once_in_pss_and_twice_in_rss() -> None:
    others = frozenset(descendants())
    with python(SHARED) as process:
        peaks = MemoryPeaks(others)
        peaks.sample()
        assert len(peaks.running) == 2
        assert process.pid in {p.pid for p in peaks.running}
    assert peaks.rss > 2 * ALLOCATED
    assert peaks.pss is not None
    assert ALLOCATED < peaks.pss < ALLOCATED + 2 * INTERPRETER


def test_processes_that_are_gone() -> None:
    with python("print(1, flush=True)") as process:
        gone = psutil.Process(process.pid)
    assert memory_of(gone) is memory_of(gone, proportional=True) is None
    assert gone not in descendants()
