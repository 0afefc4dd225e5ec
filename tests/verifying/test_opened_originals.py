"""What follows if a process opens an original while the tests run on the copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.processes.open_watch import Opens
from pytest_negativa.verifying.opened_originals import opened_originals
from tests.support.faults import PlantedFault
from tests.support.verified import VerifiedProject

CHILD = """
CODE = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"

def test_use():
    use(LIB)

def test_child():
    child = [sys.executable, "-c", CODE, str(LIB)]
    if FAULT == "environment":
        assert f" {LIB.resolve()}\\n" in subprocess.check_output(child, text=True, env={})
    else:
        assert ".negativa/" in subprocess.check_output(child, text=True) or ROUND != "verify"
    if FAULT == "read":
        LIB.read_bytes()
"""


def test_each_round_counts_and_the_first_finding_is_told() -> None:
    unseen = Opens(unseen={"/a.so": "no descriptors", "/b.so": "no descriptors"})
    opened = Opens(times={"/a.so": 1, "/c.so": 2}, openers={"/c.so": ("process 7 (/bin/x)",)})
    found = opened_originals([opened, unseen])
    assert found.keys() == {"/a.so", "/b.so", "/c.so"}
    assert "opened the original 1 time while" in found["/a.so"]
    assert "its opener is unknown" in found["/a.so"]
    assert "nothing tells whether" in found["/b.so"] and "no descriptors" in found["/b.so"]
    assert "2 times" in found["/c.so"]
    assert "process 7 (/bin/x) had it open or mapped then" in found["/c.so"]
    assert all("set verify.opened_originals to note" in text for text in found.values())
    assert opened_originals([Opens()]) == {}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> VerifiedProject:
    return VerifiedProject(tmp_path_factory.mktemp("opened") / "project", CHILD).trace()


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test starts a child process with an emptied environment, which runs on the original.",
    says="a process opened the original 1 time while the tests ran on the copies",
)
def test_a_child_with_an_emptied_environment(traced: VerifiedProject, fault: PlantedFault) -> None:
    fault.check(traced.verify(status=1, FAULT="environment"))
    status, detail = traced.statuses()["lib.so"]
    assert status == "not proved" and "pass the environment on" in str(detail)
    assert traced.differing() == {}


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test reads an original by itself, as cuModuleLoad of a path does.",
    says="a process opened the original 1 time while the tests ran on the copies (its opener is",
)
def test_a_test_that_reads_the_original(traced: VerifiedProject, fault: PlantedFault) -> None:
    fault.check(traced.verify(status=1, FAULT="read"))


@pytest.mark.slow
def test_a_setting_makes_it_a_note(traced: VerifiedProject) -> None:
    shown = traced.verify("--negativa-opened-originals=note", FAULT="environment")
    assert "\nPROVED" in shown and "lib.so: a process opened the original 1 time" in shown
    [row] = traced.verdict["libraries"]
    assert row["status"] == "proved" and "opened the original" in row["notes"][-1]


@pytest.mark.slow
def test_our_own_work_opens_no_original(traced: VerifiedProject) -> None:
    """Nor does a child that inherits the environment."""
    assert "\nPROVED" in traced.verify()
    assert traced.verdict["libraries"][0]["notes"] == []
    assert Path(traced.verdict["libraries"][0]["path"]).is_file()
