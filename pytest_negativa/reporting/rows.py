"""Plans to the rows of a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pytest_negativa.models.plan import Decision, LibraryPlan
from pytest_negativa.models.report import LibraryRow, ReasonRow

# A library of one's own has some dozens; NVIDIA's have thousands, which "negativa kernels" lists.
_MOST_KERNELS_NAMED = 50


def library_row(plan: LibraryPlan) -> LibraryRow:
    """Add up the decisions of a plan."""
    return LibraryRow(
        path=plan.library.path,
        size=plan.library.size,
        code_bytes=plan.code_bytes,
        elements=len(plan.decisions),
        kept=_by_reason(d for d in plan.decisions if d.kept),
        unused=_by_reason(d for d in plan.decisions if not d.kept),
        kernels=len(plan.used_kernels) + len(plan.unused_kernels),
        used_kernels=len(plan.used_kernels),
        unused_kernels=(
            plan.unused_kernels if len(plan.unused_kernels) <= _MOST_KERNELS_NAMED else ()
        ),
        notes=plan.notes,
    )


def _by_reason(decisions: Iterable[Decision]) -> tuple[ReasonRow, ...]:
    elements: defaultdict[str, int] = defaultdict(int)
    sizes: defaultdict[str, int] = defaultdict(int)
    for decision in decisions:
        elements[decision.reason] += 1
        sizes[decision.reason] += decision.size
    return tuple(
        ReasonRow(reason=reason, elements=elements[reason], bytes=sizes[reason])
        for reason in sorted(elements)
    )
