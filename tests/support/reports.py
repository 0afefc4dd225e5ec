"""Reports of a made-up library."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pytest_negativa.models.coverage import KernelCoverage, KernelRun, LibraryCoverage
from pytest_negativa.models.library import LibraryIdentity
from pytest_negativa.models.plan import Decision, KernelUse, LibraryPlan
from pytest_negativa.models.report import LibraryRow, RunReport, RuntimeCode
from pytest_negativa.models.trace import Context, Phase
from pytest_negativa.reporting.rows import library_row
from tests.support.code_files import planned_files

DECISIONS = (
    Decision(100, 200, True, "loaded", "test_a"),
    Decision(200, 1700, False, "wrong-arch"),
    Decision(1700, 1800, False, "wrong-arch"),
    Decision(1800, 1850, False, "no-used-kernel"),
    Decision(1850, 1850, True, "hook"),
)
USED = tuple(KernelUse(name, Context(phase=Phase.IMPORT)) for name in "abc")
PLAN = LibraryPlan(
    library=LibraryIdentity(
        path="/lib/libours.so", size=4000, mtime_ns=1, build_id=None, soname=None
    ),
    devices=("9.0",),
    decisions=DECISIONS,
    used_kernels=USED,
    unused_kernels=tuple(f"k{n}" for n in range(1197)),
)

ONE = KernelRun("tests/test_a.py::test_one", None)
OURS = LibraryCoverage(
    path="/project/libours.so",
    kernels=(
        KernelCoverage(name="_Z5scalePff", runs=(ONE,), file="src/a.cu", line=7),
        KernelCoverage(name="_Z8multiplyILi16EEvv", runs=(ONE,), file="src/a.cu", line=12),
        KernelCoverage(name="_Z8multiplyILi32EEvv", runs=(), file="src/a.cu", line=12),
        KernelCoverage(name="blur", runs=(), file="src/b.cu", line=3),
        KernelCoverage(name="hidden", runs=()),
    ),
)


def row(name: str = "libours.so", **changes: Any) -> LibraryRow:
    return replace(library_row(PLAN), **{"path": f"/lib/{name}", **changes})


def code_files(**changes: Any) -> LibraryRow:
    """The files of a distribution that are GPU code: 10 of 1,000 bytes, 4 of 400 unused."""
    sizes = {f"{number}.cubin": 100 for number in range(10)}
    unused = {name: sizes.pop(name) for name in list(sizes)[:4]}
    return replace(library_row(planned_files(unused, sizes).plan), **changes)


def runtime(*kernels: str, **changes: Any) -> RuntimeCode:
    base = RuntimeCode(
        kernels=kernels,
        first="test_a.py::test_a (call)",
        seconds=1.5,
        is_new=True,
        compiler=None,
        file=None,
    )
    return replace(base, **changes)


def report(*rows: LibraryRow, **changes: Any) -> RunReport:
    base = RunReport(
        run_id="run",
        directory=".negativa/run",
        devices=("NVIDIA H200 (9.0)",),
        replay=None,
        gpu_used=True,
        libraries=rows,
        runtime=(),
        not_covered=(),
        warnings=(),
        crossed=(),
        files=("usage.json", "report.json"),
    )
    return replace(base, **changes)
