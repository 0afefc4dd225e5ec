"""Whole sessions of ``pytest --negativa`` on a GPU, with PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.storage.records import load_map
from tests.support.faults import PlantedFault
from tests.support.libraries import EXAMPLES
from tests.support.programs import run

pytest.importorskip("torch")

PYTORCH_EXAMPLE = EXAMPLES / "pytorch"

OPERATIONS = """
import os, signal, subprocess, sys
import pytest
import torch


@pytest.fixture(scope="module")
def matrix():
    return torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")


def test_relu(matrix):
    assert bool((matrix.relu() >= 0).all())


def test_sort(matrix):
    assert torch.equal(matrix.flatten().sort().values.cpu(), matrix.cpu().flatten().sort().values)


def test_child():
    code = "import torch; print(torch.arange(10, device='cuda').cumsum(0)[-1].item())"
    assert subprocess.check_output([sys.executable, "-c", code]).strip() == b"45"
"""

KILLED = """
import os, signal
import torch


def test_first():
    assert torch.ones(8, device="cuda").sum().item() == 8


def test_killed():
    torch.randn(100, device="cuda").sort()
    torch.cuda.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)


def test_last():
    assert torch.ones(8, device="cuda").prod().item() == 1
"""

PROFILED = """
import pytest
import torch


@pytest.mark.negativa_off(reason="profiles itself")
def test_profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.randn(64, device="cuda").exp()
        torch.cuda.synchronize()
    assert any("kernel" in event.key for event in profile.key_averages())


def test_traced():
    assert torch.ones(8, device="cuda").sum().item() == 8
"""

LATE_CONFTEST = """
import atexit, threading
import pytest
import torch


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    torch.randn(100, device="cuda").sort()


def pytest_unconfigure():
    torch.arange(10, device="cuda").cumsum(0)


def later():
    threading.main_thread().join()
    torch.randn(64, device="cuda").erfinv()


def at_exit():
    torch.fft.fft(torch.randn(64, device="cuda"))
    torch.cuda.synchronize()


def pytest_configure():
    threading.Thread(target=later).start()
    atexit.register(at_exit)
"""

# Writes the kernels that a whole session launched, as the profiler of PyTorch saw them.
PROFILE_PLUGIN = """
import torch
from torch.profiler import ProfilerActivity

profile = torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True)


def pytest_sessionstart(session):
    profile.__enter__()


def pytest_sessionfinish(session):
    torch.cuda.synchronize()
    profile.__exit__(None, None, None)
    names = {e.name() for e in profile.profiler.kineto_results.events()
             if str(e.device_type()).endswith("CUDA")}
    with open("launched.txt", "w") as file:
        file.write("\\n".join(sorted(names)))
