"""A run of a real program, sampled."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from pytest_negativa.measuring.sampler import Gpus, MeasureError, run_sampled
from pytest_negativa.models.measurement import Loading, RunFigures, Variant
from pytest_negativa.processes.programs import adopt_orphans, descendants
from tests.support.pythons import ALLOCATED, INTERPRETER, python

BLANK = RunFigures(variant=Variant.SLIM, loading=Loading.LAZY, warm_up=False, pair=1)


def run(tmp_path: Path, code: str, interval: float = 0.005) -> RunFigures:
    return run_sampled(
        BLANK,
        [sys.executable, "-c", code],
        os.environ,
        output=tmp_path / "log",
        first_result=tmp_path / "mark",
        gpus=Gpus(),
        interval=interval,
    )


@pytest.mark.slow
def test_peaks_of_a_run(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys, time
code = "import time; x = bytearray(b'1') * {ALLOCATED}; time.sleep(2)"
subprocess.run([sys.executable, "-c", code])
"""
    sampled = run(tmp_path, code)
    assert sampled.status == 0
    assert sampled.wall_s >= 2
    assert sampled.peak_rss_bytes is not None and sampled.peak_pss_bytes is not None
    assert sampled.peak_rss_bytes < ALLOCATED + 3 * INTERPRETER
    assert ALLOCATED < sampled.peak_pss_bytes <= sampled.peak_rss_bytes
    assert sampled.processes == 2
    assert sampled.first_result_s is None
    assert sampled.outlived == 0


@pytest.mark.slow
def test_the_kernel_counts_what_lasts_too_short_to_be_seen(tmp_path: Path) -> None:
    # Only if it is more than this test's own process ever had.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = own + 2 * ALLOCATED
    sampled = run(tmp_path, f"x = bytearray(b'1') * {size}; del x", interval=1000)
    assert sampled.root_max_rss_bytes is not None
    assert size < sampled.root_max_rss_bytes < size + INTERPRETER
    assert sampled.peak_rss_bytes == sampled.root_max_rss_bytes


@pytest.mark.slow
def test_output_and_status(tmp_path: Path) -> None:
    code = "import sys; print(sys.stdin.read() or 'nothing'); sys.stderr.write('e'); sys.exit(3)"
    assert run(tmp_path, code).status == 3
    assert sorted((tmp_path / "log").read_text()) == sorted("nothing\ne")
    assert run(tmp_path, "import os; os.kill(os.getpid(), 9)").status == -9


@pytest.mark.slow
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


@pytest.mark.slow
def test_orphans_are_seen_and_ended(tmp_path: Path) -> None:
    adopt_orphans()
    code = """
import os, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
os.wait()
time.sleep(.3)
"""
    # Other tests in this process may have left a pool, for example.
    before = {*descendants()}
    sampled = run(tmp_path, code)
    assert sampled.outlived == 1
    assert before.issuperset(descendants())


@pytest.mark.slow
def test_processes_of_others_are_left_alone(tmp_path: Path) -> None:
    with python("import sys; print(1, flush=True); sys.stdin.read()") as other:
        sampled = run(tmp_path, "import time; time.sleep(.1)")
        assert sampled.processes == 1
        assert other.poll() is None


@pytest.mark.slow
def test_no_such_command(tmp_path: Path) -> None:
    with pytest.raises(MeasureError, match=r"no-such: cannot be started: No such file"):
        run_sampled(
            BLANK, [str(tmp_path / "no-such")], os.environ, output=tmp_path / "log",
            first_result=tmp_path / "mark", gpus=Gpus(), interval=1,
        )  # fmt: skip
