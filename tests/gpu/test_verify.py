"""Plans put to the test on a GPU: what must be proved is, and every planted fault shows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_negativa.models.library import Cubin
from pytest_negativa.models.spans import Span
from pytest_negativa.storage.results import load_planned, save_plans
from pytest_negativa.storage.runs import Run
from tests.support.faults import PlantedFault
from tests.support.libraries import EXAMPLES, NEGATIVA
from tests.support.many import KERNELS, LIBRARIES
from tests.support.programs import run

HERE = Path(__file__).parent

# Tests that behave otherwise on the copies find out by the variable that names the round.
PROJECT = f"""
import ctypes, os, shutil, signal
from pathlib import Path
import pytest

HERE = Path(__file__).parent
ON_COPIES = "NEGATIVA_REDIRECT_TABLE" in os.environ


def run(library, kernel, bad=0, path=None):
    name = f"libmany{{library}}.so"
    return ctypes.CDLL(str(path or HERE / name))[f"run_{{library}}_{{kernel}}"](bad)


@pytest.mark.parametrize("kernel", range({KERNELS}))
@pytest.mark.parametrize("library", range({LIBRARIES}))
def test_kernel(library, kernel):
    assert run(library, kernel) == 100 * library + kernel


def test_cpu():
    assert 1 + 1 == 2
"""

SKIPPED = """

@pytest.mark.skipif(ON_COPIES, reason="not now")
def test_skipped_on_copies():
    assert run(0, 0) == 0
"""

KILLED = """

def test_killed_on_copies():
    assert run(0, 0) == 0
    if ON_COPIES:
        os.kill(os.getpid(), signal.SIGKILL)
"""

LOOKS_FOR_IDLE = """

def test_idle_kernel_is_gone_on_copies():
    if ON_COPIES:
        error = ctypes.CDLL(str(HERE / "libmany2.so")).find_idle_2_2()
        (HERE / "error").write_text(str(error))
    assert run(2, 2) == 202
"""

LOSES_CONTEXT = """

def test_a_loses_its_context_on_copies():
    assert run(1, 1, bad=ON_COPIES) == 101


def test_b_after():
    assert run(2, 2) == 202
"""

BEHIND_ITS_BACK = """

def test_original_by_another_name(tmp_path):
    other = tmp_path / "other.so"
    other.write_bytes((HERE / "libmany0.so").read_bytes())
    assert run(0, 1, path=other) == 1
"""

HANGS = """

def test_hangs_on_copies():
    assert run(3, 3) == 303
    while ON_COPIES:
        signal.pause()
"""

SOUND = """

def test_sound():
    assert run(1, 1) == 101
"""

GOES_ON = f"""{SOUND}

def test_goes_on():
    if run(0, 0) == 0:
        assert run(0, 1) == 1
"""

IGNORES = f"""{SOUND}

def test_ignores_the_result():
    run(0, 1)
"""

FLAKY = """

def test_flaky():
    count = HERE / "count"
    runs = len(count.read_text()) if count.exists() else 0
    count.write_text("x" * (runs + 1))
    assert run(4, 4) == 404
    assert runs % 2 == 0
