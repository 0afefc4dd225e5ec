"""Verdicts on parts of the tests, to one verdict and its lock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from pytest_negativa.errors import ReconstructError
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.lock import Lock, Place
from pytest_negativa.models.trace import Usage
from pytest_negativa.models.verdict import LibraryStatus, Verdict
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.planning.parts import VerifiedPart, unite_verdicts
from tests.support.faults import PlantedFault
from tests.support.libraries import BIN, MULTIARCH
from tests.support.reconstructing import planned_of, trimmed_of
from tests.support.sites import verdict_of
from tests.support.usages import library_usage, usage_of


def planned() -> AnalyzedLibrary:
    made = planned_of(MULTIARCH)
    return AnalyzedLibrary(made.library_map, made.plan)


def part(name: str, *libraries: AnalyzedLibrary) -> VerifiedPart:
    """A run that loaded the libraries and proved their plans."""
    verdict = replace(verdict_of(*libraries), run_id=name)
    return VerifiedPart(loads(name, *libraries), verdict)


def loads(name: str, *libraries: AnalyzedLibrary) -> Usage:
    usage = usage_of(*(library_usage(one.library_map, {}) for one in libraries))
    return replace(usage, run_ids=(name,))


def change(one: VerifiedPart, **fields: object) -> VerifiedPart:
    """The part with another verdict on its only library."""
    assert one.verdict is not None
    [row] = one.verdict.libraries
    return one._replace(verdict=replace(one.verdict, libraries=(replace(row, **fields),)))


def locked(parts: Sequence[VerifiedPart], *libraries: AnalyzedLibrary) -> Lock:
    verdict = unite_verdicts("united", libraries, parts)
    return make_lock("united", libraries, verdict, lambda path: Place(path[1:]))


def test_two_parts() -> None:
    one = planned()
    verdict = unite_verdicts("united", [one], [part("a", one), part("b", one)])
    assert verdict.proved and verdict.parts == ("a", "b")
    assert len(verdict.tests) == 4 and verdict.gpu_tests == 4
    assert len(verdict.devices) == 1
    [row] = verdict.libraries
    assert row.status is LibraryStatus.PROVED and row.unused_bytes == one.plan.unused_bytes
    lock = locked([part("a", one), part("b", one)], one)
    assert lock.proof.proved and lock.proof.parts == ("a", "b")
    assert lock.libraries[0].unused_bytes == one.plan.unused_bytes


@pytest.mark.planted_fault(
    "A shard was proved with less removed than the plan of all shards removes.",
    says="not proved: it was still there when the tests ran",
)
def test_what_a_copy_still_had_stays(fault: PlantedFault) -> None:
    one = planned()
    first, *others = (d for d in one.plan.decisions if not d.kept)
    less = change(part("b", one), spans=tuple((d.start, d.end) for d in others))
    [library] = locked([part("a", one), less], one).libraries
    assert library.unused_bytes == one.plan.unused_bytes - first.size
    [stays] = [code for code in library.kept if code.offset == first.start]
    fault.check(stays.detail or "")


@pytest.mark.planted_fault(
    "A shard was proved on another build of a library.",
    says="b may need it, and has no proof of it",
)
def test_other_content(fault: PlantedFault) -> None:
    one = planned()
    other = change(part("b", one), sha256="0" * 64)
    lock = locked([part("a", one), other], one)
    assert not lock.libraries
    fault.check(lock.left_out[0].reason)


def test_content_that_is_not_known_is_the_library_if_it_may_be() -> None:
    """A part that may have loaded a library must have proved it."""
    one = planned()
    usage = loads("b", one)
    [used] = usage.libraries
    usage = replace(usage, libraries=(replace(used, library=replace(used.library, sha256=None)),))
    verdict = replace(verdict_of(), run_id="b")
    assert not locked([part("a", one), VerifiedPart(usage, verdict)], one).libraries


def test_a_part_that_did_not_load_a_library_has_no_say() -> None:
    one, made = planned(), planned_of(BIN / "libframes.so")
    other = AnalyzedLibrary(made.library_map, made.plan)
    lock = locked([part("a", one), part("b", other)], one, other)
    assert len(lock.libraries) == 2
    # It may have used no GPU code, so that there was nothing to prove.
    assert locked([part("a", one), VerifiedPart(loads("b"), None)], one).proof.proved


def test_a_cubin_that_parts_trimmed_otherwise_stays_whole() -> None:
    one, other = trimmed_of(), trimmed_of("calls_recursive")
    [cubin], [unlike] = one.plan.trimmed, other.plan.trimmed
    assert cubin.unused != unlike.unused
    alike = locked([part("a", one), part("b", one)], one)
    assert alike.libraries[0].trimmed_bytes == cubin.unused_size
    # Of the union of both, neither had a copy.
    wider = replace(cubin, unused=tuple(cubin.unused[:-1]))
    united = AnalyzedLibrary(one.library_map, replace(one.plan, trimmed=(wider,)))
    for all_parts in ([part("a", one), part("b", one)], [part("a", united), part("b", other)]):
        [row] = unite_verdicts("united", [united], all_parts).libraries
        assert not row.trimmed
    # Copies that had nothing of it had no other cubin.
    [decision] = [d for d in one.plan.decisions if d.start == cubin.start]
    without = change(part("b", one), trimmed={}, spans=((decision.start, decision.end),))
    [row] = unite_verdicts("united", [one], [part("a", one), without]).libraries
    assert row.trimmed == {cubin.start: cubin.unused}


@pytest.mark.planted_fault(
    "One of several shards was not verified, or was not proved.", says="b: it was not verified"
)
def test_a_part_without_a_proof(fault: PlantedFault) -> None:
    one = planned()
    with pytest.raises(ReconstructError, match="b: it was not verified") as error:
        locked([part("a", one), VerifiedPart(loads("b", one), None)], one)
    fault.check(str(error.value))
    refuted = replace(verdict_of(one, status=LibraryStatus.NOT_PROVED), run_id="b")
    with pytest.raises(ReconstructError, match="b: not proved: a test differs"):
        locked([part("a", one), VerifiedPart(loads("b", one), refuted)], one)


@pytest.mark.planted_fault(
    "The verdict of another run lies in the folder of a shard.",
    says="b: its verdict is on another run, a",
)
def test_the_verdict_of_another_run(fault: PlantedFault) -> None:
    one = planned()
    first = part("a", one)
    with pytest.raises(ReconstructError) as error:
        locked([first, VerifiedPart(loads("b", one), first.verdict)], one)
    fault.check(str(error.value))


def test_parts_that_were_proved_in_different_ways() -> None:
    one = planned()
    first, second = part("a", one), part("b", one)
    verdict: Verdict | None = second.verdict
    assert verdict is not None
    for other in (replace(verdict, copies="compacted"), replace(verdict, granularity="kernel")):
        with pytest.raises(ReconstructError, match="proved in different ways: "):
            locked([first, second._replace(verdict=other)], one)


def test_a_library_that_no_part_loaded() -> None:
    """A service did, whose samples are among the runs."""
    one = planned_of(BIN / "libframes.so")
    other = AnalyzedLibrary(one.library_map, one.plan)
    lock = locked([part("a", planned())], planned(), other)
    assert len(lock.libraries) == 1 and len(lock.left_out) == 1
