"""Memory of process trees, of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pytest_negativa.measuring.nvml import Gpus
from pytest_negativa.measuring.sampler import MeasureError, SampledRun, run_sampled
from pytest_negativa.processes.tree import (
    MemoryPeaks,
    adopt_orphans,
    descendants,
    proportional_bytes,
    resident_bytes,
)

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
    assert resident_bytes(gone) == 0
    assert proportional_bytes(gone) is None
    assert gone not in descendants()


def run(tmp_path: Path, code: str, interval: float = 0.005) -> SampledRun:
    return run_sampled(
        [sys.executable, "-c", code],
        os.environ,
        output=tmp_path / "log",
        first_result=tmp_path / "mark",
        gpus=Gpus(),
        interval=interval,
    )


def test_peaks_of_a_run(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys, time
code = "import time; x = bytearray(b'1') * {ALLOCATED}; time.sleep(2)"
subprocess.run([sys.executable, "-c", code])
"""
    sampled = run(tmp_path, code)
    assert sampled.status == 0
    assert sampled.wall_s >= 2
    assert ALLOCATED < sampled.memory.rss < ALLOCATED + 3 * INTERPRETER
    assert sampled.memory.pss is not None
    assert ALLOCATED < sampled.memory.pss <= sampled.memory.rss
    assert len(sampled.memory.seen) == 2
    assert sampled.first_result_s is None
    assert sampled.outlived == 0


def test_the_kernel_counts_peaks_between_two_samples(tmp_path: Path) -> None:
    size = 4 * ALLOCATED
    sampled = run(tmp_path, f"x = bytearray(b'1') * {size}; del x", interval=10)
    # Only if it is more than this test's own process ever had.
    assert sampled.root_max_rss_bytes is not None
    assert size < sampled.root_max_rss_bytes < size + INTERPRETER


def test_output_and_status(tmp_path: Path) -> None:
    code = "import sys; print(sys.stdin.read() or 'nothing'); sys.stderr.write('e'); sys.exit(3)"
    assert run(tmp_path, code).status == 3
    assert sorted((tmp_path / "log").read_text()) == sorted("nothing\ne")
    assert run(tmp_path, "import os; os.kill(os.getpid(), 9)").status == -9


def test_the_time_of_the_first_result(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = (
        f"import time; time.sleep(.3); open({str(mark)!r}, 'w').write(f'{{time.monotonic_ns()}}%s')"
    )
    sampled = run(tmp_path, code % "\\n")
    assert sampled.first_result_s is not None
    assert 0.3 < sampled.first_result_s < sampled.wall_s
    # Half a number, as a process leaves it that is killed in its write.
    assert run(tmp_path, code % "").first_result_s is None


def test_orphans_are_seen_and_ended(tmp_path: Path) -> None:
    assert adopt_orphans()
    code = """
import os, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
os.wait()
time.sleep(.3)
"""
    sampled = run(tmp_path, code)
    assert sampled.outlived == 1
    assert not set(sampled.memory.seen) & {p.pid for p in descendants()}


def test_processes_of_others_are_left_alone(tmp_path: Path) -> None:
    with python("import sys; print(1, flush=True); sys.stdin.read()") as other:
        sampled = run(tmp_path, "import time; time.sleep(.1)")
        assert other.pid not in sampled.memory.seen
        assert other.poll() is None


def test_no_such_command(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match=r"no-such: cannot be started: No such file"):
        run_sampled(
            [str(tmp_path / "no-such")], os.environ, output=tmp_path / "log",
            first_result=tmp_path / "mark", gpus=Gpus(), interval=1,
        )  # fmt: skip
