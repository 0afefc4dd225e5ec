"""Start of tracing: variables for children, injection libraries that are chained, headers.

Each run has a folder of its own for its traces, so two sessions don't mix and old files
can't enter a new report. Each process writes one file of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pytest_negativa.models.settings import TraceLevel
from pytest_negativa.models.trace import (
    CHILDREN_UNTRACED,
    Header,
    Role,
)
from pytest_negativa.storage.records import utf8
from pytest_negativa.storage.runs import Run
from pytest_negativa.storage.system import System
from pytest_negativa.tracing.children import LACKS, Children, injection_library, leave_to_python
from pytest_negativa.tracing.detector import Detector, TraceError, TracerBusy
from pytest_negativa.tracing.mappings import loaded_cupti
from pytest_negativa.tracing.trace_files import TraceWriter

if TYPE_CHECKING:
    from pytest_negativa.tracing.replay import Recording

# What injection.c reads, and CUDA's own variable, which makes CUDA load it.
_INJECTION = "CUDA_INJECTION64_PATH"
_CHAINED = "NEGATIVA_CHAINED_INJECTION"
ROOT_VARIABLE = "NEGATIVA_ROOT"
SAMPLE = "NEGATIVA_SAMPLE"
"""One process in this many is traced, outside of any session, see ``tracing.command``."""


def child_environment(
    environ: Mapping[str, str],
    *,
    run: Run,
    root: Path,
    injection: Path | None,
    cupti: str | None,
    lacks: str = "",
    level: TraceLevel = TraceLevel.LOOKUP,
) -> dict[str, str]:
    """The variables to set in a traced process so that its children are traced, too.

    CUDA reads ``CUDA_INJECTION64_PATH`` in the ``cuInit`` of every process, this one included. A
    path that the user has set there is passed on; the native library loads it first.

    Args:
        root: see ``start_tracing``.
        injection: the native library; None: children can't be traced, and nothing is set.
        cupti: the file of the CUPTI that this process uses, if known.
        lacks: name of the socket to which children write why they can't be traced.
        level: what to record of each kernel.
    """
    if injection is None:
        return {}
    changes = {
        _INJECTION: str(injection),
        "NEGATIVA_TRACE_DIR": str(run.trace_dir),
        "NEGATIVA_RUN_ID": run.run_id,
        ROOT_VARIABLE: str(root),
        LACKS: lacks,
        "NEGATIVA_LEVEL": level.value,
        # All processes, although this one may have the environment of a service.
        SAMPLE: "",
    }
    if cupti is not None:
        changes["NEGATIVA_CUPTI"] = cupti
    before = environ.get(_INJECTION)
    if before and before != str(injection):
        changes[_CHAINED] = before
    return changes


class Tracing:
    """A process that is being traced. ``stop`` ends it and puts the environment back.

    Attributes:
        detector: writes the trace.
        recording: set if nothing is watched: the records are those of an earlier run.
    """

    def __init__(
        self,
        detector: Detector,
        environ: MutableMapping[str, str],
        before: Mapping[str, str | None],
        *,
        children: Children | None = None,
        recording: Recording | None = None,
    ) -> None:
        self.recording = recording
        self.detector = detector
        self._environ = environ
        self._before = before
        self._children = children

    def drain(self) -> None:
        """Write buffered records; call it between tests."""
        self.detector.drain()
        self._report_children()

    def _report_children(self) -> None:
        for problem in () if self._children is None else self._children.untraced():
            self.detector.warn(CHILDREN_UNTRACED, problem, incomplete=True)

    def stop(self) -> None:
        self._report_children()
        if self._children is not None:
            self._children.close()
        self.detector.stop()
        for name, value in self._before.items():
            if value is None:
                self._environ.pop(name, None)
            else:
                self._environ[name] = value


def start_tracing(
    run: Run,
    role: Role,
    *,
    root: Path,
    worker: str | None = None,
    level: TraceLevel = TraceLevel.LOOKUP,
    replay: Path | None = None,
    paths: Mapping[str, str] | None = None,
    children: bool = True,
    environ: MutableMapping[str, str] = os.environ,
) -> Tracing:
    """Trace this process from now on, and the children that it starts.

    Args:
        root: the folder against which paths of the project can be understood.
        worker: pytest-xdist's name of this worker.
        level: what to record of each kernel.
        replay: the folder of a recorded trace to replay on a machine without GPU.
        paths: rules for the paths in that trace, see ``PathRules``.
        children: trace the processes that this process starts, too.

    Raises:
        TracerUnavailable: CUPTI is not installed. The trace says so.
        TracerBusy: another tool holds CUPTI.
        StoreError: the trace file can't be created.
    """
    if replay is not None:
        from pytest_negativa.tracing.replay import Recording, ReplayDetector

        recording = Recording(replay, paths)
        header = make_header(run, role, root=root, detector="replay", worker=worker)
        run.make()
        writer = TraceWriter(run.new_trace_file(), replace(header, replay=recording.replay))
        replayed = ReplayDetector(writer, recording)
        replayed.start()
        return Tracing(replayed, environ, {}, recording=recording)
    from pytest_negativa.tracing.cupti import CuptiDetector, cupti_version

    run.make()
    writer = TraceWriter(
        run.new_trace_file(),
        make_header(run, role, root=root, detector=cupti_version(), worker=worker),
    )
    detector = CuptiDetector(writer, level=level, environ=environ)
    return trace_by(detector, run, role, root=root, level=level, children=children, environ=environ)


def trace_by(
    detector: Detector,
    run: Run,
    role: Role,
    *,
    root: Path,
    level: TraceLevel = TraceLevel.LOOKUP,
    children: bool = True,
    environ: MutableMapping[str, str] = os.environ,
) -> Tracing:
    """Start ``detector``, and set the environment so that child processes are traced, too.

    Args:
        root: see ``start_tracing``.
        level: what children record of each kernel.

    Raises:
        TraceError: see ``Detector.start``. The trace says so, too.
    """
    start_detector(detector)
    if not children:
        detector.warn(CHILDREN_UNTRACED, "child processes are not traced (trace.children)")
        return Tracing(detector, environ, {})
    injection = injection_library()
    # The children of a controller are its workers, which trace themselves.
    if injection is None and role is not Role.CONTROLLER:
        detector.warn(
            CHILDREN_UNTRACED,
            "child processes are not traced: the native library was not built; install a C "
            "compiler and reinstall pytest-negativa",
            incomplete=True,
        )
    untraced = Children()
    changes = child_environment(
        environ,
        run=run,
        root=root,
        injection=injection,
        cupti=loaded_cupti(),
        lacks=untraced.name,
        level=level,
    )
    if _CHAINED in changes:
        detector.warn(
            "injection-chained",
            f"CUDA_INJECTION64_PATH was set to {changes[_CHAINED]}: that tool is loaded, too. If "
            "it takes CUPTI, nothing is traced",
        )
    before = {name: environ.get(name) for name in changes}
    if injection is not None:
        leave_to_python(injection)
    environ.update(changes)
    return Tracing(detector, environ, before, children=untraced)


def start_detector(detector: Detector) -> None:
    """Start a detector, or leave a trace that says why it did not start.

    Raises:
        TraceError: it did not start.
    """
    try:
        detector.start()
    except TraceError as e:
        code = "cupti-taken" if isinstance(e, TracerBusy) else "cupti-unavailable"
        detector.warn(code, str(e), incomplete=True)
        detector.stop()
        raise


def make_header(
    run: Run, role: Role, *, root: Path, detector: str, worker: str | None = None
) -> Header:
    """The header of this process's trace."""
    return Header(
        run_id=run.run_id,
        pid=os.getpid(),
        ppid=os.getppid(),
        role=role,
        detector=detector,
        executable=sys.executable,
        argv=tuple(map(utf8, sys.argv)),
        start_ns=System.time_ns(),
        root=str(root),
        worker=worker,
        python=sys.version.split()[0],
    )
