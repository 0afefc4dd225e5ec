"""What Ctrl-C, SIGTERM and SIGHUP do to commands."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.libraries import MULTIARCH, NEGATIVA

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
def test_one_line_and_the_signal_as_status(number: signal.Signals) -> None:
    code = f"""
import os, click
from pytest_negativa.cli.main import main
@main.command()
def work():
    click.echo("half")
    os.kill(os.getpid(), {number})
    click.echo("whole")
main(["work"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 128 + number
    assert (done.stdout, done.stderr) == ("half\n", "negativa: interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_command(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
import psutil
from pytest_negativa.cli.main import ended_by_signals
from pytest_negativa.gpucode.mapping import MapRequest, map_libraries
from pytest_negativa.gpucode.workers import LocalProcesses
from pytest_negativa.models.library import Scope
paths = list(Path({str(tmp_path)!r}).iterdir())
workers = LocalProcesses(2)
with ended_by_signals():
    for _ in map_libraries(paths, MapRequest(Scope()), None, workers, min_parallel_size=0):
        print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
        os.kill(os.getpid(), {number})
"""
    for index in range(20):
        (tmp_path / f"{index}.so").write_bytes(MULTIARCH.read_bytes())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if number == signal.SIGTERM:
        assert (done.returncode, done.stderr) == (143, "negativa: interrupted\n")
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) >= 2
    running = [psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(running, timeout=60)
    assert left == []


def test_a_traced_program_may_end_by_itself(tmp_path: Path) -> None:
    script = "trap 'touch ended; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        [NEGATIVA, "trace", "--", "sh", "-c", script],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    _, errors = process.communicate()
    assert (process.returncode, errors) == (143, "negativa: interrupted\n")
    assert (tmp_path / "ended").exists()
