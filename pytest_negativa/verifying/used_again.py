"""Removed code that tests used when they ran again on the originals: it stays, and is named.

A test that failed by chance when traced, and on the copies, did not come to what it needs. On the
originals it may.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.plan import may_be
from pytest_negativa.models.trace import UNENDED, LibraryUsage, TracedLibrary, Usage, UsageWarning
from pytest_negativa.models.verdict import Need, Witness
from pytest_negativa.planning.decide import KeepPolicy, plan_library
from pytest_negativa.planning.keep_needed import keeps_more
from pytest_negativa.planning.locate import locate_library


def why_unknown(usage: Usage, traced: Usage) -> str | None:
    """Reason for which tests that ran again may have used more; None if there is none.

    Of libraries for which the traced run lacked the same, code was kept. What a process that was
    killed did until then is in its trace.
    """
    codes = {lack.code for lack in traced.incomplete}
    kept = set(chain.from_iterable(_concerned(traced, lack) for lack in traced.incomplete))
    unknown = (
        lack.text
        for lack in usage.incomplete
        if lack.code != UNENDED
        and not (lack.code in codes and kept.issuperset(_concerned(usage, lack)))
    )
    return next(unknown, None)


def _concerned(usage: Usage, lack: UsageWarning) -> Iterator[str]:
    """The libraries of the process that lacks something; of no known one: all."""
    return (
        used.library.path
        for used in usage.libraries
        if lack.process is None or lack.process in used.processes
    )


def used_again(planned: Iterable[AnalyzedLibrary], usage: Usage, ptx: str) -> list[Need]:
    """The removed code that a plan for a usage of the originals would keep, block by block.

    Args:
        planned: what was tried.
        usage: of the tests that ran again.
        ptx: see ``KeepPolicy``.
    """
    found = []
    for one in planned:
        library = one.plan.library
        uses = [
            used
            for used in usage.libraries
            if used.library.path == library.path or may_be(used.library, library)
        ]
        whole = LibraryUsage(
            library=TracedLibrary(path=library.path),
            images=tuple(image for used in uses for image in used.images),
            processes=(),
            touched=tuple(span for used in uses for span in used.touched),
        )
        if not (whole.images or whole.touched or usage.memory_images):
            continue
        plan = plan_library(
            locate_library(one.library_map, whole, usage),
            [ComputeCapability.parse(device) for device in one.plan.devices],
            KeepPolicy(ptx=ptx, granularity=one.plan.granularity),
        )
        kernels = {use.name: use.first for use in plan.used_kernels}
        more = keeps_more(plan, one.plan)
        for block in one.library_map.iter_code():
            if block.payload.start not in more:
                continue
            names = sorted(one.library_map.functions_of(block.content) & kernels.keys())
            first = kernels[names[0]] if names else None
            found.append(
                Need(
                    witness=Witness.USED_AGAIN,
                    library=library.path,
                    sha256=library.sha256,
                    spans=(block.payload,),
                    image=hex(block.payload.start),
                    kernel=names[0] if names else None,
                    test="a test that ran again" if first is None else str(first),
                    nodeid=None if first is None else first.nodeid,
                    kept=True,
                )
            )
    return found