"""


class Project:
    """A project with the libraries and tests, and what its sessions leave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pytest(self, *arguments: str, status: int = 0, eager: bool = False) -> str:
        environ = {"CUDA_MODULE_LOADING": "EAGER"} if eager else {}
        command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
        return run(self.folder, *command, *arguments, status=status, **environ).stdout

    def negativa(self, *arguments: str | Path, status: int = 0, **environ: str) -> str:
        return run(self.folder, NEGATIVA, *arguments, status=status, **environ).stdout

    @property
    def run(self) -> Path:
        return self.folder / ".negativa" / "latest"

    @property
    def verdict(self) -> Any:
        return json.loads((self.run / "verdict.json").read_text())

    def healed(self) -> list[Any]:
        """What healing gave back."""
        return [need for need in self.verdict["needs"] if need["kept"]]

    def differences(self) -> dict[str, tuple[str | None, str | None]]:
        return {
            test["nodeid"].partition("::")[2]: (test["before"], test["after"])
            for test in self.verdict["tests"]
            if test["before"] != test["after"]
        }

    def plant(self, count: int) -> set[tuple[str, int]]:
        """Call used elements unused, in as many libraries as possible: (library, offset)."""
        files = sorted((self.run / "plan").glob("libmany*.json"))
        plans = {path: json.loads(path.read_text()) for path in files}
        used = [(path, _loaded(plans[path])[number]) for number in range(KERNELS) for path in files]
        planted = set()
        for path, decision in used[:count]:
            decision[2:] = [False, "no-used-kernel", None]
            planted.add((plans[path]["library"]["path"], decision[0]))
        for path, plan in plans.items():
            path.write_text(json.dumps(plan))
        return planted

    def plant_element(self, library: int) -> None:
        """Call the first used element of a library unused."""
        path = self.run / "plan" / f"libmany{library}.so.json"
        plan = json.loads(path.read_text())
        _loaded(plan)[0][2:] = [False, "no-used-kernel", None]
        path.write_text(json.dumps(plan))

    def plant_function(self, library: int, kernel: int) -> str:
        """Call the code of a used kernel unused, in a cubin that stays; the kernel's name."""
        name = f"_Z10kernel_{library}_{kernel}Pi"
        [(planned, trimmed)] = [
            (planned, trimmed)
            for planned in load_planned(Run(self.run))
            for trimmed in planned.plan.trimmed
            if trimmed.kept == (name,)
        ]
        elements = planned.library_map.iter_code()
        [cubin] = [e.content for e in elements if e.payload.start == trimmed.start]
        assert isinstance(cubin, Cubin)
        every = sorted(
            Span(k.offset_in_cubin, k.offset_in_cubin + k.code_size) for k in cubin.kernels
        )
        assert {*trimmed.unused} < {*every}
        faulty = replace(trimmed, kept=(), unused=tuple(every))
        others = [t for t in planned.plan.trimmed if t is not trimmed]
        both = tuple(sorted([*others, faulty], key=lambda t: t.start))
        save_plans(Run(self.run), [replace(planned.plan, trimmed=both)])
        return name


def _loaded(plan: Any) -> list[list[Any]]:
    return [row for row in plan["decisions"] if row[2] and row[3] == "loaded"]


@pytest.fixture
def project(built: Path, tmp_path: Path) -> Project:
    for library in built.glob("*.so"):
        shutil.copy2(library, tmp_path)
    (tmp_path / "test_many.py").write_text(PROJECT)
    (tmp_path / "negativa.yaml").write_text('libraries:\n  include: ["libmany*.so"]\n')
    return Project(tmp_path)


def add_test(project: Project, text: str) -> None:
    with (project.folder / "test_many.py").open("a") as file:
        file.write(text)


def add_debug_information(project: Project) -> None:
    """Make the libraries worth to be compacted."""
    debug = project.folder / "debug"
    debug.write_text("x" * 100_000)
    for library in project.folder.glob("*.so"):
        subprocess.run(["objcopy", f"--add-section=.debug_info={debug}", library], check=True)


def traced(project: Project, text: str = "", *arguments: str) -> Project:
    add_test(project, text)
    project.pytest("--negativa", *arguments)
    return project


def test_proved_lazy_eager_and_distributed(project: Project) -> None:
    out = project.pytest("--negativa", "--negativa-verify")
    assert "PROVED: " in out and "NOT PROVED" not in out
    verdict = project.verdict
    assert verdict["proved"] and verdict["reasons"] == []
    assert {row["status"] for row in verdict["libraries"]} == {"proved"}
    assert len(verdict["libraries"]) == LIBRARIES
    assert verdict["gpu_tests"] == LIBRARIES * KERNELS
    project.pytest("--negativa-verify", eager=True, status=1)
    [reason] = project.verdict["reasons"]
    assert "compares outcomes, and proves nothing" in reason
    project.pytest("--negativa-verify", "-n4")
    assert project.verdict["proved"]


@pytest.mark.parametrize("eager", [False, True])
def test_proved_on_compacted_copies(project: Project, eager: bool) -> None:
    add_debug_information(project)
    options = ("--negativa", "--negativa-verify", "--negativa-copies=compacted")
    assert "PROVED: " in project.pytest(*options, eager=eager)
    assert project.verdict["proved"]
    assert all(row["copy_size"] < row["size"] for row in project.verdict["libraries"])


@pytest.mark.parametrize("eager", [False, True])
def test_kernel_granularity(project: Project, eager: bool) -> None:
    add_test(project, LOOKS_FOR_IDLE)
    options = ("--negativa", "--negativa-verify", "--negativa-granularity=kernel")
    project.pytest(*options, eager=eager, status=1)
    # Not found, and so not run: cudaErrorSymbolNotFound. The driver's word is heard, too.
    assert (project.folder / "error").read_text() == "500"
    verdict = project.verdict
    [work] = verdict["needs"]
    assert work["kernel"] == "_Z8idle_2_2Pi" and "error 500" in work["note"]
    assert verdict["granularity"] == "kernel"
    assert len(verdict["libraries"]) == LIBRARIES
    for row in verdict["libraries"]:
        # Of each used cubin the kernel that no test calls.
        assert [len(spans) for spans in row["trimmed"].values()] == [1] * KERNELS
        assert row["trimmed_code_bytes"] > 0


