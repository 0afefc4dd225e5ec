"""What a log shows of a verification while it runs: stdout is a pipe."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.verified import VerifiedProject

pytestmark = pytest.mark.slow

# On the originals, a test waits until the reader of the log has seen why it runs. What it needs
# it reads so that no witness sees it.
SUITE = """
from standin_gpu import _address

def test_use():
    use(LIB, 0)
    while ROUND == "original" and not Path("seen").exists():
        time.sleep(0.01)
    if ROUND:
        with open("/proc/self/mem", "rb", 0) as memory:
            assert len(set(os.pread(memory.fileno(), 16, _address(LIB, USED[1])))) > 1
"""


@pytest.mark.nightly
def test_rounds_are_told_as_they_begin(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE).trace()
    words = ("-m", "pytest", "-q", "--negativa-verify")

    with project.start(sys.executable, *words) as session:
        assert session.stdout is not None
        told = []
        for line in session.stdout:
            told.append(line.rstrip("\n"))
            if line == "negativa: 1 test differs; running 1 test on the originals\n":
                project.write("seen", "")

    shown = [line for line in told if line.startswith("negativa: ")]
    assert shown[1] == "negativa: 1 test differs; running 1 test on the originals"
