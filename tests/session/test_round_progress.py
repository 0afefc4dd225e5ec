"""What a log shows of a verification while it runs: stdout is a pipe."""

from __future__ import annotations

import re
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

RERUN = "negativa: 1 test differs; running 1 test on the originals, up to 20 times"


@pytest.mark.nightly
def test_rounds_are_told_as_they_begin(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE).trace()
    words = ("-m", "pytest", "-q", "--negativa-verify")

    with project.start(sys.executable, *words) as session:
        assert session.stdout is not None
        told = []
        for line in session.stdout:
            told.append(line.rstrip("\n"))
            if line == f"{RERUN}\n":
                project.write("seen", "")

    shown = [line for line in told if line.startswith("negativa: ")]
    assert shown[1] == "negativa: running 1 test on the copies, 0 s when traced"
    assert shown[2] == RERUN


FOLDED = """
import warnings

def test_use():
    use(LIB)
    warnings.warn("of the suite")

class TestClass:
    @pytest.mark.parametrize("name", ["a::b"])
    def test_fails(self, name):
        print("captured")
        assert FAULT != "fails", "another outcome"

@pytest.fixture
def broken():
    assert FAULT != "fails", "of a fixture"

def test_setup(broken):
    pass

def test_fails_always():
    assert False, "known"

def test_crash():
    if FAULT == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def folded(tmp_path: Path) -> VerifiedProject:
    return VerifiedProject(tmp_path / "project", FOLDED)


def behind_the_traced_run(shown: str) -> list[str]:
    """Lines of the rounds of a session, without the verdict."""
    _, _, rounds = shown.partition("1 failed, 4 passed, 1 warning in ")
    return rounds.partition("= Verification (pytest-negativa) =")[0].splitlines()[1:-2]


@pytest.mark.parametrize("workers", [(), pytest.param(("-n2",), marks=pytest.mark.nightly)])
def test_a_round_that_ends_as_traced_is_two_lines(
    folded: VerifiedProject, workers: tuple[str, ...]
) -> None:
    options = ("--negativa", "--negativa-verify", "--negativa-rerun=2", *workers)
    shown = behind_the_traced_run(folded.pytest("-q", *options, status=1).stdout)
    assert [re.sub(r"\d+ s", "N s", line) for line in shown] == [
        "negativa: 1 library copied with 60.2 kB of GPU code overwritten",
        "negativa: running 5 tests on the copies, N s when traced",
        "negativa: 4 passed, 1 failed on the copies in N s",
        "negativa: 1 failed test may need more; running 1 test on the originals",
        "negativa: 1 failed on the originals in N s",
    ]
    [output] = folded.results.rglob("*-verify/output.txt")
    assert "UserWarning: of the suite" in output.read_text()
    assert "1 failed, 4 passed, 1 warning in " in output.read_text()


def test_a_round_that_differs_shows_its_last_lines(folded: VerifiedProject) -> None:
    options = ("--negativa", "--negativa-verify", "--negativa-rerun=0")
    done = folded.pytest("-q", *options, status=1, FAULT="fails")
    shown = "\n".join(behind_the_traced_run(done.stdout))
    [output] = folded.results.rglob("output.txt")
    counts = r"negativa: 2 passed, 2 failed, 1 error on the copies in \d+ s; output: "
    assert re.search(counts + re.escape(str(output.relative_to(folded.folder))), shown)
    assert "AssertionError: another outcome" in shown and "\ncaptured" in shown


def test_a_crash_shows_where_it_was(folded: VerifiedProject) -> None:
    options = ("--negativa", "--negativa-verify", "--negativa-rerun=0")
    done = folded.pytest("-q", *options, status=1, FAULT="crash")
    shown = behind_the_traced_run(done.stdout)
    [at] = (n for n, line in enumerate(shown) if "Fatal Python error: Segmentation" in line)
    assert any("1 crashed on the copies in" in line for line in shown[:at])
    assert any(line.endswith("in test_crash") for line in shown[at:])


@pytest.mark.nightly
@pytest.mark.parametrize("option", ["-s", "--capture=tee-sys"])
def test_output_that_the_user_wants_to_see_is_shown(folded: VerifiedProject, option: str) -> None:
    done = folded.pytest("-q", "--negativa", "--negativa-verify", option, status=1)
    assert done.stdout.count("\n1 failed, 4 passed, 1 warning in ") == 2
    assert not [*folded.results.rglob("output.txt")]
