"""Both detectors on the same driver calls, and the native library by itself.

CUPTI needs a GPU; here its callbacks are called with real memory behind every pointer.
tests/gpu runs the whole.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pytest_negativa.models.trace import (
    Context,
    EndRecord,
    ImageForm,
    Phase,
    Role,
    Usage,
)
from pytest_negativa.tracing.merge import merge_traces
from pytest_negativa.tracing.trace_files import read_trace
from tests.support.emulators import ANSWERS_FOR_MAPS, not_in_qemu
from tests.support.faults import PlantedFault
from tests.support.libraries import BIN, IS_ROOT, ROOT, SUPPORT
from tests.support.scenario import tables_first

FATBIN = BIN / "identifier.fatbin"
INJECTION = SUPPORT / "injection.c"
# tests/test_sanitizers.py plays all of this with a library that needs them.
SANITIZERS = {
    name: os.environ[name]
    for name in ("LD_PRELOAD", "ASAN_OPTIONS", "UBSAN_OPTIONS")
    if name in os.environ
}
SCENARIO = SUPPORT / "scenario.py"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("native") / "_injection.so"
    flags = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    flags += shlex.split(os.environ.get("CFLAGS", ""))
    subprocess.run(
        [compiler, *flags, "-o", str(path), str(INJECTION), "-ldl", "-lpthread"],
        check=True,
    )
    return path


def play(which: str, folder: Path, *extra: str, env: dict[str, str] | None = None) -> list[Path]:
    subprocess.run(
        [sys.executable, str(SCENARIO), which, str(folder), str(FATBIN), *extra],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
    )
    return sorted((folder / "run-1/trace").iterdir())


@pytest.fixture(scope="session")
def python_usage(tmp_path_factory: pytest.TempPathFactory) -> Usage:
    return merge_traces(play("python", tmp_path_factory.mktemp("python")))


@pytest.fixture(scope="session")
def native_usage(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Usage:
    return merge_traces(play("native", tmp_path_factory.mktemp("native"), str(library)))


@pytest.mark.parametrize("which", ["python_usage", "native_usage"])
def test_what_the_calls_tell(which: str, request: pytest.FixtureRequest) -> None:
    usage: Usage = request.getfixturevalue(which)
    (found,) = [x for x in usage.libraries if x.library.path == str(FATBIN)]
    assert found.library.size == FATBIN.stat().st_size
    (image,) = found.images
    assert image.offset == 0 and image.prelinked == (0,)
    use = image
    assert use.form is ImageForm.FATBIN
    assert use.calls == ("cuLibraryLoadData", "cuModuleLoad", "cuModuleLoadData")
    assert list(use.kernels) == ["_Z1kv", "from file", "from module"]
    assert use.data == ("managed", "variable")
    context = Context(phase=Phase.CALL, nodeid='t.py::t["é\n"]', detail="d")
    assert usage.contexts == (context,)

    cubin = (BIN / "kernels.sm_90.cubin").read_bytes()
    digest = hashlib.sha256(cubin).hexdigest()
    (heap,) = (image for image in usage.memory_images if image.sha256 == digest)
    assert heap.size == len(cubin)
    assert heap.enumerated_by == ("cuLibraryGetModule", "cuModuleEnumerateFunctions")
    assert list(heap.kernels) == ['\\xff not utf-8 é "\\\n']

    digest = hashlib.sha256(tables_first(cubin)).hexdigest()
    (heap,) = (image for image in usage.memory_images if image.sha256 == digest)
    assert list(heap.kernels) == ["behind the tables"]

    names = {m.form: list(m.kernels) for m in usage.compiled}
    assert names == {ImageForm.PTX: ["first", "k", "other"], ImageForm.LINKED: []}
    assert {m.sha256 for m in usage.compiled} >= {hashlib.sha256(cubin[:100]).hexdigest()}

    refused = {(r.call, r.code, r.path, r.offset, r.name) for r in usage.refusals}
    assert refused == {
        ("cuLibraryGetKernel", 500, str(FATBIN), 0, "no such kernel"),
        ("cuLibraryLoadData", 209, str(FATBIN), 0, None),
        ("cuLibraryLoadData", 200, None, None, None),
        ("cuLibraryGetKernel", 400, None, None, "of no image"),
        ("cuLibraryEnumerateKernels", 2, None, None, None),
    }
    assert {usage.context_of(r.first) for r in usage.refusals} == {context}

    unknown = " ".join(w.text for w in usage.incomplete if w.code == "image-unknown")
    assert "stranger" in unknown and "cuModuleLoadData" in unknown
    assert all(w.code != "child" for w in usage.warnings)
    (process,) = usage.processes
    assert process.ended


@pytest.mark.parametrize("which", ["python_usage", "native_usage"])
def test_files_that_come_and_go(which: str, request: pytest.FixtureRequest) -> None:
    """A file is what it was at first sight, and another file at its path is another library."""
    usage: Usage = request.getfixturevalue(which)
    size = FATBIN.stat().st_size
    found = {
        (Path(x.library.path).name, x.library.size): {
            k for image in x.images for k in image.kernels
        }
        for x in usage.libraries
        if Path(x.library.path).parent.name == "files"
    }
    assert found == {
        ("seen", size): {"a", "b"},
        ("unseen", None): {"c"},
        ("replaced", size): {"d", "f"},
        ("replaced", size + 1): {"e"},
        ("odd (deleted)", size): {"g"},
    }
    (gone,) = [w for w in usage.incomplete if w.code == "library-gone"]
    assert gone.process is None and "/files/unseen: GPU code was loaded" in gone.text


@pytest.mark.parametrize("which", ["python_usage", "native_usage"])
def test_shared_memory_is_no_file(which: str, request: pytest.FixtureRequest) -> None:
    usage: Usage = request.getfixturevalue(which)
    digest = hashlib.sha256(FATBIN.read_bytes()).hexdigest()
    (image,) = (image for image in usage.memory_images if image.sha256 == digest)
    assert list(image.kernels) == ["h", "i"]


def test_both_detectors_say_the_same(python_usage: Usage, native_usage: Usage) -> None:
    def facts(usage: Usage) -> object:
        images = [list(library.images) for library in usage.libraries if library.images]
        unknown = [w.text for w in usage.incomplete if w.code == "image-unknown"]
        found = images, usage.memory_images, usage.compiled, usage.contexts, unknown
        # They ran one after the other.
        return re.sub(rb'"time_ns":\d+', b"", msgspec.json.encode(found))

    assert facts(python_usage) == facts(native_usage)


def test_without_cupti_the_child_s_trace_says_so(native_usage: Usage) -> None:
    assert native_usage.processes[0].header.role is Role.CHILD
    assert native_usage.processes[0].header.detector == "injection"
    assert any(w.code.startswith("cupti-") for w in native_usage.incomplete)


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000, 70001])
def test_sha256(library: Path, size: int) -> None:
    data = bytes(i * 7 % 251 for i in range(size))
    text = ctypes.create_string_buffer(65)
    ctypes.CDLL(str(library)).negativa_sha256(data, ctypes.c_size_t(size), text)
    assert text.value.decode() == hashlib.sha256(data).hexdigest()


def initialize(library: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """InitializeInjection in a program of its own, as cuInit calls it."""
    code = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1]).InitializeInjection()"
    if env.pop("SELF", None):
        code = code.replace("; ", "; ctypes.CDLL(sys.argv[1]).negativa_leave_to_python(); ", 1)
    return subprocess.run(
        [sys.executable, "-c", code, str(library)],
        check=True,
        capture_output=True,
        text=True,
        env={**SANITIZERS, **env},
    )


def variables(folder: Path) -> dict[str, str]:
    return {
        "NEGATIVA_TRACE_DIR": str(folder),
        "NEGATIVA_RUN_ID": "run-1",
        "NEGATIVA_ROOT": "/project",
        "PYTEST_CURRENT_TEST": "a.py::b[(x)] (call)",
    }


def test_a_child_writes_header_and_end(tmp_path: Path, library: Path) -> None:
    done = initialize(library, variables(tmp_path))
    assert done.stdout == "" and done.stderr == ""
    (path,) = tmp_path.iterdir()
    trace = read_trace(path)
    header = trace.header
    assert header is not None and not trace.problems
    assert re.fullmatch(rf"run-1\.{header.pid}\.[0-9a-f]{{8}}\.jsonl", path.name)
    assert header.ppid == os.getpid() and header.root == "/project"
    assert header.argv[1] == "-c"
    assert isinstance(trace.records[-1], EndRecord)


def test_the_traced_process_itself_is_left_alone(tmp_path: Path, library: Path) -> None:
    initialize(library, {**variables(tmp_path), "SELF": "1"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["NEGATIVA_TRACE_DIR", "NEGATIVA_RUN_ID"])
def test_without_variables_nothing_is_written(tmp_path: Path, library: Path, missing: str) -> None:
    env = variables(tmp_path)
    del env[missing]
    initialize(library, env)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, library: Path) -> None:
    done = initialize(library, variables(tmp_path / "missing"))
    assert done.stdout == "" and done.stderr == ""


def test_a_chained_library_is_initialised_too(tmp_path: Path, library: Path) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    assert compiler is not None
    source = tmp_path / "other.c"
    source.write_text(
        '#include <stdio.h>\nint InitializeInjection(void) { puts("other"); return 1; }'
    )
    other = tmp_path / "other.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(other), str(source)], check=True)
    folder = tmp_path / "trace"
    folder.mkdir()
    for self_traced in ({}, {"SELF": "1"}):
        env = {**variables(folder), "NEGATIVA_CHAINED_INJECTION": str(other), **self_traced}
        assert initialize(library, env).stdout == "other\n"
    env = {**variables(folder), "NEGATIVA_CHAINED_INJECTION": "/no/such.so"}
    assert initialize(library, env).stderr == ""


@pytest.mark.planted_fault(
    "A test changes the root to a folder without /proc, and uses GPU code there",
    says="an image that could not be recognised was used: cuLibraryLoadData",
)
@pytest.mark.skipif(not IS_ROOT, reason="only root may change the root")
@not_in_qemu(ANSWERS_FOR_MAPS)
def test_a_test_process_in_a_chroot(tmp_path: Path, fault: PlantedFault) -> None:
    code = (
        "import ctypes, os, sys; from pathlib import Path; from tests.support.scenario import *\n"
        "run = Run(Path(sys.argv[1]) / RUN_ID)\n"
        "writer = TraceWriter(run.new_trace_file(),"
        " make_header(run, Role.SOLO, root=Path('/'), detector='python'))\n"
        "detector = CuptiDetector(writer)\n"
        "image = ctypes.create_string_buffer(Path(sys.argv[2]).read_bytes())\n"
        "handle = ctypes.c_uint64(7)\n"
        "os.chroot(sys.argv[1])\n"
        "python_call(detector)(678, ctypes.addressof(handle), ctypes.addressof(image))\n"
        "detector.stop()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(FATBIN)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    [lack] = merge_traces((tmp_path / "run-1/trace").iterdir()).incomplete
    fault.check(lack.text)