@pytest.mark.planted_fault(
    "a used function inside a cubin is called unused", says="test_kernel[1-1]: passed -> failed"
)
def test_a_used_function_is_missed(project: Project, fault: PlantedFault) -> None:
    traced(project, "", "--negativa-granularity=kernel")
    project.plant_function(1, 1)
    out = project.pytest("--negativa-verify", status=1)
    fault.check(out)
    assert not project.verdict["proved"], out
    assert project.differences() == {"test_kernel[1-1]": ("passed", "failed")}
    assert "NOT PROVED" in out

    out = project.pytest("--negativa-heal")
    verdict = project.verdict
    assert verdict["proved"]
    [needed] = project.healed()
    assert Path(needed["library"]).name == "libmany1.so"
    assert needed["nodeid"].endswith("test_kernel[1-1]")
    # All code of the cubin was given back; the others stay trimmed.
    rows = {Path(row["path"]).name: row for row in verdict["libraries"]}
    assert len(rows["libmany1.so"]["trimmed"]) == KERNELS - 1
    project.pytest("--negativa-verify")
    assert project.verdict["proved"]


@pytest.mark.planted_fault(
    "a used element is called unused", says="test_kernel[0-0]: passed -> failed"
)
def test_a_used_element_is_missed(project: Project, fault: PlantedFault) -> None:
    traced(project)
    ((library, _offset),) = project.plant(1)
    out = project.pytest("--negativa-verify", status=1)
    fault.check(out)
    assert project.differences() == {"test_kernel[0-0]": ("passed", "failed")}
    assert "test_kernel[0-0]: passed -> failed" in out
    assert f"first to use kernels of {Path(library).name}" in out
    assert not project.verdict["proved"]


@pytest.mark.planted_fault(
    "A kernel is missing, and the test that launches it goes on without the GPU and passes.",
    says="used when traced, but not on the copies: _Z10kernel_0_0Pi of libmany0.so",
)
def test_a_test_goes_on_without_the_gpu(project: Project, fault: PlantedFault) -> None:
    selected = ("-k", "sound or goes_on")
    traced(project, GOES_ON, *selected)
    project.plant_element(0)
    fault.check(project.pytest("--negativa-verify", "--negativa-rerun=1", *selected, status=1))
    assert project.differences() == {}
    rows = {Path(row["path"]).name: row["status"] for row in project.verdict["libraries"]}
    assert rows["libmany0.so"] == "not proved"

    project.pytest("--negativa-heal", "--negativa-rerun=1", *selected)
    assert project.verdict["proved"] and len(project.healed()) == 1


@pytest.mark.planted_fault(
    "A used function is gone from its cubin, and the test that calls it passes.",
    says="used when traced, but not on the copies: _Z10kernel_0_1Pi of libmany0.so",
)
def test_a_used_function_is_missed_in_silence(project: Project, fault: PlantedFault) -> None:
    selected = ("-k", "sound or ignores")
    traced(project, IGNORES, *selected, "--negativa-granularity=kernel")
    project.plant_function(0, 1)
    fault.check(project.pytest("--negativa-verify", *selected, status=1))
    assert project.differences() == {}


@pytest.mark.planted_fault(
    "a test loads a copy of the original that it makes itself", says="copy of the original"
)
def test_an_original_behind_the_redirects_back(project: Project, fault: PlantedFault) -> None:
    traced(project, BEHIND_ITS_BACK)
    out = project.pytest("--negativa-verify", status=1)
    fault.check(out)
    rows = {Path(row["path"]).name: row for row in project.verdict["libraries"]}
    assert rows["libmany0.so"]["status"] == "not proved"
    assert "copy of the original" in rows["libmany0.so"]["detail"]
    assert rows["libmany1.so"]["status"] == "proved"
    assert "NOT PROVED" in out


def test_cpu_code_of_the_driver_that_a_round_itself_needs_stays(project: Project) -> None:
    flags = "--negativa", "--negativa-cpu", "--negativa-verify"
    out = project.pytest(*flags, "-k", "test_kernel")
    assert "Segmentation fault" not in out
    assert "no test needs" in out
    assert project.verdict["proved"]


