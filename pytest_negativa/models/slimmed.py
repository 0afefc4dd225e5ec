"""What was taken out of a library that ``negativa slim`` made smaller."""

from __future__ import annotations

from pytest_negativa.models.base import Offset, Record


class Removed(Record, frozen=True, kw_only=True):
    """What a slimmed library lacks, and how much of the rest takes room in its file.

    Attributes:
        size_before: bytes of the original, if the library tells.
        gone_bytes: of its sections, bytes that are no longer in the file and read as zeros.
        elements: places of elements that were taken out of regions that stay; neighbours are
            one place. Of regions that went as a whole nothing is left to count.
        kernels: kernels that were taken out of the cubins read; None if none was read. Their names
            are not known: one that two cubins had counts twice.
        device_functions: other functions, likewise.
        stored_bytes: of the GPU code that is left, what lies in the file.
    """

    size_before: Offset | None
    gone_bytes: Offset
    elements: Offset
    kernels: Offset | None
    device_functions: Offset | None
    stored_bytes: Offset
