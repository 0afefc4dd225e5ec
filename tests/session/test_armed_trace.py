"""Sessions whose traced run watches the GPU code of libraries: who reads it uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.compiling import needs_compiler
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


MEMO = """
def test_use():
    use(LIB, 0)

def test_remembers():
    memo = Path("memo")
    if not memo.exists():
        use(LIB, 1)
        memo.touch()
"""
CACHE = """
def test_use():
    use(LIB, 0)

def test_remembers(request):
    if request.config.cache.get("fastest", None) is None:
        use(LIB, 1)
        request.config.cache.set("fastest", 1)
"""
AUTOTUNER = """
def test_use():
    use(LIB, 0)

def test_tunes():
    use(LIB, 0 if ROUND == "verify" else 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("suite", [MEMO, CACHE, AUTOTUNER], ids=["memo", "cache", "autotuner"])
@pytest.mark.parametrize("granularity", ["element", "kernel"])
def test_work_that_is_not_repeated_needs_no_rerun(
    tmp_path: Path, suite: str, granularity: str
) -> None:
    project = VerifiedProject(tmp_path / "project", suite)
    project.write("negativa.yaml", f"granularity: {granularity}\n")
    project.trace("--negativa-cpu")
    before = {d[0] for d in project.plan("lib.so") if not d[2]}
    shown = project.verify()
    assert "\nPROVED" in shown and "not repeated: its images stay whole" in shown
    assert [r["kind"] for r in project.verdict["rounds"]] == ["verify"]
    after = {d[0] for d in project.plan("lib.so") if not d[2]}
    print(before, after, before - after)
    assert 0
