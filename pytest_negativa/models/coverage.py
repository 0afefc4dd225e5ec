"""Kernel coverage: which kernels of the project's own libraries the run used."""

from __future__ import annotations

from pytest_negativa.models.base import Offset, Record, Row


class KernelRun(Row, frozen=True):
    """What used a kernel: ``[test, launches]``.

    Attributes:
        test: the node id of the test; the phase of the session for what no test did.
        launches: how often; None if the trace recorded the first look-up alone.
    """

    test: str
    launches: Offset | None


class KernelCoverage(Record, frozen=True, kw_only=True):
    """A kernel that a traced device could load.

    Attributes:
        name: mangled.
        runs: what used it; empty if nothing did. At level ``lookup``, the first use alone.
        file: its source file by the cubin's line information: relative to the root folder if it
            lies there, else as the compiler wrote it; None without line information.
        line: the first line of its code in ``file``, from 1.
    """

    name: str
    runs: tuple[KernelRun, ...]
    file: str | None = None
    line: Offset | None = None

    @property
    def is_run(self) -> bool:
        """Whether anything used it."""
        return bool(self.runs)


class LibraryCoverage(Record, frozen=True, kw_only=True):
    """The kernels of one library that the project builds itself.

    Attributes:
        path: real path.
        kernels: those that the traced devices could load, by name.
    """

    path: str
    kernels: tuple[KernelCoverage, ...]

    @property
    def run_kernels(self) -> int:
        """How many of its kernels were used."""
        return sum(kernel.is_run for kernel in self.kernels)
