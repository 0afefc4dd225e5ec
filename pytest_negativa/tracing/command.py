"""``negativa trace`` of a command, and of services (samples): variables, CUPTI's file, Ctrl-C.

This module also makes the environment in which a process outside of any session, such as a service,
is traced. CUDA loads the native library in that process's ``cuInit``. The library decides by chance
whether it traces the process, and stops after a time. Traces are those of samples
(``Role.SAMPLE``): their uses count, and what they lack proves nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from pytest_negativa.errors import ExitStatus, NegativaError, Stopped, refusing
from pytest_negativa.models.settings import TraceLevel
from pytest_negativa.models.trace import CHILDREN_UNTRACED, EndRecord, Role, WarningRecord
from pytest_negativa.storage.outcomes import CommandOutcome
from pytest_negativa.storage.runs import Run
from pytest_negativa.storage.system import System
from pytest_negativa.tracing.children import LACKS, Children, injection_library, outer_sockets
from pytest_negativa.tracing.launches import NVTX_INJECTION
from pytest_negativa.tracing.start import ROOT_VARIABLE, SAMPLE, child_environment, make_header
from pytest_negativa.tracing.trace_files import TraceWriter

# The places of CUPTI: in NVIDIA's wheels for CUDA 13 and 12, and in toolkits.
_IN_PACKAGES = ("nvidia/cu13/lib/libcupti.so.13", "nvidia/cuda_cupti/lib/libcupti.so.12")
_IN_TOOLKITS = ("extras/CUPTI/lib64/libcupti.so", "lib64/libcupti.so")

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds that a program has to end.
_AFTER_CTRL_C = 10


class CommandNotFound(NegativaError):
    """There is no such command."""

    exit_status = ExitStatus.NO_COMMAND


def run_traced(
    command: Sequence[str],
    run: Run,
    root: Path,
    environ: Mapping[str, str] = os.environ,
    level: TraceLevel = TraceLevel.LOOKUP,
) -> int:
    """Run ``command`` and trace it. It uses the input and output of this process.

    Args:
        environ: the command's environment, without what traces it.
        level: what to record of each kernel.

    Returns:
        Its exit status; for a command that a signal killed, 128 plus the signal's number.

    Raises:
        CommandNotFound: there is no such command, or it may not be executed.
        NegativaError: the native library was not built, or the command can't be started.
    """
    if shutil.which(command[0]) is None:
        raise CommandNotFound(f"{command[0]}: not found, or not an executable file")
    with contextlib.closing(Children()) as children:
        changes = traced_changes(environ, run, root, level, lacks=children.name)
        run.hold()
        outcome = CommandOutcome(run.outcomes_file, command)
        begin = time.monotonic()
        status = _run(command, {**environ, **changes})
        outcome.finish(status, time.monotonic() - begin)
        _write_lacks(run, root, tuple(children.untraced()))
    return 128 - status if status < 0 else status


def _run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program; if this process is interrupted, so is the program, and it may end."""
    # The program may be there before the call that starts it returns; it must not run on alone.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    release = partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)
    with contextlib.ExitStack() as stack:
        stack.callback(release)
        with refusing(command[0], "started", NegativaError):
            process = subprocess.Popen(command, env=environ, preexec_fn=release)
        try:
            stack.close()
            return process.wait()
        except KeyboardInterrupt as e:
            # Ctrl-C in a terminal reaches the program, too; other signals reach this process alone.
            if isinstance(e, Stopped):
                process.send_signal(e.number)
            try:
                process.wait(None if isinstance(e, Stopped) else _AFTER_CTRL_C)
            except (KeyboardInterrupt, subprocess.TimeoutExpired):
                process.kill()
                process.wait()
            raise


def _write_lacks(run: Run, root: Path, lacks: Sequence[str]) -> None:
    """Write, as a trace, which processes are not traced."""
    if not lacks:
        return
    header = make_header(run, Role.CONTROLLER, root=root, detector="none")
    writer = TraceWriter(run.new_trace_file(), header)
    for problem in lacks:
        writer.write(WarningRecord(code=CHILDREN_UNTRACED, text=problem, incomplete=True))
    writer.write(EndRecord(time_ns=System.time_ns()))
    writer.close()


def traced_changes(
    environ: Mapping[str, str],
    run: Run,
    root: Path,
    level: TraceLevel = TraceLevel.LOOKUP,
    lacks: str = "",
) -> dict[str, str]:
    """Variables by which a program is traced by the native library. Creates the folder.

    Args:
        level: what to record of each kernel.
        lacks: see ``child_environment``.

    Raises:
        NegativaError: the native library was not built.
        StoreError: the folder can't be created.
    """
    injection = injection_library()
    if injection is None:
        raise NegativaError(
            "the library that traces other programs was not built: install a C compiler and "
            "reinstall pytest-negativa"
        )
    run.make()
    changes = outer_sockets(environ) | child_environment(
        environ,
        run=run,
        root=root,
        injection=injection,
        cupti=find_cupti(sys.path),
        lacks=lacks,
        level=level,
    )
    if level is TraceLevel.RANGE:
        changes[NVTX_INJECTION] = environ.get(NVTX_INJECTION) or str(injection)
    return changes


def attach_environment(
    run: Run, one_of: int, seconds: int, files: int, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables to set for a service so that its processes are traced into a run.

    Args:
        run: a new run; its folder is made, and marked as one of samples.
        one_of: one process in this many is traced, by chance.
        seconds: for which a process is traced; 0: until its end.
        files: no process starts a trace if the folder has this many files.
        environ: the service's environment. A CUDA injection library there is passed on.

    Raises:
        NegativaError: the native library was not built.
        StoreError: the folder can't be made.
    """
    changes = traced_changes(environ, run, Path())
    run.mark("samples", "made by negativa trace --attach-env")
    # No session listens, and the folder of the project is nothing that a service should tell.
    for name in (LACKS, ROOT_VARIABLE):
        del changes[name]
    return {
        **changes,
        SAMPLE: str(one_of),
        f"{SAMPLE}_SECONDS": str(seconds),
        f"{SAMPLE}_FILES": str(files),
    }


def find_cupti(packages: Iterable[str]) -> str | None:
    """The file of CUPTI in ``packages`` (folders such as ``sys.path``) or in a toolkit.

    If it is None, the dynamic loader searches for CUPTI.
    """
    candidates = [Path(folder, name) for folder in packages if folder for name in _IN_PACKAGES]
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    candidates += [Path(toolkit, name) for name in _IN_TOOLKITS]
    return next((str(path) for path in candidates if path.is_file()), None)
