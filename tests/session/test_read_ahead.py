"""While tests are traced for a proof, the libraries that they load are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.verified import VerifiedProject

SUITE = """
def test_use():
    use(LIB, 0)

def test_later():
    # Its report, which reads libraries, comes after the tests.
    cache, end = Path(os.environ["NEGATIVA_CACHE_DIR"]), time.monotonic() + 60
    while ROUND != "verify" and not [p for p in cache.rglob("*") if p.is_file()]:
        assert time.monotonic() < end, "nothing was read"
        time.sleep(0.1)
"""


@pytest.mark.slow
def test_maps_are_made_while_the_tests_run(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE)
    # Maps of smaller libraries are not kept.
    with (project.folder / "lib.so").open("ab") as library:
        library.write(bytes(1 << 20))
    assert "\nPROVED" in project.verify("--negativa")


PRIORITIES = """
import os, threading
from pytest_negativa.gpucode.workers import LocalProcesses, run_tasks, start_server

def priorities(lower):
    if lower:
        start_server()
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    print(*{found for _, found in run_tasks(LocalProcesses(2), os.nice, [0, 0], 2)})

if __name__ == "__main__":
    thread = threading.Thread(target=priorities, args=[True])
    thread.start()
    thread.join()
    priorities(False)
"""


def test_workers_have_the_priority_of_who_asks(tmp_path: Path) -> None:
    """Those of the report are as urgent as ever."""
    script = tmp_path / "priorities.py"
    script.write_text(PRIORITIES)
    own = int(subprocess.check_output(["nice"]))
    assert subprocess.check_output([sys.executable, script], text=True) == f"19\n{own}\n"
