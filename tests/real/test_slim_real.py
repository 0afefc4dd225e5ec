"""Slimming of real wheels as pip installed them: what pip and the loader say afterwards."""

from __future__ import annotations

import csv
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.gpucode.mapping import MapRequest, map_libraries
from pytest_negativa.installed.owners import Owners
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.library import Scope
from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.planning.decide import plan_for_devices
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.slimming.request import SlimOptions, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from tests.support.sites import digests, verdict_of, wrong_files

pytestmark = pytest.mark.real_libs

CURAND, NCCL = "nvidia/cu13/lib/libcurand.so.10", "nvidia/nccl/lib/libnccl.so.2"
H200 = ComputeCapability(9, 0)
# The calls that need no driver.
CALLS = {
    CURAND: "l.curandGetVersion(ctypes.byref(n))",
    NCCL: "l.ncclGetVersion(ctypes.byref(n))",
}


@pytest.fixture
def site(real_libs: Path, tmp_path: Path) -> Path:
    """Two distributions with all their files."""
    folder = tmp_path / "site-packages"
    infos = [*real_libs.glob("nvidia_curand-*.dist-info"), *real_libs.glob("nvidia_nccl_*info")]
    for info in infos:
        with (info / "RECORD").open(newline="") as record:
            for name, *_ in csv.reader(record):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(real_libs / name, folder / name)
    return folder


def version(library: Path, call: str) -> int:
    code = f"import ctypes; n = ctypes.c_int(); l = ctypes.CDLL({str(library)!r}); "
    code += f"assert {call} == 0; print(n.value)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def run(site: Path, **request: object) -> SlimReport:
    return slim_trees(SlimRequest(paths=(site,), **request))  # type: ignore[arg-type]


def test_by_archs(site: Path) -> None:
    before = {name: version(site / name, call) for name, call in CALLS.items()}
    report = run(site, devices=(H200,))
    rows = {row.path: row for row in report.rows}
    assert {CURAND, NCCL} <= {n for n, row in rows.items() if row.status is SlimStatus.SLIMMED}
    assert rows[CURAND].after < 0.5 * rows[CURAND].before
    assert rows[NCCL].after < 0.3 * rows[NCCL].before
    assert {name: version(site / name, call) for name, call in CALLS.items()} == before
    assert wrong_files(site) == []
    checked = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert "nvidia" not in checked.stdout, checked.stdout


def test_by_lock_and_back(site: Path, tmp_path: Path) -> None:
    """A lock that keeps nothing of NCCL, and of cuRAND what an H200 loads."""
    before = digests(site)
    request = MapRequest(scope=Scope(headers_only=True), with_map=True, with_digest=True)
    planned = []
    for mapped in map_libraries([site / CURAND, site / NCCL], request):
        assert mapped.library_map is not None
        devices = (H200,) if mapped.path.name.startswith("libcurand") else ()
        plan = plan_for_devices(mapped.library_map, devices, keep_ptx=False)
        planned.append(AnalyzedLibrary(mapped.library_map, plan))
    lock = make_lock("run", planned, verdict_of(*planned), Owners().of)
    assert {row.distribution for row in lock.libraries} == {"nvidia-curand", "nvidia-nccl-cu13"}
    options = SlimOptions(keep_originals=tmp_path / "originals", jobs=2)
    report = run(site, lock=lock, require=True, options=options)
    assert not report.failed
    assert (site / NCCL).stat().st_size < 4_000_000
    for name, call in CALLS.items():
        assert version(site / name, call) > 0
    assert wrong_files(site) == []
    assert {row.status for row in run(site, lock=lock).rows} == {SlimStatus.ALREADY}
    undo_trees((site,))
    assert digests(site) == before
    for one in planned:
        data = Path(one.plan.library.path).read_bytes()
        assert hashlib.sha256(data).hexdigest() == one.plan.library.sha256
