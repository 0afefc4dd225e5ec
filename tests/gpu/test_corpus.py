"""Small CUDA programs in many styles: all that they launch is traced, and their plans are proved.

A program is a library of ``corpus/``. Its function ``run`` checks its results, and ``host.c`` calls
it. CUPTI's activity records (``activity.c``) tell what it launched, apart from the tracer.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_negativa.models.plan import KeepReason
from pytest_negativa.models.trace import Usage
from pytest_negativa.storage.results import load_planned, load_usage
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.command import find_cupti
from tests.support.programs import run

CORPUS = Path(__file__).parent / "corpus"
ARCHS = (
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
)


@dataclass(frozen=True)
class Program:
    """How a program is built and run.

    Args:
        archs: what nvcc compiles for.
        flags: for nvcc, and sources besides its own and ``idle.cu``.
        builds: libraries that are built of it, each with a flag of its own.
        times: how often its libraries are loaded.
        with_module: it loads ``module.cu`` itself.
        shared_runtime: CUDA's runtime is a shared library, else it is linked statically.
        not_looked_up: kernels that run without a look-up by name. They are kept with their image.
        trimmed: whether kernels are unused in a cubin that it loads; None: that differs by library.
    """

    archs: tuple[str, ...] = ARCHS
    flags: tuple[str, ...] = ()
    builds: tuple[str, ...] = ("-DVALUE=1",)
    times: int = 1
    with_module: bool = False
    shared_runtime: bool = False
    not_looked_up: tuple[str, ...] = ()
    trimmed: bool | None = True


PROGRAMS = {
    "reload": Program(builds=("-DVALUE=1", "-DVALUE=2"), times=4),
    "archs": Program(),
    "asserts": Program(),
    "attributes": Program(),
    "cooperative": Program(),
    "data_only": Program(trimmed=False),
    "driver": Program(with_module=True),
    "enumerates": Program(
        with_module=True,
        not_looked_up=("in_module", "also_in_module", "idle_in_module"),
        trimmed=False,
    ),
    "from_device": Program(
        flags=("-rdc=true", "-lcudadevrt"), not_looked_up=("_Z5childPi", "_Z10grandchildPi")
    ),
    "graphs": Program(),
    "ipc": Program(),
    "library": Program(with_module=True),
    "managed": Program(),
    "pointers": Program(),
    "run_time": Program(),
    "streams": Program(flags=("-default-stream=per-thread",)),
    "symbols": Program(shared_runtime=True),
    "from_ptx": Program(archs=("-gencode=arch=compute_80,code=compute_80",), trimmed=False),
    "templates": Program(flags=("--extended-lambda",)),
    "textures": Program(shared_runtime=True),
    "units": Program(flags=("-rdc=true", "units_other.cu")),
}
OLDER_RUNTIMES = {"11.8": "libcudart.so.11.0", "12.4": "libcudart.so.12"}
"""Toolkits whose programs are in ``prebuilt.tar.xz``, with the runtime that they load."""


def negativa(folder: Path, *arguments: str | Path, **environ: str) -> str:
    command = (sys.executable, "-m", "pytest_negativa", *arguments)
    return run(folder, *command, status=0, **environ).stdout


def compile_program(program: str, how: Program, folder: Path) -> list[Path]:
    """Build the libraries of a program, and ``host``, into the folder."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.fail("nvcc is not on PATH: the programs can't be built")
    sources = folder / "src"
    shutil.copytree(CORPUS, sources)
    run(sources, "cc", "host.c", "-o", folder / "host", "-ldl")
    command: list[str | Path] = [nvcc, "-std=c++17", "-shared", "-Xcompiler=-fPIC", "--threads=2"]
    command += [*how.archs, f"{program}.cu", "idle.cu", *how.flags]
    if how.with_module:
        run(sources, nvcc, "-fatbin", *ARCHS, "module.cu", "-o", "module.fatbin")
        run(sources, "cc", "-c", "module.S", "-o", "module.o")
        command.append("module.o")
    if how.shared_runtime:
        dry = subprocess.run([nvcc, "--dryrun", "idle.cu"], cwd=sources, stderr=subprocess.PIPE)
        folders = re.findall(rb'"?-L([^" ]+)', dry.stderr)
        assert folders, dry.stderr
        command += ["-cudart=shared", *(f"-Xlinker=-rpath={os.fsdecode(f)}" for f in folders)]
    libraries = [folder / f"lib{program}{number}.so" for number in range(len(how.builds))]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        builds = [
            pool.submit(run, sources, *command, flag, "-o", library)
            for library, flag in zip(libraries, how.builds, strict=True)
        ]
        for build in builds:
            build.result()
    return libraries