@pytest.mark.planted_fault(
    "no test of the proof uses the GPU", says="no test was seen to use the GPU"
)
def test_no_gpu_test_is_selected(project: Project, fault: PlantedFault) -> None:
    traced(project)
    out = project.pytest("--negativa-verify", "-k", "cpu", status=1)
    fault.check(out)
    assert "no test was seen to use the GPU" in out
    assert f"{LIBRARIES * KERNELS} tests of the traced run did not run" in out


@pytest.mark.planted_fault(
    "a GPU test is skipped on the copies", says="test_skipped_on_copies: passed -> skipped"
)
def test_a_test_is_skipped_now(project: Project, fault: PlantedFault) -> None:
    traced(project, SKIPPED)
    fault.check(project.pytest("--negativa-verify", status=1))
    assert project.differences() == {"test_skipped_on_copies": ("passed", "skipped")}


@pytest.mark.planted_fault(
    "a library changes between the trace and the proof", says="changed since it was traced: sha256"
)
def test_a_library_changed(project: Project, fault: PlantedFault) -> None:
    traced(project)
    library = project.folder / "libmany3.so"
    before = library.stat()
    data = bytearray(library.read_bytes())
    data[-1] ^= 1
    library.write_bytes(data)
    os.utime(library, ns=(before.st_atime_ns, before.st_mtime_ns))
    out = project.pytest("--negativa-verify", status=1)
    fault.check(out)
    rows = {Path(row["path"]).name: row for row in project.verdict["libraries"]}
    assert rows["libmany3.so"]["status"] == "not proved"
    assert "sha256" in rows["libmany3.so"]["detail"] and "sha256" in out


@pytest.mark.planted_fault(
    "a worker dies on the copies", says="test_killed_on_copies: passed -> crashed"
)
def test_a_worker_is_killed(project: Project, fault: PlantedFault) -> None:
    traced(project, KILLED, "-n2")
    fault.check(project.pytest("--negativa-verify", "-n2", status=1))
    assert project.differences() == {"test_killed_on_copies": ("passed", "crashed")}


@pytest.mark.planted_fault(
    "the session dies on the copies", says="test_killed_on_copies: passed -> crashed"
)
def test_the_session_is_killed(project: Project, fault: PlantedFault) -> None:
    traced(project, KILLED + LOSES_CONTEXT.replace("ON_COPIES", "False"))
    fault.check(project.pytest("--negativa-verify", status=1))
    # The tests behind it ran in a process of their own.
    assert project.differences() == {"test_killed_on_copies": ("passed", "crashed")}
    assert len([r for r in project.verdict["rounds"] if r["kind"] == "verify"]) == 2


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["solo", "n2"])
@pytest.mark.planted_fault(
    "a test loses the CUDA context on the copies", says="CUDA_ERROR_ILLEGAL_ADDRESS"
)
def test_a_lost_context_is_no_other_tests_fault(
    project: Project, fault: PlantedFault, workers: tuple[str]
) -> None:
    traced(project, LOSES_CONTEXT, *workers)
    out = project.pytest("--negativa-verify", *workers, status=1)
    fault.check(out)
    assert project.differences() == {"test_a_loses_its_context_on_copies": ("passed", "failed")}
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in out


@pytest.mark.planted_fault(
    "a GPU test hangs on the copies", says="test_hangs_on_copies: passed -> timed out"
)
def test_a_test_hangs(project: Project, fault: PlantedFault) -> None:
    traced(project, HANGS + LOSES_CONTEXT.replace("ON_COPIES", "False"))
    fault.check(project.pytest("--negativa-verify", "--negativa-verify-timeout=8", status=1))
    assert project.differences() == {"test_hangs_on_copies": ("passed", "timed out")}


def test_flaky_tests_are_named_not_blamed(project: Project) -> None:
    traced(project, FLAKY)
    # Proved, but the test did fail: the exit code is pytest's own.
    out = project.pytest("--negativa-verify", status=1)
    assert project.differences() == {"test_flaky": ("passed", "failed")}
    assert project.verdict["proved"]
    assert "Flaky" in out and "test_flaky" in out


@pytest.mark.parametrize("count", [1, 3, 20])
def test_healing_finds_what_was_planted(project: Project, count: int) -> None:
    traced(project)
    planted = project.plant(count)
    assert len({library for library, _ in planted}) == min(count, LIBRARIES)
    out = project.pytest("--negativa-heal")
    verdict = project.verdict
    healed = project.healed()
    assert verdict["proved"]
    assert {(n["library"], start) for n in healed for start, _ in n["spans"]} == planted
    assert {need["witness"] for need in healed} == {"refused by the driver on the copies alone"}
    found = "the driver refused it to test_many.py::test_kernel"
    assert found in out
    reasons = [
        row
        for path in (project.run / "plan").glob("*.json")
        for row in json.loads(path.read_text())["decisions"]
        if row[3] == "healed"
    ]
    assert len(reasons) == count
    assert all(row[4].startswith(found) for row in reasons)
    # What was found stays found.
    project.pytest("--negativa-verify")
    assert project.verdict["proved"]


