"""The limits of sessions that trace, verify and heal: each just kept, and each just crossed."""

from __future__ import annotations

import json

import pytest

from tests.support.limits import REGIONS, crossed_limits, kept_limits, told_limits, write_baseline
from tests.support.verified import VerifiedProject

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> VerifiedProject:
    suite = f"def test_use():\n    use(LIB, *{REGIONS})\n"
    project = VerifiedProject(tmp_path_factory.mktemp("limits") / "project", suite).trace()
    write_baseline(project.folder, json.loads(project.negativa("report", "baseline:-").stdout))
    return project


@pytest.mark.parametrize("mode", [(), ("--negativa-verify",), ("--negativa-heal",)])
def test_all_limits_just_kept_and_just_crossed(
    traced: VerifiedProject, mode: tuple[str, ...]
) -> None:
    kept = traced.pytest("-q", "--negativa", *mode, *kept_limits("negativa-"))
    crossed = traced.pytest("-q", "--negativa", *mode, *crossed_limits("negativa-"), status=1)

    assert "limit is" not in kept.stdout
    told = crossed.stdout.splitlines()
    for text in told_limits():
        assert [line for line in told if text in line], (text, told)
    assert len([line for line in told if "limit is" in line]) == len(told_limits())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "crossed",
    [
        ("--negativa-fail-under=99",),
        ("--negativa-fail-under=*=99",),
        ("--negativa-compare=earlier.json", "--negativa-compare-fail=code:0"),
        ("--negativa-min-used-kernels=*=3",),
    ],
    ids=lambda flags: flags[-1],
)
def test_a_proof_does_not_hang_on_limits(traced: VerifiedProject, crossed: tuple[str, ...]) -> None:
    """They change the exit status of the traced session, which the round's is compared with."""
    done = traced.pytest("-q", "--negativa", "--negativa-verify", *crossed, status=1)
    assert "\nPROVED" in done.stdout