"""


def run_pytest(
    folder: Path, *arguments: str, status: int = 0, **environ: str
) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    return run(folder, *command, *arguments, status=status, **environ)


def latest(folder: Path, name: str) -> Any:
    return json.loads((folder / ".negativa" / "latest" / name).read_text())


def used(usage: Any) -> dict[str, dict[int, set[str]]]:
    """Kernels that were looked up, by library and offset of the image."""
    return {
        library["library"]["path"]: {
            image["offset"]: set(image["kernels"]) for image in library["images"]
        }
        for library in usage["libraries"]
        if library["images"]
    }


def first_uses(usage: Any) -> dict[str, str | None]:
    """Node id of the test, or phase, in which each kernel was first looked up."""
    return {
        kernel: usage["contexts"][first["context"]]["nodeid"]
        or usage["contexts"][first["context"]]["phase"]
        for library in usage["libraries"]
        for image in library["images"]
        for kernel, first in image["kernels"].items()
    }


def test_session_with_a_child(tmp_path: Path) -> None:
    (tmp_path / "test_ops.py").write_text(OPERATIONS)

    done = run_pytest(tmp_path, "--negativa")

    assert "unused on NVIDIA" in done.stdout
    usage = latest(tmp_path, "usage.json")
    assert usage["incomplete"] == []
    roles = [(p["header"]["role"], p["ended"]) for p in usage["processes"]]
    assert roles == [("solo", True), ("child", True)]
    uses = first_uses(usage)
    tests = {nodeid for nodeid in uses.values() if nodeid and "::" in nodeid}
    assert tests == {"test_ops.py::test_relu", "test_ops.py::test_sort", "test_ops.py::test_child"}
    # The matrix product belongs to the fixture, not to the test that came first.
    assert "test_ops.py" in uses.values()
    plan = latest(tmp_path, "plan/libtorch_cuda.so.json")
    kept = [d for d in plan["decisions"] if d[2]]
    assert kept and {d[3] for d in kept} == {"loaded"}
    assert len(kept) < len(plan["decisions"]) / 20
    spans = latest(tmp_path, "spans/libtorch_cuda.so.json")["spans"]
    assert [(s["start"], s["end"]) for s in spans] == [
        (d[0], d[1]) for d in plan["decisions"] if not d[2]
    ]


def test_workers_find_what_one_process_finds(tmp_path: Path) -> None:
    folders = {}
    for name, arguments in {
        "serial": [],
        "four": ["-n4"],
        "file": ["-n4", "--dist=loadfile"],
    }.items():
        target = tmp_path / name
        arguments = [*arguments, f"--negativa-dir={target / '.negativa'}"]
        run_pytest(PYTORCH_EXAMPLE, "-q", "--negativa", *arguments)
        folders[name] = _without_cub_probe(used(latest(target, "usage.json")))

    assert folders["four"] == folders["serial"]
    assert folders["file"] == folders["serial"]


def _without_cub_probe(usage: dict[str, dict[int, set[str]]]) -> dict[str, dict[int, set[str]]]:
    """CUB looks ``EmptyKernel`` up once in a process, in whichever image is the first to ask.

    More processes ask in more images, all of which are in use anyway.
    """
    return {
        library: {
            offset: {name for name in names if "EmptyKernel" not in name}
            for offset, names in images.items()
        }
        for library, images in usage.items()
    }


def test_suite_without_gpu_use_says_so_in_one_line_with_the_next_command(tmp_path: Path) -> None:
    (tmp_path / "test_cpu.py").write_text("def test_cpu():\n    assert 1 + 1 == 2\n")

    with_plugin = run_pytest(tmp_path, "-q", "--negativa").stdout.splitlines()
    without = run_pytest(tmp_path, "-q").stdout.splitlines()

    assert len(with_plugin) == len(without) + 2
    assert "no GPU code was used" in with_plugin[-3] and with_plugin[-2].startswith("Next: ")


def test_killed_worker(tmp_path: Path) -> None:
    (tmp_path / "test_kill.py").write_text(KILLED)

    done = run_pytest(tmp_path, "--negativa", "-n2", "--dist=loadfile", status=1)

    assert "did not end by itself" in done.stdout
    assert "was lost" in done.stdout
    assert "nothing is planned from this run" in done.stdout
    assert not (tmp_path / ".negativa" / "latest" / "plan").exists()
    uses = first_uses(latest(tmp_path, "usage.json"))
    assert "test_kill.py::test_killed" in uses.values()
    assert "test_kill.py::test_first" in uses.values()


def test_profiler_in_a_marked_test(tmp_path: Path) -> None:
    (tmp_path / "test_profile.py").write_text(PROFILED)

    done = run_pytest(tmp_path, "--negativa")

    assert "profiles itself" in done.stdout
    usage = latest(tmp_path, "usage.json")
    [lack] = usage["incomplete"]
    assert lack["code"] == "gap" and lack["text"].endswith("the detector was off: profiles itself")
    assert "test_profile.py::test_traced" in first_uses(usage).values()
    plan = latest(tmp_path, "plan/libtorch_cuda.so.json")
    assert {d[3] for d in plan["decisions"]} == {"incomplete"}


def test_profiler_without_the_mark(tmp_path: Path) -> None:
    marked = '@pytest.mark.negativa_off(reason="profiles itself")\n'
    (tmp_path / "test_profile.py").write_text(PROFILED.replace(marked, ""))

    # Sessions of other tests, which run beside this one, open the same installed packages.
    note = "--negativa-opened-originals=*"
    done = run_pytest(tmp_path, "--negativa", "--negativa-verify", note)

    assert "\nPROVED" in done.stdout
    usage = latest(tmp_path, "usage.json")
    assert not usage["incomplete"]
    assert "test_profile.py::test_profiled" in first_uses(usage).values()


def test_profiler_that_began_before_the_tracer(tmp_path: Path) -> None:
    (tmp_path / "test_ops.py").write_text(OPERATIONS)
    (tmp_path / "holder.py").write_text(
        "import torch\n"
        "from torch.profiler import ProfilerActivity, profile\n"
        "with profile(activities=[ProfilerActivity.CUDA]):\n"
        "    torch.zeros(1, device='cuda')\n"
    )

    # Holds CUPTI before the plugin can.
    done = run_pytest(
        tmp_path,
        "--negativa",
        "-p",
        "holder",
        PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    )

    assert "CUPTI" in done.stdout
    assert "3 passed" in done.stdout


def test_eager_loading_is_said(tmp_path: Path) -> None:
    (tmp_path / "test_ops.py").write_text(OPERATIONS)

    done = run_pytest(tmp_path, "--negativa", CUDA_MODULE_LOADING="EAGER")

    assert "CUDA_MODULE_LOADING=EAGER" in done.stdout


def test_stopped_session_plans_nothing(tmp_path: Path) -> None:
    fails = "\n\ndef test_fails():\n    assert False\n\n\ndef test_left_out():\n    pass\n"
    (tmp_path / "test_ops.py").write_text(OPERATIONS + fails)

    run_pytest(tmp_path, "--negativa", status=1)
    assert (tmp_path / ".negativa" / "latest" / "plan").exists()

    done = run_pytest(tmp_path, "--negativa", "-x", status=1)

    assert "nothing is planned from this run" in done.stdout
    assert not (tmp_path / ".negativa" / "latest" / "plan").exists()


def test_threshold_fails_the_session(tmp_path: Path) -> None:
    (tmp_path / "test_ops.py").write_text(OPERATIONS)
    (tmp_path / "negativa.yaml").write_text("thresholds: {max_unused_percent: 10}\n")

    done = run_pytest(tmp_path, "--negativa", status=1)

    assert "max_unused_percent" in done.stdout
    assert "3 passed" in done.stdout


def test_every_launched_kernel_of_a_library_is_in_the_trace(tmp_path: Path) -> None:
    """Recall, against an independent run under the profiler of PyTorch."""
    (tmp_path / "whole_session_profile.py").write_text(PROFILE_PLUGIN)
    environ = {
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p",
         "whole_session_profile", "--rootdir", str(PYTORCH_EXAMPLE), str(PYTORCH_EXAMPLE / "tests"),
         "-c", str(PYTORCH_EXAMPLE / "pytest.ini")],
        cwd=tmp_path, env={**os.environ, **environ}, check=False, timeout=400,
    )  # fmt: skip
    launched = set((tmp_path / "launched.txt").read_text().split("\n"))
    run_pytest(PYTORCH_EXAMPLE, "-q", "--negativa", f"--negativa-dir={tmp_path / '.negativa'}")
    usage = latest(tmp_path, "usage.json")

    held: set[str] = set()
    for path in (tmp_path / ".negativa" / "latest" / "map").iterdir():
        held.update(map(demangle, load_map(path).names))
    looked_up = {
        demangle(kernel)
        for images in (
            [i for library in usage["libraries"] for i in library["images"]],
            usage["memory_images"],
            usage["compiled"],
        )
        for image in images
        for kernel in image["kernels"]
    }
    whole = {
        demangle(name)
        for library in usage["libraries"]
        for image in library["images"]
        if not image["kernels"] or image["enumerated_by"]
        for name in _kernels_at(tmp_path, library["library"]["path"], image["offset"])
    }
    of_libraries = {name for name in launched if name in held}
    missing = of_libraries - looked_up - whole
    print(
        f"launched {len(launched)} names, {len(of_libraries)} of libraries; "
        f"looked up {len(of_libraries & looked_up)}, by whole images "
        f"{len(of_libraries & whole - looked_up)}, missing {len(missing)}"
    )
    assert len(of_libraries) > 100
    assert not missing


LAUNCHES = """
import torch