SERVICE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
print([library[f"run_0_{kernel}"](0) for kernel in map(int, sys.argv[2:])])
"""


def test_what_a_service_uses_is_added_to_the_lock(project: Project) -> None:
    add_debug_information(project)
    original = project.folder / "libmany0.so"
    libraries = project.folder / "libraries"
    libraries.mkdir()
    shutil.copy2(original, libraries)

    def serve(library: Path, *kernels: int, **environ: str) -> list[int]:
        words = [sys.executable, "-c", SERVICE, str(library), *map(str, kernels)]
        done = run(project.folder, *words, status=0, **environ)
        results: list[int] = json.loads(done.stdout)
        return results

    def slimmed(name: str) -> Path:
        folder = shutil.copytree(libraries, project.folder / name)
        project.negativa("slim", "--no-way-back", "--lock", "negativa.lock", "--require", folder)
        return folder / original.name

    project.pytest("--negativa", "--negativa-verify", "test_many.py::test_kernel[0-0]")
    project.negativa("lock")
    first, second = serve(slimmed("by_tests"), 0, 1)
    # An error of CUDA instead of a result.
    assert first == 0 and second < 0
    variables: dict[str, str] = json.loads(project.negativa("trace", "--attach-env", "--json"))
    assert serve(original, 1, **variables) == [1]
    traced = Path(variables["NEGATIVA_TRACE_DIR"]).parent
    project.negativa("lock", "--add-uses", traced)
    first, second, third = serve(slimmed("by_both"), 0, 1, 2)
    assert (first, second) == (0, 1) and third < 0


NEEDED = {"quickstart": None, "pytorch": "torch", "frameworks": "cupy"}


@pytest.fixture(scope="module", params=NEEDED)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """An example, traced once; what its sessions write lies outside of it."""
    if (package := NEEDED[request.param]) is not None:
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("examples") / request.param
    shutil.copytree(EXAMPLES / request.param, folder, ignore=shutil.ignore_patterns(".negativa"))
    example = Project(folder)
    example.pytest("--negativa", "-W", "ignore")
    return example


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize("workers", [(), ("-n4",)], ids=["solo", "n4"])
def test_examples_are_proved(example: Project, workers: tuple[str, ...], eager: bool) -> None:
    # Sessions of other tests, which run beside this one, open the same installed packages.
    note = "--negativa-opened-originals=*"
    status = 1 if eager else 0
    example.pytest("--negativa-verify", "-W", "ignore", note, *workers, eager=eager, status=status)
    verdict = example.verdict
    # Outcomes and work are as when traced.
    reasons = [reason for reason in verdict["reasons"] if "EAGER" not in reason]
    assert reasons == [] and verdict["proved"] is not eager
    unused = sum(row["unused_bytes"] for row in verdict["libraries"])
    code = sum(row["code_bytes"] for row in verdict["libraries"])
    assert unused > 0.85 * code


def test_demo_is_proved(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(EXAMPLES / "demo", folder, ignore=shutil.ignore_patterns(".negativa", "build"))
    subprocess.run(
        ["bash", "build.sh"], cwd=folder, check=True, env={**os.environ, "ARCHS": "80 90"}
    )

    demo = Project(folder)
    demo.negativa("debloat", "--", "./build/main", "matmul")
    assert "PROVED" in demo.negativa("verify")
    eagerly = demo.negativa("verify", CUDA_MODULE_LOADING="EAGER", status=1)
    assert "compares outcomes, and proves nothing" in eagerly
    # What the other kernel needs is unused, and overwritten.
    assert "NOT PROVED" in demo.negativa(
        "verify", "--", "./build/main", "set_scalar_items", status=1
    )


def test_a_program_with_gpu_code_of_its_own_is_said_to_be_one(tmp_path: Path) -> None:
    run(tmp_path, "nvcc", "-arch=native", "-o", tmp_path / "program", HERE / "program.cu")
    run(tmp_path, NEGATIVA, "debloat", tmp_path / "program")
    done = run(tmp_path, NEGATIVA, "verify", status=1)
    assert "not substituted" in done.stdout and "it is a program" in done.stdout
