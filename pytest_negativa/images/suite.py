"""Needs of a test suite in libraries, from a traced run or a lock file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.errors import StoreError
from pytest_negativa.models.image import SlimmableBy
from pytest_negativa.models.lock import Lock
from pytest_negativa.models.plan import KeepReason, LibraryPlan, may_be
from pytest_negativa.models.trace import Usage
from pytest_negativa.storage.results import load_plans, load_usage
from pytest_negativa.storage.runs import Run

# The run had loaded code that a plan keeps for one of these reasons.
_LOADED = (KeepReason.LOADED, KeepReason.MEMORY_IMAGE)


@dataclass(frozen=True, slots=True)
class KnownLibrary:
    """A library that the suite loaded.

    Attributes:
        size: bytes, if known.
        used: whether the suite loaded GPU code from it.
        unused_bytes: of the content ``sha256``; None if there is no plan for it, or no proof.
    """

    sha256: str | None
    build_id: str | None
    size: int | None
    used: bool
    unused_bytes: int | None


@dataclass(frozen=True, slots=True)
class Suite:
    """Facts about a suite.

    Attributes:
        run_id: of the traced run.
        slimmable_by: the source of ``unused_bytes``.
        devices: compute capabilities that it ran on.
        nameless: base names of libraries that it loaded, if nothing else is known of them.
        notes: what a reader of the report should know.
        files: the files that are GPU code themselves and that stay, by digest of their
            distribution's rows in RECORD. All others of the distribution may go.
    """

    run_id: str
    slimmable_by: SlimmableBy
    devices: tuple[ComputeCapability, ...]
    libraries: tuple[KnownLibrary, ...]
    nameless: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    files: Mapping[str, AbstractSet[str]] = field(default_factory=dict)


def load_suite(run: Run) -> Suite:
    """Read the suite from the files of a traced run.

    Raises:
        StoreError: it is no traced run, is not located yet, or a file can't be read.
    """
    usage = load_usage(run)
    if usage is None:
        run.require_gpu_trace()
        raise StoreError(
            f"{run}: no traced run here, or one that is not located yet: no {run.usage_file.name}"
        )
    # A run that failed has no plans.
    plans = load_plans(run) if run.plan_files() else ()
    return suite_of_run(run.run_id, usage, plans)


def suite_of_run(
    run_id: str,
    usage: Usage,
    plans: Sequence[LibraryPlan],
) -> Suite:
    """Make the suite from the records of a traced run.

    Args:
        plans: of its libraries; empty if the run planned nothing.
    """
    files: defaultdict[str, set[str]] = defaultdict(set)
    for one in plans:
        # Several folders may have the same distribution.
        if one.is_files and one.library.sha256 is not None:
            files[one.library.sha256].update(str(d.detail) for d in one.decisions if d.kept)
    by_path = {plan.library.path: plan for plan in plans}
    libraries = []
    for loaded in usage.libraries:
        plan = by_path.get(loaded.library.path)
        if plan is not None and not may_be(loaded.library, plan.library):
            plan = None
        libraries.append(
            KnownLibrary(
                sha256=loaded.library.sha256 if plan is None else plan.library.sha256,
                build_id=loaded.library.build_id,
                size=loaded.library.size,
                used=bool(loaded.images),
                unused_bytes=None if plan is None else plan.unused_bytes,
            )
        )
    return Suite(
        run_id=run_id,
        slimmable_by=SlimmableBy.PLAN,
        devices=_devices(device.compute_capability for device in usage.devices),
        libraries=tuple(libraries),
        notes=tuple(_notes_of_run(run_id, usage, plans)),
        files=files,
    )


def _notes_of_run(run_id: str, usage: Usage, plans: Sequence[LibraryPlan]) -> Iterator[str]:
    if not plans:
        yield f"run {run_id} planned nothing, so no bytes are slimmable by plan"
    if usage.incomplete:
        yield (
            f"the trace of run {run_id} is incomplete, so it may have loaded libraries that are "
            f"reported as never loaded: {usage.incomplete[0].text}"
        )
    if usage.replay is not None:
        yield f"run {run_id} replays a trace that was recorded on another machine"


def suite_of_lock(lock: Lock) -> Suite:
    """Read the suite from a lock file; libraries without a proof are not slimmable by it."""
    notes = []
    if not lock.proof.proved:
        notes.append("nothing in the lock was proved")
    return Suite(
        run_id=lock.proof.run,
        slimmable_by=SlimmableBy.LOCK,
        devices=_devices(device.compute_capability for device in lock.proof.devices),
        libraries=tuple(
            KnownLibrary(
                sha256=library.sha256,
                build_id=library.build_id,
                size=library.size,
                used=any(code.reason in _LOADED for code in library.kept),
                unused_bytes=library.unused_bytes if library.not_proved is None else None,
            )
            for library in lock.libraries
        ),
        nameless=frozenset(left.path.rpartition("/")[2] for left in lock.left_out),
        notes=tuple(notes),
        files={
            one.sha256: frozenset(str(code.detail) for code in one.kept)
            for one in lock.files
            if one.not_proved is None
        },
    )


def _devices(found: Iterator[str]) -> tuple[ComputeCapability, ...]:
    return tuple(map(ComputeCapability.parse, dict.fromkeys(found)))
