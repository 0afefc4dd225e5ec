"""Kernel coverage: which tests ran which kernel; groups by source file, else by namespace."""

from __future__ import annotations

from pytest_negativa.models.base import NonNegative, Record, Row


class KernelRun(Row, frozen=True):
    """A test that ran a kernel: ``[test, launches, gpu_ns]``.

    Attributes:
        test: the node id of the test; the fixture or phase of the session for what no test did.
        launches: how often; None if the trace recorded the first look-up alone.
        gpu_ns: how long the GPU ran it, all launches together; None if the trace doesn't tell.
    """

    test: str
    launches: NonNegative | None
    gpu_ns: NonNegative | None = None

    def add(self, launches: int, gpu_ns: int | None) -> KernelRun:
        """The same with more launches."""
        known = None if self.gpu_ns is None or gpu_ns is None else self.gpu_ns + gpu_ns
        return KernelRun(self.test, (self.launches or 0) + launches, known)


class KernelCoverage(Record, frozen=True, kw_only=True):
    """A kernel that a traced device could load.

    Attributes:
        name: mangled.
        runs: what ran it; empty if nothing did. At level ``lookup``, the first use alone.
        scope: its namespace as people write it; empty for none.
        template: its name without scope, template arguments and parameters. The instantiations of a
            template share it.
        file: its source file by the cubin's line information: relative to the root folder if it
            lies there, else as the compiler wrote it; None without line information.
        line: the first line of its code in ``file``, from 1.
    """

    name: str
    runs: tuple[KernelRun, ...]
    scope: str = ""
    template: str = ""
    file: str | None = None
    line: NonNegative | None = None

    @property
    def is_run(self) -> bool:
        """Whether anything ran it."""
        return bool(self.runs)


class LibraryCoverage(Record, frozen=True, kw_only=True):
    """The kernels of one library that the project builds itself.

    Attributes:
        path: real path.
        kernels: those that the traced devices could load, by name.
        counted: launches were counted, so a run kernel was launched. Else it was looked up.
        limit: the least percentage of kernels that must run; None if there is none.
    """

    path: str
    kernels: tuple[KernelCoverage, ...]
    counted: bool = False
    limit: float | None = None

    @property
    def word(self) -> str:
        """A word for the kernels that count as run."""
        return "run" if self.counted else "looked up"

    @property
    def run_kernels(self) -> int:
        """Number of its kernels that ran."""
        return sum(kernel.is_run for kernel in self.kernels)

    def groups(self) -> dict[str, list[KernelCoverage]]:
        """The kernels by source file, or else namespace, sorted; empty for neither."""
        found: dict[str, list[KernelCoverage]] = {}
        for kernel in self.kernels:
            found.setdefault(kernel.file or kernel.scope, []).append(kernel)
        return dict(sorted(found.items()))
