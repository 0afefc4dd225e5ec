"""Tracing on a real GPU, in processes of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from pytest_negativa.models.trace import UNENDED, Role, Usage
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.children import injection_library
from pytest_negativa.tracing.command import attach_environment
from pytest_negativa.tracing.merge import merge_traces
from pytest_negativa.tracing.start import child_environment
from tests.support.libraries import MULTIARCH, NEGATIVA, ROOT, SUPPORT

HERE = Path(__file__).parent
DETECTORS = ("lookup", "native")


def play(
    folder: Path, detector: str, scene: str, *, returncode: int = 0, **env: str
) -> tuple[Usage, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "traced.py"), str(folder), detector, scene],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        | env,
    )
    assert done.returncode == returncode, done.stderr
    return merge_traces((folder / "run-1/trace").iterdir()), done.stdout


def kernels(usage: Usage) -> set[str]:
    return {kernel for image in usage.iter_images() for kernel in image.kernels}


@pytest.mark.parametrize("detector", DETECTORS)
def test_operations_are_traced_to_regions(tmp_path: Path, detector: str) -> None:
    pytest.importorskip("torch")
    usage, _ = play(tmp_path, detector, "operations")
    assert not usage.incomplete
    assert usage.devices and usage.processes[0].ended
    used = [library for library in usage.libraries if library.images]
    names = {Path(library.library.path).name.split(".")[0] for library in used}
    assert names >= {"libtorch_cuda", "libcublasLt", "libcufft", "libcusolver"}
    for library in used:
        regions = read_library(library.library.path, Scope(headers_only=True)).iter_regions()
        starts = {region.span.start for region in regions}
        assert {image.offset for image in library.images} <= starts
    nodeids = {context.nodeid for context in usage.contexts}
    assert nodeids >= {"sin", "matmul", "fft", "sort", "svd"}


def test_both_detectors_see_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    usages = [play(tmp_path / d, d, "operations")[0] for d in DETECTORS]
    assert kernels(usages[0]) == kernels(usages[1])


def test_every_kernel_launched_was_looked_up_or_its_image_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    usage, _ = play(tmp_path, "launch", "operations")
    launched = set(usage.launches)
    assert len(launched) > 10
    unseen = launched - kernels(usage)
    whole = {
        Path(library.library.path).name.split(".")[0]
        for library in usage.libraries
        for image in library.images
        if image.whole
    }
    # cuFFT's kernels are reached in a way that CUPTI doesn't show; its images are whole.
    assert not unseen or (whole & {"libcufft"} and all("fft" in name for name in unseen))


def test_each_launch_has_its_range(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    usage, _ = play(tmp_path, "range", "ranges")
    assert not [w.text for w in usage.warnings if w.code == "ranges-unavailable"]
    counts: Counter[tuple[tuple[str, ...], str]] = Counter()
    for name, row in usage.iter_launches():
        assert row.gpu_ns
        for part in ("sin_kernel", "cos_kernel", "tanh_kernel", "exp_kernel", "gemm"):
            if part in name.lower():
                counts[usage.ranges_of(row), part] += row.count
    assert counts[(), "sin_kernel"] == 1
    assert counts[("outer",), "cos_kernel"] == 2
    assert counts[("outer", "inner"), "tanh_kernel"] == 3
    # The kernel of a graph counts where the graph is launched.
    assert counts[("replay",), "exp_kernel"] == 2
    # The operator of PyTorch, and of its backward pass in a thread of its own.
    named = {name for ranges, part in counts for name in ranges if part == "gemm"}
    assert any(name.startswith("aten::") for name in named)
    assert any("Backward" in name for name in named)
    assert not any("seq = " in name for name in named)


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_forked_child_traces_into_its_own_file(tmp_path: Path, detector: str) -> None:
    pytest.importorskip("torch")
    usage, _ = play(tmp_path, detector, "fork")
    parent, child = usage.processes
    assert (parent.header.role, child.header.role) == (Role.SOLO, Role.CHILD)
    assert child.header.ppid == parent.header.pid
    assert any("sin_kernel" in name for name in kernels(usage))
    assert not usage.incomplete


@pytest.mark.parametrize("detector", DETECTORS)
def test_the_profiler_works_in_a_pause_and_tracing_goes_on(tmp_path: Path, detector: str) -> None:
    pytest.importorskip("torch")
    usage, out = play(tmp_path, detector, "profiler-in-pause")
    assert len(out.split("events ")) == 3 and "events 0" not in out
    # Both gaps have the same words.
    [lack] = usage.incomplete
    assert lack.code == "gap" and "the detector was off: a test that profiles" in lack.text
    assert any("cosh" in name for name in kernels(usage))


@pytest.mark.parametrize("level", ["lookup", "launch"])
def test_the_profiler_and_the_tracer_share_cupti(tmp_path: Path, level: str) -> None:
    pytest.importorskip("torch")
    usage, out = play(tmp_path, level, "profiler-without-pause")
    assert len(out.split("events ")) == 3 and "events 0" not in out
    assert not usage.incomplete
    assert all(any(name in kernel for kernel in kernels(usage)) for name in ("cos", "sin", "cosh"))
    codes = {warning.code for warning in usage.warnings}
    assert codes == ({"launches-unavailable"} if level == "launch" else set())


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_killed_process_loses_nothing(tmp_path: Path, detector: str) -> None:
    pytest.importorskip("torch")
    usage, _ = play(tmp_path, detector, "killed", returncode=-signal.SIGKILL)
    [lack] = usage.incomplete
    assert not usage.processes[0].ended and lack.code == UNENDED
    assert any("sin_kernel" in name for name in kernels(usage))


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_taken_cupti_is_said_and_makes_the_usage_incomplete(
    tmp_path: Path, detector: str
) -> None:
    usage, out = play(tmp_path, detector, "busy")
    assert out.startswith("busy CUPTI serves one tool at a time")
    assert {w.code for w in usage.incomplete} == {"cupti-taken"}


@pytest.mark.parametrize("detector", DETECTORS)
def test_eager_loading_is_reported(tmp_path: Path, detector: str) -> None:
    pytest.importorskip("torch")
    usage, _ = play(tmp_path, detector, "operations", CUDA_MODULE_LOADING="EAGER")
    assert "eager-loading" in {w.code for w in usage.warnings}


@pytest.mark.parametrize("forever", [False, True])
def test_a_program_in_c_is_traced(tmp_path: Path, forever: bool) -> None:
    nvcc, injection = shutil.which("nvcc"), injection_library()
    if nvcc is None or injection is None:
        pytest.skip("nvcc or the native library is missing")
    program = tmp_path / "program"
    source = str(HERE / "program.cu")
    subprocess.run([nvcc, "-arch=native", "-o", str(program), source], check=True)
    run = Run(tmp_path / "run-1")
    run.trace_dir.mkdir(parents=True)
    changes = child_environment(
        os.environ,
        run=run,
        root=tmp_path,
        injection=injection,
        cupti=None,
    )
    changes["PYTEST_CURRENT_TEST"] = "t.py::test_program (call)"
    command = [str(program), *(["forever"] if forever else [])]
    with subprocess.Popen(command, env={**os.environ, **changes}, stdout=subprocess.PIPE) as p:
        assert p.stdout is not None
        assert p.stdout.readline() == b"6\n"
        if forever:
            p.kill()
        assert p.wait() == (-signal.SIGKILL if forever else 0)
    usage = merge_traces(run.trace_files())
    (found,) = [x for x in usage.libraries if x.library.path == str(program)]
    (image,) = found.images
    assert list(image.kernels) == ["_Z4usedPi"]
    assert image.data == ("table",)
    assert usage.contexts[image.first.context].nodeid == "t.py::test_program"
    assert usage.processes[0].ended is not forever
    assert not usage.incomplete


def test_the_archs_of_this_machine() -> None:
    done = subprocess.run(
        [NEGATIVA, "inspect", "--arch", "native", MULTIARCH], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "A device of compute capability " in done.stdout


def test_a_service_is_traced_for_a_while(tmp_path: Path) -> None:
    """CUPTI is given back while the process works, and the process goes on as before."""
    pytest.importorskip("torch")
    run = Run(tmp_path / "run")
    # Long enough for the first kernel, while other tests start processes on the GPU, too.
    variables = attach_environment(run, one_of=1, seconds=8, files=10)
    code = """
import os, sys, time, torch
print(torch.sin(torch.ones(8, device="cuda")).sum().item())
[trace] = os.scandir(sys.argv[1])
while '"gap"' not in open(trace).read():
    time.sleep(0.05)
    torch.sin(torch.ones(8, device="cuda"))
print(torch.linalg.inv(torch.eye(8, device="cuda")).sum().item())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.trace_dir)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=240,
    )
    assert [round(float(line), 3) for line in done.stdout.split()] == [6.732, 8.0]
    usage = merge_traces(run.trace_files())
    found = kernels(usage)
    assert any("sin_kernel" in name for name in found)
    assert not any("getrf" in name.lower() or "lu_" in name.lower() for name in found)
    [process] = usage.processes
    assert process.header.role is Role.SAMPLE and process.ended and not process.header.argv
    assert not usage.incomplete
