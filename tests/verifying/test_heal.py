"""Healing in whole sessions: tests that need bytes which the trace had not seen used."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.verified import VerifiedProject, spawn

# Payloads of libquickstart.so that an H200 does not load: sm_75 and sm_80 of the first region,
# sm_100 and PTX of the second, sm_75 of the third.
HIDDEN = (13384, 14992, 35448, 43448, 46168)
LATER = 48872
LIBRARIES = ("a.so", "b.so", "c.so")


def project_with(folder: Path, needed: dict[str, tuple[int, ...]]) -> VerifiedProject:
    """Three libraries that are used, and a test for each part that is needed besides."""
    rows = [(library, start) for library, starts in needed.items() for start in starts]
    suite = f"""
HERE = Path(__file__).parent

def test_use():
    for name in {LIBRARIES!r}:
        use(HERE / name)

@pytest.mark.parametrize(("library", "start"), {rows!r})
def test_need(library, start):
    need(HERE / library, start)
"""
    return VerifiedProject(folder / "project", suite, *LIBRARIES).trace()


def healed(project: VerifiedProject) -> dict[str, set[int]]:
    """Spans that the verdict, ``healed.json`` and the plans say were given back."""
    found: dict[str, set[int]] = {}
    spans: list[Any] = json.loads((project.run_folder / "healed.json").read_text())["rows"]
    for span in spans:
        found.setdefault(Path(span["library"]).name, set()).add(span["start"])
    for library in LIBRARIES:
        kept = {d[0] for d in project.plan(library) if d[3] == "healed"}
        assert kept == found.get(library, set())
    return found


def probes(project: VerifiedProject) -> int:
    return sum(r["kind"] == "probe" for r in project.verdict["rounds"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "needed",
    [{"b.so": HIDDEN[:1]}, {"a.so": HIDDEN[1:2], "c.so": (HIDDEN[2], HIDDEN[4])}],
    ids=["one", "three"],
)
def test_what_is_needed_is_found_and_kept(
    tmp_path: Path, needed: dict[str, tuple[int, ...]]
) -> None:
    project = project_with(tmp_path, needed)
    shown = project.heal()

    assert "\nPROVED" in shown
    assert healed(project) == {library: set(starts) for library, starts in needed.items()}
    verdict = project.verdict
    assert verdict["healing"]["complete"] and verdict["healing"]["runs"] == probes(project)
    tests = {Path(s["library"]).name: s["test"] for s in verdict["healing"]["needed"]}
    for library, starts in needed.items():
        assert f"test_need[{library}-" in tests[library]
        for start in starts:
            assert f"needed by test_a.py::test_need[{library}-{start}], found by bisection" in shown

    # What reads the run later sees the same.
    again = project.verify()
    assert "\nPROVED" in again
    before = {library: project.plan(library) for library in LIBRARIES}
    project.negativa("locate", "--run", project.run_folder)
    assert {library: project.plan(library) for library in LIBRARIES} == before
    healed(project)


@pytest.mark.nightly
def test_what_one_path_needs_all_paths_of_the_content_get_back(tmp_path: Path) -> None:
    suite = f"""
OTHER = LIB.with_name("other.so")

def test_use():
    use(LIB, 0)
    use(OTHER, 1)

def test_need():
    need(LIB, {HIDDEN[0]})