def test_relu():
    assert bool((torch.randn(64, 64, device="cuda").relu() >= 0).all())


def test_sort():
    values = torch.randn(1000, device="cuda")
    assert torch.equal(values.sort().values.cpu(), values.cpu().sort().values)
"""


def test_run_kernels_are_the_launched_ones(tmp_path: Path) -> None:
    """Kernel coverage, against an independent run under the profiler of PyTorch."""
    (tmp_path / "test_launches.py").write_text(LAUNCHES)
    (tmp_path / "whole_session_profile.py").write_text(PROFILE_PLUGIN)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    run_pytest(tmp_path, "-q", "-p", "whole_session_profile", PYTHONPATH=path)
    launched = set((tmp_path / "launched.txt").read_text().split("\n"))

    def covered(level: str) -> tuple[set[str], set[str]]:
        options = (f"--negativa-level={level}", "--negativa-cover-library=libtorch_cuda.so")
        run_pytest(tmp_path, "-q", "--negativa", *options)
        [library] = latest(tmp_path, "report.json")["coverage"]
        assert library["counted"] is (level == "launch")
        names = {demangle(kernel["name"]): kernel["runs"] for kernel in library["kernels"]}
        return set(names), {name for name, runs in names.items() if runs}

    present, ran = covered("launch")
    assert ran == launched & present
    assert len(ran) > 2
    assert ran <= covered("lookup")[1]


COUNTED = '''
import subprocess, sys

OPERATIONS = """
import torch
x = torch.linspace(0, 1, 100, device="cuda")
with torch.cuda.nvtx.range("outer"):
    for _ in range(5):
        x = x.sin()
    with torch.cuda.nvtx.range("inner"):
        x = x.cos().cos()
