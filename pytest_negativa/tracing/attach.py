"""The environment in which a process outside of any session, such as a service, is traced.

CUDA loads the native library in the process's ``cuInit``. The library decides by chance whether it
traces the process, and stops after a time. Traces are those of samples (``Role.SAMPLE``): their
uses count, and what they lack proves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.command import traced_changes
from pytest_negativa.tracing.start import ROOT_VARIABLE, SAMPLE
from pytest_negativa.tracing.untraced_children import LACKS, outer_sockets


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
        **outer_sockets(environ),
        SAMPLE: str(one_of),
        f"{SAMPLE}_SECONDS": str(seconds),
        f"{SAMPLE}_FILES": str(files),
    }
