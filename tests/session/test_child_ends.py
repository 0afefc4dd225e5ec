"""How children of a process ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from pytest_negativa.session.outcome_recorder import ReportDetails


def test_children_that_fail_are_noted_however_they_are_started() -> None:
    ends = ReportDetails()
    ends.start()
    try:
        assert subprocess.run(["true"], check=True).returncode == 0
        assert subprocess.run("exit 3", shell=True).returncode == 3
        asyncio.run(_wait("false"))
        assert os.system("exec nproc --wrong 2>/dev/null") == 1 << 8
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            assert child.returncode is None
            child.terminate()
        crash = "import os; os.abort()"
        subprocess.run([sys.executable, "-c", crash], stderr=subprocess.DEVNULL)
        aborted = f"{Path(sys.executable).name} ended with -6"
        assert ends.take() == [
            "exec ended with 1",
            "exit ended with 3",
            "false ended with 1",
            aborted,
        ]
        assert ends.take() == []
    finally:
        ends.stop()
    ends.stop()
    assert os.system("exit 1") == 1 << 8
    assert subprocess.run(["false"]).returncode == 1 and child.returncode == -15
    assert ends.take() == []


def test_a_child_of_a_process_that_ignores_such_ends() -> None:
    """Its status is not known, and the test goes on with what it would get without us."""
    code = (
        "import os, signal; from pytest_negativa.session.outcome_recorder import ReportDetails; "
        "ends = ReportDetails(); ends.start(); signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "print(os.system('exit 1'), ends.take())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "-1 []\n"


async def _wait(program: str) -> None:
    process = await asyncio.create_subprocess_exec(program)
    assert await process.wait() == 1
