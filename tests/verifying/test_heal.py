"""Healing in whole sessions: tests that need bytes which the trace had not seen used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pytest_negativa.models.verdict import Witness
from tests.support.standin.standin_gpu import BESIDE, USED
from tests.support.verified import VerifiedProject

# What no test uses by the driver: the payload for sm_90 of the last region.
NEEDED = USED[3]
# The one for sm_100 beside it, which the driver would not choose for sm_90.
OTHER_ARCH = 75336
# A small element of the first region: it has no page of its own, so nobody sees it touched.
UNWATCHED = 13384
TOUCHED, REFUSED = Witness.TOUCHED.value, Witness.REFUSED.value
LIBRARIES = ("a.so", "b.so", "c.so")


def healed(project: VerifiedProject, *libraries: str) -> dict[str, dict[int, str]]:
    """What ``healed.json`` and the plans say was given back, and why."""
    found: dict[str, dict[int, str]] = {}
    spans: list[Any] = json.loads((project.run_folder / "healed.json").read_text())["rows"]
    for span in spans:
        name = Path(span["library"]).name
        found.setdefault(name, {})[span["spans"][0][0]] = span["witness"]
    for library in libraries or ("lib.so",):
        kept = {d[0] for d in project.plan(library) if d[3] == "healed"}
        assert kept == set(found.get(library, ()))
    return found


@pytest.mark.slow
def test_what_is_needed_is_given_back_and_kept(tmp_path: Path) -> None:
    suite = f"""
HERE = Path(__file__).parent

def test_use():
    for name in {LIBRARIES!r}:
        use(HERE / name)

def test_is_refused():
    if ROUND:
        use(HERE / "b.so", 3)

def test_reads():
    need(HERE / "a.so", {NEEDED})

def test_reads_another_arch():
    need(HERE / "c.so", {OTHER_ARCH})
"""
    project = VerifiedProject(tmp_path / "project", suite, *LIBRARIES).trace()
    shown = project.heal()

    assert "\nPROVED" in shown
    wanted = {
        "a.so": {BESIDE: TOUCHED, NEEDED: TOUCHED},
        "b.so": {BESIDE: TOUCHED, NEEDED: REFUSED},
        "c.so": {OTHER_ARCH: TOUCHED},
    }
    assert healed(project, *LIBRARIES) == wanted
    end = next(d[1] for d in project.plan("b.so") if d[0] == NEEDED)
    what = f"b.so [{NEEDED:#x}, {end:#x}): the driver refused it to test_a.py::test_is_refused"
    assert "Healing kept, from now on:\n" in shown and f"\n  {what}" in shown
    assert {s["library"] for s in project.needs(kept=True)} == {
        str(project.folder / name) for name in LIBRARIES
    }
    # All needs show in one run of the tests, and no rerun on the originals could excuse them.
    assert [r["kind"] for r in project.verdict["rounds"]] == ["verify", "verify"]

    # What reads the run later sees the same.
    assert "\nPROVED" in project.verify()
    before = {library: project.plan(library) for library in LIBRARIES}
    project.negativa("locate", "--run", project.run_folder)
    assert {library: project.plan(library) for library in LIBRARIES} == before
    assert healed(project, *LIBRARIES) == wanted


@pytest.mark.slow
def test_what_one_path_needs_all_paths_of_the_content_get_back(tmp_path: Path) -> None:
    suite = f"""
OTHER = LIB.with_name("other.so")

def test_use():
    use(LIB, 0)
    use(OTHER, 1)

def test_need():
    need(LIB, {NEEDED})
"""
    project = VerifiedProject(tmp_path / "project", suite)
    shutil.copy(project.folder / "lib.so", project.folder / "other.so")
    project.trace()
    assert "\nPROVED" in project.heal()
    assert healed(project, "lib.so", "other.so").keys() == {"lib.so", "other.so"}
    assert project.plan("lib.so") == project.plan("other.so")
    assert "1 library," in project.negativa("lock", "-o", "lock").stdout


@pytest.mark.slow
def test_nothing_is_healed_where_nothing_is_needed(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", "def test_use():\n    use(LIB)\n").trace()
    project.heal()
    assert project.needs() == []
    assert not (project.run_folder / "healed.json").exists()


# The first fails for the place of its library, the second for a need that no witness sees.
UNSEEN = f"""
def place(library):
    name = os.path.realpath(library)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in lines if line.endswith(name))

def test_place():
    use(LIB)
    assert place(LIB) == os.path.realpath(LIB)

def test_unwatched():
    need(LIB, {UNWATCHED})
"""


@pytest.mark.slow
def test_without_a_witness_nothing_is_given_back(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", UNSEEN).trace()
    before = project.plan("lib.so")
    shown = project.heal(status=1)
    assert "healing ended: no more removed code was refused or touched; mend what" in shown
    assert "NOT PROVED" in shown and "(keep.libraries)" in shown
    assert project.plan("lib.so") == before
    assert project.differing().keys() == {"test_place", "test_unwatched"}
    # The first test may not fail, and its library is needed as a whole.
    project.negativa("locate", "--run", project.run_folder, "--keep-library=lib.so")
    project.heal("-k", "test_unwatched", status=1)
    assert project.differing().keys() == {"test_place"}


@pytest.mark.slow
def test_what_others_need_is_given_back_beside_a_test_that_nothing_helps(tmp_path: Path) -> None:
    suite = f"{UNSEEN}\ndef test_need():\n    need(LIB, {NEEDED})\n"
    project = VerifiedProject(tmp_path / "project", suite).trace()
    shown = project.heal(status=1)
    assert "Healing kept, from now on:" in shown and "healing ended: no more removed" in shown
    assert healed(project) == {"lib.so": {BESIDE: TOUCHED, NEEDED: TOUCHED}}
    assert project.differing().keys() == {"test_place", "test_unwatched"}


@pytest.mark.nightly
def test_tests_that_cannot_be_collected_on_the_copies_are_healed(tmp_path: Path) -> None:
    suite = f"use(LIB, 3) if ROUND else None\n\ndef test_use():\n    use(LIB, {0})\n"
    project = VerifiedProject(tmp_path / "project", suite).trace()
    assert "\nPROVED" in project.heal()
    assert healed(project) == {"lib.so": {BESIDE: TOUCHED, NEEDED: REFUSED}}


@pytest.mark.nightly
def test_a_crash_is_healed_like_a_failure(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        """
def test_crashes():
    try:
        use(LIB, *([3] if ROUND else [0]))
    except RuntimeError:
        os.kill(os.getpid(), signal.SIGSEGV)

def test_use():
    use(LIB, 0)
""",
    ).trace()
    project.heal()
    assert healed(project) == {"lib.so": {BESIDE: TOUCHED, NEEDED: REFUSED}}


@pytest.mark.slow
def test_a_need_behind_another_one_has_a_turn_of_its_own(tmp_path: Path) -> None:
    """The verdict is that of the plan that is saved."""
    suite = """
def test_use():
    use(LIB, 0)

def test_in_turn():
    for region in (3, 2, 1) if ROUND else ():
        use(LIB, region)
"""
    project = VerifiedProject(tmp_path / "project", suite).trace()
    assert "\nPROVED" in project.heal()
    asked = dict.fromkeys(USED[1:], REFUSED)
    assert healed(project) == {"lib.so": asked | {BESIDE: TOUCHED}}
    assert [r["kind"] for r in project.verdict["rounds"]] == ["verify"] * len(USED)
