"""Paths, names and the environment of children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.models.trace import Context, Phase, Role
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing import start
from pytest_negativa.tracing.merge import merge_traces
from pytest_negativa.tracing.start import child_environment, start_tracing
from pytest_negativa.tracing.trace_files import read_trace
from tests.support.compiling import needs_compiler
from tests.support.faults import PlantedFault
from tests.support.libraries import TRACES

ROOT = Path("/project")
INJECTION = Path("/lib/_injection.so")
RECORDED = TRACES / "h200-ops"


def a_run(base: Path) -> Run:
    return Run(base / "run-1")


def environment(environ: dict[str, str], injection: Path | None = INJECTION) -> dict[str, str]:
    return child_environment(
        environ,
        run=a_run(Path("/b")),
        root=ROOT,
        injection=injection,
        cupti="/c.so",
        lacks="negativa-7",
    )


def test_environment_of_children() -> None:
    assert environment({}) == {
        "CUDA_INJECTION64_PATH": "/lib/_injection.so",
        "NEGATIVA_TRACE_DIR": "/b/run-1/trace",
        "NEGATIVA_RUN_ID": "run-1",
        "NEGATIVA_ROOT": "/project",
        "NEGATIVA_LACKS": "negativa-7",
        # Of a service that this process may belong to: all children are traced.
        "NEGATIVA_SAMPLE": "",
        "NEGATIVA_CUPTI": "/c.so",
        "NEGATIVA_LEVEL": "lookup",
    }


def test_a_user_s_own_injection_is_chained() -> None:
    changes = environment({"CUDA_INJECTION64_PATH": "/nsys.so"})
    assert changes["NEGATIVA_CHAINED_INJECTION"] == "/nsys.so"
    assert changes["CUDA_INJECTION64_PATH"] == str(INJECTION)


def test_a_worker_does_not_chain_the_controller_s_injection() -> None:
    inherited = environment({"CUDA_INJECTION64_PATH": "/nsys.so"})
    changes = environment(inherited)
    assert "NEGATIVA_CHAINED_INJECTION" not in changes
    assert {**inherited, **changes}["NEGATIVA_CHAINED_INJECTION"] == "/nsys.so"


def test_without_the_native_library_nothing_is_set() -> None:
    assert environment({"CUDA_INJECTION64_PATH": "/nsys.so"}, injection=None) == {}


def test_replay_leaves_the_environment_alone(tmp_path: Path) -> None:
    environ = {"A": "b"}
    tracing = start_tracing(
        a_run(tmp_path), Role.WORKER, root=ROOT, worker="gw1", replay=RECORDED, environ=environ
    )
    tracing.detector.set_context(Context(phase=Phase.CALL, nodeid="t.py::t"))
    tracing.drain()
    tracing.detector.pause("x")
    tracing.detector.resume()
    tracing.detector.warn("a-code", "a text")
    tracing.stop()
    tracing.stop()
    assert environ == {"A": "b"}
    [trace] = (tmp_path / "run-1" / "trace").iterdir()
    header = read_trace(trace).header
    assert header is not None and header.role is Role.WORKER and header.worker == "gw1"


def test_a_process_without_cupti_says_so_and_leaves_a_trace(tmp_path: Path) -> None:
    """In a process of its own: what is imported there must not stay here."""
    code = """
import json, os, sys
from pathlib import Path
sys.modules["cupti"] = None
from pytest_negativa.models.trace import Role
from pytest_negativa.tracing.detector import TracerUnavailable
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.start import start_tracing
run = Run(Path(sys.argv[1], "run-1"))
before = dict(os.environ)
try:
    start_tracing(run, Role.SOLO, root=Path("/project"))