"""
    project = VerifiedProject(tmp_path / "project", suite)
    shutil.copy(project.folder / "lib.so", project.folder / "other.so")
    project.trace()
    assert "\nPROVED" in project.heal()
    plans = [project.plan(name) for name in ("lib.so", "other.so")]
    assert plans[0] == plans[1]
    assert [d[0] for d in plans[0] if d[3] == "healed"] == [HIDDEN[0]]
    assert "1 library," in project.negativa("lock", "-o", "lock").stdout


@pytest.mark.slow
def test_nothing_is_healed_where_nothing_is_needed(tmp_path: Path) -> None:
    project = project_with(tmp_path, {})
    project.heal()
    assert project.verdict["healing"] is None and probes(project) == 0
    assert not (project.run_folder / "healed.json").exists()


@pytest.mark.slow
def test_a_test_that_fails_on_the_originals_too_is_not_healed(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        "def test_use():\n    use(LIB)\n\ndef test_fails_now():\n    assert not ROUND\n",
    ).trace()
    before = project.plan("lib.so")
    # Reruns would call it flaky.
    shown = project.heal("--negativa-rerun=0", status=1)
    assert "no removed code is the cause" in shown and "NOT PROVED" in shown
    assert project.plan("lib.so") == before and probes(project) == 0


@pytest.mark.nightly
def test_a_limit_leaves_a_plan_that_is_proved_and_healing_goes_on(tmp_path: Path) -> None:
    project = project_with(tmp_path, {"b.so": HIDDEN[:2]})
    shown = project.heal("--negativa-heal-runs=3")
    assert "a limit was reached" in shown and "\nPROVED" in shown
    assert not project.verdict["healing"]["complete"] and probes(project) == 3
    unfinished = healed(project)
    kept = sum(map(len, unfinished.values()))
    assert 2 < kept < 75, "the best set so far"
    # No more is claimed than is known.
    assert "found by bisection" not in shown
    assert f"{kept} parts kept for now: the search for what is needed is not finished" in shown
    reasons = {d[4] for library in LIBRARIES for d in project.plan(library) if d[3] == "healed"}
    assert reasons == {"kept: the search for what is needed is not finished"}
    spans = json.loads((project.run_folder / "healed.json").read_text())["rows"]
    assert {span["complete"] for span in spans} == {False}
    # Planning again keeps it all the same.
    project.negativa("locate", "--run", project.run_folder)
    assert healed(project) == unfinished

    shown = project.heal()
    assert f"searching {kept} removed parts" not in shown and "\nPROVED" in shown
    assert f"of them {kept}, kept by an unfinished search, first" in shown
    assert healed(project) == {"b.so": set(HIDDEN[:2])}
    assert project.verdict["healing"]["complete"]
    # Half of the set at a time: a search of all that was removed takes longer.
    assert probes(project) <= 12
    assert "\nPROVED" in project.verify()


@pytest.mark.nightly
def test_what_an_unfinished_search_kept_is_let_go_where_nothing_needs_it(tmp_path: Path) -> None:
    project = project_with(tmp_path, {"b.so": HIDDEN[:1]})
    before = {library: project.plan(library) for library in LIBRARIES}
    project.heal("--negativa-heal-runs=2")
    assert healed(project)
    suite = project.folder / "test_a.py"
    suite.write_text(suite.read_text().replace("    need(HERE / library, start)", "    pass"))
    shown = project.heal()
    assert "the tests don't need what an unfinished search had kept" in shown
    assert "\nPROVED" in shown
    assert {library: project.plan(library) for library in LIBRARIES} == before
    assert healed(project) == {}


@pytest.mark.nightly
def test_a_plan_that_changed_keeps_what_an_unfinished_search_had_kept(tmp_path: Path) -> None:
    project = project_with(tmp_path, {"b.so": HIDDEN[:1]})
    project.heal("--negativa-heal-runs=2")
    kept = healed(project)
    project.negativa("locate", "--run", project.run_folder, "--keep-library=a.so")
    shown = project.heal()
    assert "the plan has changed since an unfinished search" in shown
    assert "\nPROVED" in shown
    assert {d[0] for d in project.plan("b.so") if d[3] == "healed"} == kept["b.so"]


LOCATED = """
def place(library):
    name = os.path.realpath(library)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in lines if line.endswith(name))

def test_place():
    use(LIB)
    assert place(LIB) == os.path.realpath(LIB)
"""


@pytest.mark.nightly
def test_a_test_that_fails_for_the_place_of_its_library_gets_nothing_back(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", LOCATED).trace()
    before = project.plan("lib.so")
    shown = project.heal(status=1)
    assert "the tests fail whenever their libraries lie in another folder: no removed" in shown
    assert "NOT PROVED" in shown
    assert project.plan("lib.so") == before and probes(project) == 0


@pytest.mark.slow
def test_what_others_need_is_found_beside_a_test_that_nothing_helps(tmp_path: Path) -> None:
    suite = f"{LOCATED}\ndef test_need():\n    need(LIB, {HIDDEN[0]})\n"
    project = VerifiedProject(tmp_path / "project", suite).trace()
    shown = project.heal(status=1)
    assert "1 of 2 failing tests get nothing back: the tests fail whenever" in shown
    assert [d[0] for d in project.plan("lib.so") if d[3] == "healed"] == [HIDDEN[0]]
    assert project.differing() == {"test_place": ("passed", "failed")}


@pytest.mark.slow
def test_tests_that_cannot_be_collected_on_the_copies_are_healed(tmp_path: Path) -> None:
    suite = f"need(LIB, {HIDDEN[0]})\n\ndef test_use():\n    use(LIB)\n"
    project = VerifiedProject(tmp_path / "project", suite).trace()
    shown = project.heal()
    assert "\nPROVED" in shown
    assert [d[0] for d in project.plan("lib.so") if d[3] == "healed"] == [HIDDEN[0]]


@pytest.mark.slow
def test_it_is_said_why_nothing_is_searched(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", "def test_use():\n    use(LIB)\n").trace()
    shown = project.heal(status=1, STANDIN_DEVICE="8.0")
    assert "no test of the traced run fails on the copies: nothing to search" in shown


def plan_anew(project: VerifiedProject) -> None:
    """The same run without what healing gave back."""
    (project.run_folder / "healed.json").unlink()
    project.negativa("locate", "--run", project.run_folder)


NEEDS_ONE = f"""
def test_use():
    use(LIB)

def test_need():
    need(LIB, {HIDDEN[0]})