def run_time_compilers() -> dict[str, str]:
    """Where NVRTC and nvJitLink are: packages of NVIDIA, or a toolkit."""
    folders = [Path(folder, "nvidia/cu13/lib") for folder in sys.path]
    folders += [Path("/usr/local/cuda/lib64")]
    found = {}
    for name in ("nvrtc", "nvJitLink"):
        files = [f for folder in folders if (f := folder / f"lib{name}.so.13").exists()]
        if not files:
            pytest.skip(f"no lib{name}.so.13 here")
        found[f"CORPUS_{name.upper()}"] = str(files[0])
    return found


def folder_of(runtime: str) -> Path:
    """The folder of an older CUDA runtime: ``$CORPUS_CUDART``, a package, or a toolkit."""
    folders = [Path(os.environ.get("CORPUS_CUDART", "/usr/local/cuda/lib64"))]
    folders += [Path(folder, "nvidia/cuda_runtime/lib") for folder in sys.path]
    folders += Path("/usr/local").glob("cuda-*/lib64")
    for folder in folders:
        if (folder / runtime).exists():
            return folder
    pytest.skip(f"no {runtime} here; a package nvidia-cuda-runtime-cu* has it")


def launched(folder: Path, command: list[str | Path]) -> set[str]:
    """The kernels that ran, by CUPTI's activity records."""
    recorder, names = folder / "activity.so", folder / "launched.txt"
    run(CORPUS, "cc", "-shared", "-fPIC", "activity.c", "-o", recorder, "-ldl")
    names.touch()
    run(
        folder,
        *command,
        CUDA_INJECTION64_PATH=str(recorder),
        CORPUS_CUPTI=find_cupti(sys.path) or "libcupti.so.13",
        CORPUS_LAUNCHES=str(names),
    )
    return set(names.read_text().split())


def looked_up(usage: Usage) -> set[str]:
    return {kernel for image in usage.iter_images() for kernel in image.kernels}


def proofs(folder: Path) -> list[Any]:
    """Compare the last run's outcomes eagerly, then prove it lazily; the rows of its libraries."""
    rows = []
    for mode, status in (("EAGER", 1), ("LAZY", 0)):
        command = (sys.executable, "-m", "pytest_negativa", "verify")
        out = run(folder, *command, status=status, CUDA_MODULE_LOADING=mode).stdout
        verdict = json.loads((folder / ".negativa/latest/verdict.json").read_text())
        # Eager copies of a lazy trace prove nothing, and nothing else speaks against them.
        against = [reason for reason in verdict["reasons"] if "EAGER" not in reason]
        assert not against and verdict["proved"] is (status == 0), out
        rows += verdict["libraries"]
    return rows


