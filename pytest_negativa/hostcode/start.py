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


def begin_logs(run: Run, runs: Path, *, cpu: bool = True) -> Path:
    """Make, and return, the folder in which the processes of a run write their logs.

    Args:
        runs: the folder for runs.
        cpu: whether CPU code is traced, and not GPU code alone.

    Raises:
        StoreError: a file can't be written.
    """
    logs = run.page_logs if cpu else run.touch_logs
    make_logs_folder(logs, runs)
    prepare_logs(logs)
    if cpu:
        files = HostFiles(format_version=HOST_FILES_VERSION, processor=read_processor())
        write_record(run.page_log_files, files)
    return logs


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
