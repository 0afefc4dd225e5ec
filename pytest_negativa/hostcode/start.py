"""Begins the trace of CPU code in a run's folder.

It imports little: a session does this just before it starts itself again.
"""

from __future__ import annotations

from pytest_negativa.hostcode.page_logs import prepare_logs
from pytest_negativa.hostcode.processor import read_processor
from pytest_negativa.models.hostcode import HOST_FILES_VERSION, HostFiles
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import Run


def begin_logs(run: Run) -> None:
    """Prepare the folder in which the processes of a run write their logs.

    Raises:
        StoreError: a file can't be written.
    """
    prepare_logs(run.page_logs)
    files = HostFiles(format_version=HOST_FILES_VERSION, processor=read_processor())
    write_record(run.page_log_files, files)