def check(folder: Path, command: list[str | Path], how: Program = Program()) -> Any:
    """Trace a program, count apart what it launched, and prove both kinds of plans."""
    ran = launched(folder, command)
    (folder / "negativa.yaml").write_text('libraries:\n  include: ["lib*.so"]\n')

    negativa(folder, "debloat", "--", *command)

    latest = Run(folder / ".negativa/latest")
    usage = load_usage(latest)
    assert usage is not None
    traced = looked_up(usage)
    print(f"launched {len(ran)}, looked up {len(traced)}, both {len(ran & traced)}")
    assert not usage.incomplete
    assert ran - traced <= {*how.not_looked_up}
    assert not any("idle_" in name for name in traced)
    for row in proofs(folder):
        assert row["unused_elements"] > 0, row
    negativa(folder, "locate", "--granularity=kernel")
    for planned in load_planned(latest):
        trimmed = planned.plan.trimmed
        kept = {name for cubin in trimmed for name in cubin.kept}
        print(f"{len(trimmed)} cubins without their unused kernels; kept: {sorted(kept)}")
        assert how.trimmed is None or bool(trimmed) is how.trimmed, planned.plan
        assert not {*planned.plan.unused_kernels} & {*how.not_looked_up}
        assert not any("idle_" in name for name in kept)
    proofs(folder)


@pytest.mark.parametrize(
    ("program", "how"), [pytest.param(*item, id=item[0]) for item in PROGRAMS.items()]
)
def test_program(
    program: str, how: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = compile_program(program, how, tmp_path)
    if program == "run_time":
        for name, file in run_time_compilers().items():
            monkeypatch.setenv(name, file)
    check(tmp_path, [tmp_path / "host", str(how.times), *libraries], how)


@pytest.fixture(params=["shared", "static"])
def runtime(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


def unpack(toolkit: str, runtime: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The programs of an older toolkit; a shared runtime is found from now on."""
    if runtime == "shared":
        monkeypatch.setenv("LD_LIBRARY_PATH", str(folder_of(OLDER_RUNTIMES[toolkit])))
    libraries = []
    folder.mkdir()
    debug = folder.parent / "debug"
    debug.write_text("x" * 100_000)
    with tarfile.open(CORPUS / "prebuilt.tar.xz") as archive:
        for member in archive.getmembers():
            name = Path(member.name).name
            static = name.endswith("_static.so")
            if Path(member.name).parent == Path(toolkit) and static is (runtime == "static"):
                content = archive.extractfile(member)
                assert content is not None
                libraries.append(folder / name)
                libraries[-1].write_bytes(content.read())
                # Else slim would save too little.
                run(folder, "objcopy", f"--add-section=.debug_info={debug}", libraries[-1])
    run(CORPUS, "cc", "host.c", "-o", folder.parent / "host", "-ldl")
    return libraries


def test_programs_of_cuda_12(runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, host = tmp_path / "libraries", tmp_path / "host"
    libraries = unpack("12.4", runtime, folder, monkeypatch)
    # The runtime asks for each library's module, from which any kernel could be had: such images
    # stay whole, except the one that a program loads itself.
    check(tmp_path, [host, "1", *libraries], Program(trimmed=None))

    negativa(tmp_path, "lock")
    copy = shutil.copytree(folder, tmp_path / "slimmed")
    negativa(tmp_path, "slim", "--no-way-back", "--lock=negativa.lock", "--require", copy)
    slimmed = [copy / library.name for library in libraries]
    for mode in ("LAZY", "EAGER"):
        run(tmp_path, host, "1", *slimmed, CUDA_MODULE_LOADING=mode)
    for library, smaller in zip(libraries, slimmed, strict=True):
        print(f"{library.name}: {library.stat().st_size} -> {smaller.stat().st_size} bytes")
        assert smaller.stat().st_size <= library.stat().st_size - (64 << 10)


def test_programs_of_cuda_11_are_kept(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime of CUDA 11 loads images by calls that CUPTI doesn't show."""
    libraries = unpack("11.8", runtime, tmp_path / "libraries", monkeypatch)
    (tmp_path / "negativa.yaml").write_text('libraries:\n  include: ["lib*.so"]\n')
    negativa(tmp_path, "debloat", "--", tmp_path / "host", "1", *libraries)
    latest = Run(tmp_path / ".negativa/latest")
    usage = load_usage(latest)
    assert usage is not None and {w.code for w in usage.incomplete} == {"image-unknown"}
    plans = [planned.plan for planned in load_planned(latest)]
    assert len(plans) == len(libraries)
    assert {d.reason for plan in plans for d in plan.decisions} == {KeepReason.INCOMPLETE}
