"""Traced, verified and healed sessions are killed, or meet a full disk, at their changes of files.

Whatever happens, originals stay as they are, no wrong proof comes of it, and the next try succeeds.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.support.faults import PlantedFault
from tests.support.kills import FULL_DISK, MOST, Ended, points, run
from tests.support.sites import digests
from tests.support.standin.standin_gpu import USED
from tests.support.verified import VerifiedProject

pytestmark = pytest.mark.slow

HOW = pytest.mark.parametrize(
    "by",
    [
        signal.SIGKILL,
        *(
            pytest.param(by, marks=pytest.mark.nightly)
            for by in (signal.SIGTERM, signal.SIGINT, FULL_DISK)
        ),
    ],
    ids=str,
)
# The payload for sm_90 of the region that no test uses: the plan calls it unused.
HIDDEN = USED[3]

SUITE = f"""
def test_use():
    use(LIB)

def test_plain():
    pass

@pytest.mark.skipif("NEED" not in os.environ, reason="needs nothing")
def test_need():
    need(LIB, {HIDDEN})
"""


class Disturbed:
    """A project, and sessions of it that are disturbed."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.project = VerifiedProject(folder / "project", SUITE)
        self.project.environ.update(environ)
        self.before = digests(self.project.folder)

    def session(self, *flags: str, at: int = 0, by: int = signal.SIGKILL) -> Ended:
        ended = run(
            [sys.executable, "-m", "pytest", "-q", *flags],
            self.project.results,
            at=at,
            by=by,
            env=self.project.environ,
            cwd=self.project.folder,
            # pytest shows where a hook was interrupted.
            last_words="KeyboardInterrupt" if by == signal.SIGINT else "",
        )
        found = digests(self.project.folder)
        assert {name: found.get(name) for name in self.before} == self.before
        if "\nPROVED" in ended.stdout:
            # What says so is on the disk.
            assert self.project.verdict["proved"]
        return ended

    def unused_bytes(self) -> int:
        decisions = self.project.plan("lib.so")
        return sum(end - start for start, end, kind, *_ in decisions if kind == "unused")


@HOW
def test_a_disturbed_trace_plans_no_more_than_a_whole_one(tmp_path: Path, by: int) -> None:
    disturbed = Disturbed(tmp_path)
    whole = disturbed.session("--negativa")
    assert whole.status == 0
    unused = disturbed.unused_bytes()
    for at in points(whole.changes, by, MOST // 5):
        ended = disturbed.session("--negativa", at=at, by=by)
        if by != FULL_DISK:
            assert ended.status != 0 or ended.changes < at
        if disturbed.project.planned():
            assert disturbed.unused_bytes() <= unused
    assert disturbed.session("--negativa").status == 0
    assert disturbed.unused_bytes() == unused


@pytest.mark.nightly
@HOW
def test_a_disturbed_proof_is_none_and_the_next_one_succeeds(tmp_path: Path, by: int) -> None:
    disturbed = Disturbed(tmp_path)
    disturbed.project.trace()
    whole = disturbed.session("--negativa-verify")
    assert whole.status == 0
    for at in points(whole.changes, by, MOST // 5):
        ended = disturbed.session("--negativa-verify", at=at, by=by)
        if by != FULL_DISK:
            assert ended.status != 0 or ended.changes < at
        assert ended.status != 0 or "\nPROVED" in ended.stdout
        assert disturbed.session("--negativa-verify").status == 0


@pytest.mark.planted_fault(
    "A session that heals is killed, and the run that it was to prove is locked.",
    says="this run is not proved: it was not verified",
)
def test_a_run_whose_healing_was_killed(tmp_path: Path, fault: PlantedFault) -> None:
    disturbed = Disturbed(tmp_path)
    disturbed.project.environ["NEED"] = "1"
    disturbed.project.trace()
    ended = disturbed.session("--negativa-heal", at=9)
    assert ended.status == -signal.SIGKILL
    fault.check(disturbed.project.negativa("lock", status=1).stderr)


@pytest.mark.nightly
@HOW
def test_disturbed_healing_goes_on(tmp_path: Path, by: int) -> None:
    disturbed = Disturbed(tmp_path)
    disturbed.project.environ["NEED"] = "1"
    disturbed.project.trace()
    begin = (disturbed.project.results / "latest").resolve()
    saved = {path: path.read_bytes() for path in begin.rglob("*") if path.is_file()}
    whole = disturbed.session("--negativa-heal")
    assert whole.status == 0
    for at in points(whole.changes, by, MOST // 5):
        for path in [*begin.rglob("*")]:
            if path.is_file() and path not in saved:
                path.unlink()
        for path, data in saved.items():
            path.write_bytes(data)
        disturbed.session("--negativa-heal", at=at, by=by)
        after = disturbed.session("--negativa-heal")
        assert after.status == 0, after.stdout + after.stderr
        assert "\nPROVED: " in after.stdout
        needs = json.loads((begin / "healed.json").read_text())["rows"]
        assert HIDDEN in [start for need in needs for start, _ in need["spans"]]