x.exp()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x.exp()
for _ in range(7):
    graph.replay()
torch.cuda.synchronize()
"""

def test_child():
    subprocess.run([sys.executable, "-c", OPERATIONS], check=True)

def test_here():
    exec(OPERATIONS, {})
'''


def test_a_child_counts_as_the_test_process_does(tmp_path: Path) -> None:
    """The native library's count of launches by range, against that of cupti-python."""
    (tmp_path / "test_counted.py").write_text(COUNTED)
    run_pytest(tmp_path, "-q", "--negativa", "--negativa-level=range")
    usage = latest(tmp_path, "usage.json")
    assert all(process["counts_launches"] for process in usage["processes"])
    counts: dict[str | None, dict[tuple[str, int | None], int]] = {}
    for name, rows in usage["launches"].items():
        for context, count, gpu_ns, ranges in rows:
            assert gpu_ns > 0
            counts.setdefault(usage["contexts"][context]["nodeid"], {})[name, ranges] = count
    child, here = (counts[f"test_counted.py::test_{name}"] for name in ("child", "here"))
    assert child == here
    assert {5, 2, 8} <= set(child.values()) and len({ranges for _, ranges in child}) == 3


ENDS_EARLY = """
import torch


def test_goes_on_behind_its_end():
    values = torch.zeros(1 << 26, device="cuda")
    for _ in range(300):
        values.sin_()


def test_next():
    torch.ones(10, device="cuda").exp_()
"""


