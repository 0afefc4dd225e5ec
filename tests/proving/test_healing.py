"""Healing in whole sessions: tests that need bytes which the trace had not seen used."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.verified import VerifiedProject, spawn

# Payloads of libquickstart.so that an H200 does not load: sm_75 and sm_80 of the first region,
# sm_100 and PTX of the second, sm_75 of the third.
HIDDEN = (13384, 14992, 35448, 43448, 46168)
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
    spans: list[Any] = json.loads((project.run_folder / "healed.json").read_text())
    for span in spans:
        found.setdefault(Path(span["library"]).name, set()).add(span["start"])
    for library in LIBRARIES:
        kept = {d[0] for d in project.plan(library) if d[3] == "healed"}
        assert kept == found.get(library, set())
    return found


def probes(project: VerifiedProject) -> int:
    return sum(r["kind"] == "probe" for r in project.verdict["rounds"])


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
    project.negativa("locate", project.run_folder)
    assert {library: project.plan(library) for library in LIBRARIES} == before
    healed(project)


def test_nothing_is_healed_where_nothing_is_needed(tmp_path: Path) -> None:
    project = project_with(tmp_path, {})
    project.heal()
    assert project.verdict["healing"] is None and probes(project) == 0
    assert not (project.run_folder / "healed.json").exists()


def test_a_test_that_fails_on_the_originals_too_is_not_healed(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        "def test_use():\n    use(LIB)\n\ndef test_fails_now():\n    assert not ROUND\n",
    ).trace()
    before = project.plan("lib.so")
    shown = project.heal(status=1)
    assert "nothing that was removed is the cause" in shown and "NOT PROVED" in shown
    assert project.plan("lib.so") == before and probes(project) == 0


def test_a_limit_leaves_a_plan_that_is_proved_and_healing_goes_on(tmp_path: Path) -> None:
    project = project_with(tmp_path, {"b.so": HIDDEN[:2]})
    shown = project.heal("--negativa-heal-runs=3")
    assert "a limit was reached" in shown and "\nPROVED" in shown
    assert not project.verdict["healing"]["complete"] and probes(project) == 3
    kept = sum(d[3] == "healed" for library in LIBRARIES for d in project.plan(library))
    assert 2 < kept < 75, "the best set so far"


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    project = project_with(tmp_path, {"c.so": HIDDEN[:1]})
    plans = {library: project.plan(library) for library in LIBRARIES}
    state = project.run_folder / "healing.jsonl"
    session = spawn(project, sys.executable, "-m", "pytest", "-q", "--negativa-heal")
    while not state.exists() or state.read_bytes().count(b"\n") < 3:
        assert session.poll() is None
        time.sleep(0.02)
    session.send_signal(signal.SIGTERM)
    shown, _ = session.communicate(timeout=30)
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
