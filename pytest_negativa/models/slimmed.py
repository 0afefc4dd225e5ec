"""What ``negativa slim`` took out of a library."""

from __future__ import annotations

from pytest_negativa.models.base import NonNegative, Record


class Removed(Record, frozen=True, kw_only=True):
    """What a slimmed library lacks, and the size of the GPU code that is left.

    Attributes:
        size_before: bytes of the original, if the library states it.
        gone_bytes: bytes of its sections that are no longer in the file and read as zeros.
        stored_bytes: bytes in the file of the GPU code that is left.
        spare: file name of the spare that has what is gone, if there is one.
    """

    size_before: NonNegative | None
    gone_bytes: NonNegative
    stored_bytes: NonNegative
    spare: str | None = None
