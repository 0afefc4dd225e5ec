"""Begins the trace of CPU code in a run's folder.

It imports little: a session does this just before it starts itself again.
"""

from __future__ import annotations

from pathlib import Path

from pytest_negativa.hostcode.page_logs import prepare_logs
from pytest_negativa.models.hostcode import HOST_FILES_VERSION, HostFiles, Processor
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import Run
from pytest_negativa.storage.shared_folders import make_logs_folder


def begin_logs(run: Run, runs: Path) -> None:
    """Make the folder in which the processes of a run write their logs.

    Args:
        runs: the folder for runs.

    Raises:
        StoreError: a file can't be written.
    """
    make_logs_folder(run.page_logs, runs)
    prepare_logs(run.page_logs)
    files = HostFiles(format_version=HOST_FILES_VERSION, processor=read_processor())
    write_record(run.page_log_files, files)


def read_processor(path: Path = Path("/proc/cpuinfo")) -> Processor:
    """The first processor of ``/proc/cpuinfo``, see proc(5); an unknown one if it can't be read."""
    fields: dict[str, str] = {}
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        text = ""
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    return Processor(
        model=fields.get("model name", "unknown"),
        flags=tuple(sorted(fields.get("flags", "").split())),
    )
