"""Sessions whose traced run watches the GPU code of libraries: who reads it uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.compiling import needs_compiler
from tests.support.faults import PlantedFault
from tests.support.paged import needs_page_watch
from tests.support.standin.standin_gpu import USED
from tests.support.verified import VerifiedProject

pytestmark = [needs_compiler, needs_page_watch]

READS = f"""
def test_use():
    use(LIB, 0)

def test_reads():
    need(LIB, {USED[3]})
"""


@pytest.mark.slow
def test_what_is_read_past_the_driver_is_kept(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", READS).trace("--negativa-cpu")
    kept = {d[0]: d[3] for d in project.plan("lib.so") if d[2]}
    assert kept[USED[0]] == "loaded" and kept[USED[3]] == "touched"
    assert USED[1] not in kept and USED[2] not in kept
