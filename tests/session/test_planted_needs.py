"""The benchmark that plants needs, with the stand-in for a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pytest_negativa.models.verdict import Witness
from tests.support.compiling import needs_compiler
from tests.support.libraries import ROOT
from tests.support.paged import needs_page_watch
from tests.support.sessions import import_path
from tests.support.standin.standin_gpu import USED
from tests.support.verified import STANDIN, VerifiedProject

TOUCHED = Witness.TOUCHED.value
SUITE = """
def test_use():
    use(LIB, 0)
"""
DRIVER = """
from pathlib import Path
import standin_gpu

LIB = Path(__file__).with_name("lib.so")

def load_module(image):
    return f"{len(image)} bytes of a fatbin {image[:4] == bytes.fromhex('50ed55ba')}"

def look_up(address, kernel):
    standin_gpu.use(LIB, standin_gpu.REGIONS.index(address - standin_gpu._address(LIB, 0)))
"""


@needs_compiler
@needs_page_watch
@pytest.mark.nightly
def test_planted_needs_are_seen_and_healed(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE)
    project.write("planted_driver.py", DRIVER)
    project.environ["PYTHONPATH"] = f"{import_path(STANDIN)}:{ROOT}"
    logs = tmp_path / "logs"
    command = (sys.executable, "-m", "benchmarks.planted_needs", project.folder)
    counts = ("--hidden=4", "--lto-ir=0", "--ordinary=1")
    words = ("--logs", logs, "--seed=23", *counts, "--tests", "test_a.py")
    shown = project.run(*command, *words).stdout

    record = json.loads((logs / "needs.json").read_text())
    *hidden, asked = record["needs"]
    seen = [(row["kind"], row["armed_bytes"] > 0, row["witnesses"]) for row in hidden]
    assert seen == [
        ("mapping", True, ["tripwire: element"]),
        # The page has its header, too, which it reads first.
        ("memory", True, ["tripwire: element", "tripwire: region"]),
        ("mapping", False, []),
        ("memory", False, []),
    ]
    assert [row["healed"] for row in hidden] == [TOUCHED, TOUCHED, None, None]
    assert "driver: cuLibraryGetKernel ended with error 209" in asked["witnesses"]
    assert asked["offset"] in USED and asked["healed"] is not None
    assert all(row["made"] for row in record["needs"])
    assert not record["proof"]["proved"] and record["healing"]["proved"]
    assert "an armed page: 2 of 2 seen by the tripwire, 2 healed" in shown
    assert "without one: 0 of 2 seen by any witness" in shown
    assert "ordinary needs: 1 of 1 refused by the driver's word" in shown
    # Nothing is planted when the suite is traced, and the suite stays as it is.
    assert "no round" not in (logs / "needs.log").read_text()
    assert not (project.folder / ".negativa").exists()
