"""Makes the edits that overwrite unused code, from a map and a plan. Reads no library bytes.

An unused element keeps its header, so the chain of its region stays sound. Its payload is
filled, and its kind and arch become values that the driver never looks for. With
``CUDA_MODULE_LOADING=EAGER`` the driver picks the element that fits the device from every region,
and fails on a damaged one. An unused frame has no header of a region, and is filled as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pytest_negativa.errors import ReconstructError
from pytest_negativa.gpucode.fatbin import (
    ARCH_OFFSET,
    KIND_OFFSET,
    OVERWRITTEN_ARCH,
    OVERWRITTEN_KIND,
)
from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.plan import LibraryPlan
from pytest_negativa.rewriting.edits import Change, Edits, Fill, Patch

_NO_KIND = OVERWRITTEN_KIND.to_bytes(2, "little")
_NO_DEVICE = OVERWRITTEN_ARCH.to_bytes(4, "little")


def overwrite(library_map: LibraryMap, plan: LibraryPlan, fill: int) -> Edits:
    """The edits that overwrite unused elements and frames.

    Args:
        library_map, plan: of the same file.
        fill: the byte, 0 to 255, that the code becomes.

    Raises:
        ReconstructError: the plan does not fit the map, or the map contradicts itself.
    """
    path = plan.library.path
    if library_map.library != plan.library:
        raise ReconstructError(
            f"{path}: its map and its plan are not of the same file; trace it again"
        )
    try:
        return Edits.of(plan.library.size, _changes(library_map, plan, fill))
    except ValueError as e:
        raise ReconstructError(f"{path}: its map contradicts itself: {e}; trace it again") from e


def _changes(library_map: LibraryMap, plan: LibraryPlan, fill: int) -> Iterator[Change]:
    blocks = {(block.payload.start, block.payload.end): block for block in library_map.iter_code()}
    decided = Counter((d.start, d.end) for d in plan.decisions)
    wanted = Counter(dict.fromkeys(blocks, 1))
    if decided != wanted:
        start, end = min((decided - wanted) | (wanted - decided))
        raise ReconstructError(
            f"{plan.library.path}: the plan is not one for its map: they don't agree about code "
            f"at [{start:#x}, {end:#x}); trace it again"
        )
    for decision in plan.decisions:
        if decision.kept or not decision.size:
            continue
        block = blocks[decision.start, decision.end]
        if block.unreadable is not None:
            raise ReconstructError(
                f"{plan.library.path}: the plan gives up [{decision.start:#x}, {decision.end:#x}), "
                f"which is not understood ({block.unreadable}); trace it again"
            )
        yield Fill(block.payload.start, block.payload.end, fill)
        if block.region is not None:
            yield Patch(block.header_offset + KIND_OFFSET, _NO_KIND)
            yield Patch(block.header_offset + ARCH_OFFSET, _NO_DEVICE)
