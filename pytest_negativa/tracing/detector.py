"""The protocol of detectors, which watch the CUDA driver, and why one can't start."""

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
    """Writes one process's use of GPU code to a trace file.

    ``start`` is called first and ``stop`` last; ``stop`` may be called again without effect. No
    method between them raises: faults become warnings of the trace.
    """

    def start(self) -> None:
        """Begin to trace.

        Raises:
            TracerUnavailable: the detector can't work here.
            TracerBusy: another tool holds CUPTI.
        """

    def set_context(self, context: Context) -> None:
        """Set the phase and test that run from now on."""

    def drain(self) -> None:
        """Write which libraries are mapped; in the session's last hooks, launch counts, too."""

    def pause(self, reason: str) -> None:
        """Release CUPTI. The trace has a gap until ``resume``."""

    def resume(self) -> None:
        """Take CUPTI again after ``pause``."""

    def warn(self, code: str, text: str, *, incomplete: bool = False) -> None:
        """Add a warning to the trace."""

    def stop(self) -> None:
        """End: no callback comes any more, and the trace file is complete."""
