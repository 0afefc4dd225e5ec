"""What ``negativa slim`` took out of a library."""

from __future__ import annotations

from pytest_negativa.models.base import NonNegative, Record


class Removed(Record, frozen=True, kw_only=True):
    """What a slimmed library lacks, and the size of the GPU code that is left.

    Attributes:
        size_before: bytes of the original, if the library states it.
        gone_bytes: bytes of its sections that are no longer in the file and read as zeros.
        elements: places in regions that stay where elements were taken out; neighbours are one
            place. Regions that went as a whole leave nothing to count.
        kernels: kernels that were taken out of the cubins read; None if no cubin was read. Their
            names are not known, so a kernel of two cubins counts twice.
        device_functions: other functions, likewise.
        stored_bytes: bytes in the file of the GPU code that is left.
        spare: file name of the spare that has what is gone, if there is one. Then ``elements``
            counts the elements and frames that begin in the file.
    """

    size_before: NonNegative | None
    gone_bytes: NonNegative
    elements: NonNegative
    kernels: NonNegative | None
    device_functions: NonNegative | None
    stored_bytes: NonNegative
    spare: str | None = None