except TracerUnavailable as e:
    print(json.dumps([str(e), before == dict(os.environ)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    message, untouched = json.loads(done.stdout)
    assert "pytest-negativa[cu13]" in message and untouched
    (path,) = a_run(tmp_path).trace_files()
    trace = read_trace(path)
    assert trace.header is not None and trace.header.python is not None
    assert any(getattr(r, "code", "") == "cupti-unavailable" for r in trace.records)


class Quiet:
    """A detector that only keeps what it is warned of."""

    def __init__(self) -> None:
        self.lacks: list[str] = []

    def start(self) -> None: ...
    def drain(self) -> None: ...
    def stop(self) -> None: ...
    def resume(self) -> None: ...
    def pause(self, why: str) -> None: ...
    def set_context(self, context: Context) -> None: ...
    def warn(self, code: str, text: str, *, incomplete: bool = False) -> None:
        assert incomplete
        self.lacks.append(f"{code}: {text}")


@pytest.mark.planted_fault(
    "A test starts a child process, and no C compiler built the library that traces children",
    says="child processes are not traced: the native library was not built",
)
def test_children_without_the_native_library(
    tmp_path: Path, fault: PlantedFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "injection_library", lambda: None)
    detector = Quiet()
    tracing = start.trace_by(detector, a_run(tmp_path), Role.SOLO, root=ROOT, environ={})
    subprocess.run(["true"], check=True)
    tracing.stop()
    [lack] = detector.lacks
    fault.check(lack)


# Stands in for cupti-python: another tool detaches CUPTI (cuptiFinalize) in the middle.
_DETACHED = """
import sys, types
from pathlib import Path

class cuptiError(Exception):
    status = 15

def enable_callback(on, *_):
    if not on:
        raise cuptiError("CUPTI_ERROR_NOT_INITIALIZED")

cupti = types.SimpleNamespace(
    SubscriberParams=lambda: types.SimpleNamespace(ptr=0),
    subscribe_v2=lambda *_: 1,
    unsubscribe=lambda _: enable_callback(0),
    enable_callback=enable_callback,
    cuptiError=cuptiError,
)
sys.modules["cupti"] = types.SimpleNamespace(cupti=cupti)
from pytest_negativa.models.trace import Role
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.start import start_tracing

start_tracing(Run(Path(sys.argv[1], "run-1")), Role.SOLO, root=Path("/project")).stop()
"""


@pytest.mark.planted_fault(
    "A profiler in a test detaches CUPTI from the test process, and nothing more is traced",
    says="is it too old, or has another tool detached it?",
)
def test_cupti_that_another_tool_detached(tmp_path: Path, fault: PlantedFault) -> None:
    subprocess.run([sys.executable, "-c", _DETACHED, str(tmp_path)], check=True)
    usage = merge_traces(a_run(tmp_path).trace_files())
    assert usage.processes[0].ended
    [lack] = usage.incomplete
    assert lack.process is None
    fault.check(lack.text)


# Stands in for a cupti-python that knows of sharing, on a CUPTI of the API version in argv[2].
_SHARED = """
import ctypes, sys, types
from pathlib import Path

class cuptiError(Exception):
    status = 1

class SubscriberParams:
    # As in cupti-python, read-only: a byte of the struct.
    allow_multiple_subscribers = property(lambda self: self.memory[32])

    def __init__(self):
        self.memory = (ctypes.c_uint8 * 40)()
        self.ptr = ctypes.addressof(self.memory)

made, asked = [], []

def make_params():
    made.append(SubscriberParams())
    return made[-1]

def subscribe_v2(callback, data, pointer):
    params = made[-1]
    asked.append((params.struct_size, params.allow_multiple_subscribers))
    if params.struct_size == 33 and int(sys.argv[2]) < 130300:
        raise cuptiError("CUPTI_ERROR_INVALID_PARAMETER")
    return 1

cupti = types.SimpleNamespace(
    SubscriberParams=make_params,
    subscribe_v2=subscribe_v2,
    unsubscribe=lambda _: None,
    enable_callback=lambda *_: None,
    cuptiError=cuptiError,
)
sys.modules["cupti"] = types.SimpleNamespace(cupti=cupti)
from pytest_negativa.models.trace import Role
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.start import start_tracing

start_tracing(Run(Path(sys.argv[1], "run-1")), Role.SOLO, root=Path("/project")).stop()
print(asked)
"""


@pytest.mark.parametrize(
    ("version", "asked"), [("130500", [(33, 1)]), ("130001", [(33, 1), (32, 1)])]
)
def test_cupti_is_shared_where_it_can_be(
    tmp_path: Path, version: str, asked: list[tuple[int, int]]
) -> None:
    command = [sys.executable, "-c", _SHARED, str(tmp_path), version]
    assert subprocess.check_output(command, text=True).strip() == str(asked)
    usage = merge_traces(a_run(tmp_path).trace_files())
    assert usage.processes[0].ended and not usage.incomplete


# Where activity records are refused, as on some virtual GPUs, and in a forked child, where a flush
# waits for a thread that is not there.
_NO_ACTIVITY = """
import ctypes, os, sys, types
from pathlib import Path

library = ctypes.CDLL(sys.argv[2])
flushes = ctypes.c_int.in_dll(library, "flushes")
kinds = (ctypes.c_bool * 40).in_dll(library, "kinds")
cupti = types.SimpleNamespace(
    SubscriberParams=lambda: types.SimpleNamespace(ptr=0),
    subscribe_v2=lambda *_: 1,
    unsubscribe=lambda _: None,
    enable_callback=lambda *_: None,
    cuptiError=Exception,
)
sys.modules["cupti"] = types.SimpleNamespace(cupti=cupti)
from pytest_negativa.models.settings import TraceLevel
from pytest_negativa.models.trace import Context, Phase, Role
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.start import start_tracing

tracing = start_tracing(
    Run(Path(sys.argv[1], "run-1")), Role.SOLO, root=Path("/project"), level=TraceLevel.RANGE,
    children=False,
)
counts = any(kinds)
if os.fork() == 0:
    flushes.value = 0
    tracing.detector.set_context(Context(phase=Phase.CALL, nodeid="test_a"))
    tracing.drain()
    os._exit(flushes.value)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
tracing.detector.pause("why")
tracing.detector.resume()
tracing.stop()
assert not any(kinds) and bool(flushes.value) == counts
print(counts)
"""


@needs_compiler
@pytest.mark.parametrize(
    ("refused", "lacking"),
    [
        ("0", None),
        ("10", ("launches-unavailable", "CUPTI doesn't count launches here")),
        ("39", ("ranges-unavailable", "CUPTI doesn't take NVTX ranges here")),
    ],
    ids=["", "kernels", "ranges"],
)
def test_launches_that_cannot_be_counted(
    tmp_path: Path, cupti: Path, refused: str, lacking: tuple[str, str] | None
) -> None:
    """Look-ups are traced all the same, and a forked child leaves CUPTI alone."""
    done = subprocess.run(
        [sys.executable, "-c", _NO_ACTIVITY, str(tmp_path), cupti],
        env={**os.environ, "STANDIN_CUPTI_REFUSES": refused},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{refused != '10'}\n"
    usage = merge_traces(a_run(tmp_path).trace_files())
    assert usage.processes[0].ended
    found = {(w.code, w.text) for w in usage.warnings if w.code.endswith("s-unavailable")}
    assert found == ({lacking} if lacking else set())
