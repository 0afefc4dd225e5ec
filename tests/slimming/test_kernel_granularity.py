"""Locks that take functions out of cubins that stay, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.cli.main import main
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.mapping import MapRequest, map_libraries
from pytest_negativa.installed.owners import Owners
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.library import Scope
from pytest_negativa.models.lock import Lock
from pytest_negativa.models.plan import KeepReason
from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.planning.decide import KeepPolicy, plan_library
from pytest_negativa.planning.locate import locate_library
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.slimming.explain import slimmed_in
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees
from pytest_negativa.storage.records import write_record
from tests.support.compacting import build, needs_compiler
from tests.support.libraries import BIN
from tests.support.made_site import DEBUG
from tests.support.sites import verdict_of
from tests.support.usages import library_usage, usage_of

pytestmark = needs_compiler

FAST = SlimOptions()
NO_IMAGE = "CUDA error: no kernel image is available for execution on the device"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """With cubins that hold several kernels, and much that is never loaded."""
    source = BIN / "libcallgraph.so"
    [section] = [s for s in read_library(source, Scope()).sections if s.name == ".nv_fatbin"]
    code = source.read_bytes()[section.span.start : section.span.end]
    return build(tmp_path / "built", fatbin=code, ldata=b"", extra=DEBUG)


def planned_for(library: Path, kernel: str) -> AnalyzedLibrary:
    """All elements stay, and of the one for the device no more than a kernel needs."""
    request = MapRequest(scope=Scope(devices=("9.0",)), with_map=True, with_digest=True)
    [mapped] = map_libraries([library], request)
    library_map = mapped.library_map
    assert library_map is not None
    [region] = [r for r in library_map.iter_regions() if any(e.content for e in r.elements)]
    usage = usage_of(library_usage(library_map, {region.span.start: (kernel,)}))
    located = locate_library(library_map, usage.libraries[0], usage)
    plan = plan_library(located, (ComputeCapability(9, 0),), KeepPolicy(granularity="kernel"))
    assert plan.trimmed
    kept = {"kept": True, "reason": KeepReason.ARCH_POLICY.value}
    decisions = tuple(d if d.kept else msgspec.structs.replace(d, **kept) for d in plan.decisions)
    return AnalyzedLibrary(library_map, msgspec.structs.replace(plan, decisions=decisions))


@pytest.fixture
def lock_for(library: Path) -> Callable[[str], Lock]:
    # From the library as it is before anything is done to it.
    planned = {name: planned_for(library, name) for name in ("calls_shared", "calls_chain")}

    def make(kernel: str) -> Lock:
        one = planned[kernel]
        return make_lock("run", [one], verdict_of(one), Owners().of)

    return make


def test_trimmed_code_is_counted(library: Path, lock_for: Callable[[str], Lock]) -> None:
    lock = lock_for("calls_shared")
    report = slim_trees(SlimRequest(paths=(library,), lock=lock, options=FAST))
    assert [row.status for row in report.rows] == [SlimStatus.SLIMMED]
    entry = load_manifest(library.parent).slimmed[library.name]
    [locked] = lock.libraries
    assert locked.unused_bytes == 0
    assert 0 < entry.gpu_code_removed <= locked.trimmed_bytes


def test_a_lock_that_needs_what_is_gone_is_an_error(
    library: Path, lock_for: Callable[[str], Lock]
) -> None:
    slim_trees(SlimRequest(paths=(library,), lock=lock_for("calls_shared"), options=FAST))
    report = slim_trees(SlimRequest(paths=(library,), lock=lock_for("calls_chain"), options=FAST))
    assert report.failed
    [row] = report.rows
    assert row.status is SlimStatus.FAILED
    assert "was slimmed, and its original was not kept; install it again" in (row.detail or "")


def test_errors_are_explained(library: Path, lock_for: Callable[[str], Lock]) -> None:
    slim_trees(SlimRequest(paths=(library,), lock=lock_for("calls_shared"), options=FAST))
    assert [Path(one.path).name for one in slimmed_in([library.parent])] == [library.name]
    code = (
        "import ctypes, sys, pytest_negativa; ctypes.CDLL(sys.argv[1]); "
        "print(pytest_negativa.why(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(library), NO_IMAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert library.name in done.stdout


def test_lock_says_how_much(library: Path, tmp_path: Path, lock_for: Callable[[str], Lock]) -> None:
    one = planned_for(library, "calls_shared")
    run = tmp_path / "run"
    write_record(run / "map" / "0.json", one.library_map)
    write_record(run / "plan" / "0.json", one.plan)
    write_record(run / "verdict.json", verdict_of(one))
    done = CliRunner().invoke(
        main, ["lock", "--run", str(run), "-o", str(tmp_path / "negativa.lock")]
    )
    assert done.exit_code == 0, done.output
    [locked] = lock_for("calls_shared").libraries
    assert "1 library, 0 B of GPU code unused, and " in done.output
    assert "unpacked, within cubins that stay" in done.output
    assert locked.trimmed_bytes > 0