"""


@pytest.mark.nightly
def test_answers_for_other_tests_are_forgotten(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", NEEDS_ONE).trace()
    project.heal()
    plan_anew(project)
    # A test of that name needs something else now.
    file = project.folder / "test_a.py"
    file.write_text(file.read_text().replace(str(HIDDEN[0]), str(HIDDEN[1])))
    assert "\nPROVED" in project.heal()
    assert [d[0] for d in project.plan("lib.so") if d[3] == "healed"] == [HIDDEN[1]]


@pytest.mark.nightly
def test_answers_hold_as_long_as_nothing_that_they_depend_on_changes(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", NEEDS_ONE).trace()
    project.heal()
    asked = probes(project)
    assert asked
    plan_anew(project)
    project.heal()
    assert probes(project) == 0
    plan_anew(project)
    project.heal(CUDA_MODULE_LOADING="EAGER")
    assert probes(project) == asked
    plan_anew(project)
    project.write("conftest.py", "")
    project.heal(CUDA_MODULE_LOADING="EAGER")
    assert probes(project) == asked


# What the second test needs shows up when the first one's search is over.
IN_TURN = f"""
def test_use():
    use(LIB)

def test_one():
    need(LIB, {HIDDEN[0]})

def test_two():
    try:
        need(LIB, {HIDDEN[0]})
    except RuntimeError:
        return
    need(LIB, {HIDDEN[1]})
"""


@pytest.mark.nightly
def test_limits_hold_for_all_turns_together(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", IN_TURN).trace()
    project.heal()
    alone = probes(project)
    assert [d[0] for d in project.plan("lib.so") if d[3] == "healed"] == list(HIDDEN[:2])
    again = VerifiedProject(tmp_path / "limited" / "project", IN_TURN).trace()
    shown = again.heal(f"--negativa-heal-runs={alone - 1}")
    assert probes(again) == alone - 1 == again.verdict["healing"]["runs"]
    assert "a limit was reached" in shown and "\nPROVED" in shown


@pytest.mark.nightly
def test_the_verdict_is_of_the_plan_that_is_saved(tmp_path: Path) -> None:
    # One turn more than there are would be needed.
    tests = "".join(
        f"""
def test_{i}():
    try:
        for start in {HIDDEN[:i]!r}:
            need(LIB, start)
    except RuntimeError:
        return
    need(LIB, {start})
"""
        for i, start in enumerate((*HIDDEN, LATER))
    )
    project = VerifiedProject(tmp_path / "project", f"def test_use():\n    use(LIB)\n{tests}")
    project.trace()
    shown = project.heal(status=1)
    assert "tests still fail after 5 searches; heal again to go on" in shown
    assert {d[0] for d in project.plan("lib.so") if d[3] == "healed"} == set(HIDDEN)
    assert project.differing() == {"test_5": ("passed", "failed")}
    assert "\nPROVED" in project.heal()


@pytest.mark.nightly
def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    project = project_with(tmp_path, {"c.so": HIDDEN[:1]})
    plans = {library: project.plan(library) for library in LIBRARIES}
    state = project.run_folder / "healing.jsonl"
    session = spawn(project, sys.executable, "-m", "pytest", "-q", "--negativa-heal")
    while not state.exists() or state.read_bytes().count(b"\n") < 3:
        assert session.poll() is None
        time.sleep(0.02)
    session.send_signal(signal.SIGTERM)
    shown, _ = session.communicate(timeout=120)
    assert session.returncode == 128 + signal.SIGTERM
    assert "interrupted (SIGTERM)" in shown and "PROVED" not in shown
    assert {library: project.plan(library) for library in LIBRARIES} == plans
    answers = state.read_bytes().count(b"\n") - 1
    # The last line may be torn.
    with state.open("ab") as file:
        file.write(b'{"kept":"')

    project.heal()
    assert healed(project) == {"c.so": {HIDDEN[0]}}
    # No question was asked twice.
    asked = [json.loads(line)["kept"] for line in state.read_text().splitlines()[1:]]
    assert len(asked) == len(set(asked)) == answers + probes(project)
    assert answers >= 2


@pytest.mark.nightly
def test_a_crash_is_healed_like_a_failure(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        f"""
def test_crashes():
    try:
        need(LIB, {HIDDEN[0]})
    except RuntimeError:
        os.kill(os.getpid(), signal.SIGSEGV)

def test_use():
    use(LIB)
""",
    ).trace()
    project.heal()
    assert [d[0] for d in project.plan("lib.so") if d[3] == "healed"] == [HIDDEN[0]]


@pytest.mark.slow
def test_a_test_that_goes_on_without_the_gpu_is_healed(tmp_path: Path) -> None:
    """Its outcome is that of the traced run: only what it uses tells that it needs something."""
    project = VerifiedProject(
        tmp_path / "project",
        f"""
def test_use():
    use(LIB, 0)

def test_falls_back():
    try:
        need(LIB, {HIDDEN[0]})
        use(LIB, 1)
    except RuntimeError:
        pass
""",
    ).trace()
    shown = project.heal("--negativa-rerun=1")
    assert "\nPROVED" in shown and project.verdict["work"] == []
    assert [d[0] for d in project.plan("lib.so") if d[3] == "healed"] == [HIDDEN[0]]
    assert "needed by test_a.py::test_falls_back, found by bisection" in shown
