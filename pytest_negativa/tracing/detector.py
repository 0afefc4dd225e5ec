"""What watches the driver: the protocol of all detectors, and their errors."""

from __future__ import annotations

from typing import Protocol

from pytest_negativa.errors import NegativaError
from pytest_negativa.models.trace import Context


class TraceError(NegativaError):
    """Tracing can't start or go on."""


class TracerUnavailable(TraceError):
    """Something that a detector needs isn't installed; the message says what to install."""


class TracerBusy(TraceError):
    """Another tool holds CUPTI, which serves one at a time in a process."""


class Detector(Protocol):
    """Writes what one process does with GPU code into a trace file.

    ``start`` comes first and ``stop`` last, once each; ``stop`` may be called again without
    effect. None of the methods between raises: faults become warnings of the trace.
    """

    def start(self) -> None:
        """Begin.

        Raises:
            TracerUnavailable: it can't work here.
            TracerBusy: another tool holds CUPTI.
        """

    def set_context(self, context: Context) -> None:
        """Say where in the session the program is from now on."""

    def drain(self) -> None:
        """Write what isn't written as it happens: libraries mapped, launch counts."""

    def pause(self, why: str) -> None:
        """Release CUPTI. What runs until ``resume`` is a gap."""

    def resume(self) -> None:
        """Take CUPTI again after ``pause``."""

    def warn(self, code: str, text: str, *, incomplete: bool = False) -> None:
        """Note something that users should know, found outside of the detector."""

    def stop(self) -> None:
        """End: no callback comes after this; the trace file is complete."""