def test_launches_count_for_the_test_that_made_them(tmp_path: Path) -> None:
    (tmp_path / "test_early.py").write_text(ENDS_EARLY)
    run_pytest(tmp_path, "-q", "--negativa", "--negativa-level=launch")
    usage = latest(tmp_path, "usage.json")
    counts: dict[str, dict[str, int]] = {"sin": {}, "exp": {}}
    for name, rows in usage["launches"].items():
        for context, count, *_ in rows:
            if operation := next((word for word in counts if f"{word}_kernel" in name), None):
                counts[operation][usage["contexts"][context]["nodeid"]] = count
    assert counts == {
        "sin": {"test_early.py::test_goes_on_behind_its_end": 300},
        "exp": {"test_early.py::test_next": 1},
    }


def _kernels_at(tmp_path: Path, library: str, offset: int) -> set[str]:
    found = tmp_path / ".negativa" / "latest" / "map" / f"{Path(library).name}.json"
    library_map = load_map(found)
    return {
        kernel.name
        for region in library_map.iter_regions()
        if region.span.start == offset
        for element in region.elements
        for kernel in library_map.kernels_of(element.content)
    }


@pytest.mark.planted_fault(
    "Code is used after the report: in pytest_unconfigure, in a thread that outlives the tests, "
    "and in an atexit handler",
    says="used after the report: ",
)
def test_what_is_used_late_is_traced_and_proved(tmp_path: Path, fault: PlantedFault) -> None:
    (tmp_path / "test_ops.py").write_text(
        "import torch\n\n\ndef test_relu():\n    torch.randn(8, device='cuda').relu()\n"
    )
    (tmp_path / "conftest.py").write_text(LATE_CONFTEST)

    # Sessions of other tests, which run beside this one, open the same installed packages.
    note = "--negativa-opened-originals=*"
    done = run_pytest(tmp_path, "--negativa", "--negativa-verify", note)

    fault.check(done.stderr)
    assert "\nPROVED" in done.stdout
    usage = latest(tmp_path, "usage.json")
    details = {usage["contexts"][first["context"]].get("detail")
               for lib in usage["libraries"] for image in lib["images"]
               for first in image["kernels"].values()}  # fmt: skip
    assert {"pytest_sessionfinish", "pytest_unconfigure", "after the session"} <= details
    used_libraries = {Path(path).name.split(".")[0] for path in used(usage)}
    assert {"libtorch_cuda", "libcufft"} <= used_libraries


NESTED = """
import subprocess, sys
import torch


def test_relu():
    torch.randn(8, device="cuda").relu()


def test_a_session_of_its_own():
    command = [sys.executable, "-m", "pytest", "--negativa", *{workers!r}, "inner.py"]
    subprocess.run(command, check=True, cwd="nested")
"""


@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["alone", "workers"])
@pytest.mark.planted_fault(
    "On a GPU: a test starts a pytest session with --negativa, whose tests or workers use it.",
    says="is traced into another run",
)
def test_a_session_that_a_test_starts(
    tmp_path: Path, fault: PlantedFault, workers: tuple[str, ...]
) -> None:
    (tmp_path / "test_nested.py").write_text(NESTED.format(workers=workers))
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "inner.py").write_text(
        "import torch\n\n\ndef test_sort():\n    torch.randn(8, device='cuda').sort()\n"
    )

    run_pytest(tmp_path, "--negativa")

    # The inner session has a run of its own; the outer plan keeps all code.
    lacks = latest(tmp_path, "usage.json")["incomplete"]
    fault.check(" ".join(lack["text"] for lack in lacks))
    assert {lack["process"] for lack in lacks} == {None}
    plan = latest(tmp_path, "plan/libtorch_cuda.so.json")
    assert {d[3] for d in plan["decisions"]} == {"incomplete"}
    assert used(latest(tmp_path / "nested", "usage.json"))
