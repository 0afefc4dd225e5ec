"""The watch of pages begins: folders for the logs of ``watch.c``, and this machine's processor.

This module imports little: a session does this just before it starts itself again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from pytest_negativa.models.pages import HostFiles
from pytest_negativa.models.spans import PAGE_SIZE
from pytest_negativa.pages.auditors import watch_environment
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import LOST_NAME, Run
from pytest_negativa.storage.shared_folders import make_logs_folder


def watch_pages(
    environ: Mapping[str, str],
    run: Run,
    runs: Path,
    *,
    cpu: bool = True,
    armed: Path | None = None,
) -> dict[str, str]:
    """Make the folder for the logs of a run's processes; the environment in which they write them.

    Args:
        environ: their environment otherwise.
        runs: the folder for runs.
        cpu: whether CPU code is traced, and not GPU code alone.
        armed: see ``watch_environment``.

    Raises:
        NegativaError: this machine can't do it, or a file can't be written.
    """
    logs = run.page_logs if cpu else run.touch_logs
    watched = {**environ, **watch_environment(environ, logs, only_gpu=not cpu, armed=armed)}
    run.make()
    make_logs_folder(logs, runs)
    prepare_logs(logs)
    if cpu:
        files = HostFiles(processor=read_processor())
        write_record(run.page_log_files, files)
    return watched


def prepare_logs(folder: Path) -> None:
    """Make the file in which processes count the libraries that they can't record.

    Raises:
        StoreError: it can't be written.
    """
    # Written, not truncated to its size: a full disk must show now. Others may write to the folder.
    write_atomically(folder / LOST_NAME, bytes(PAGE_SIZE), mode=0o666)


def read_processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """The model of the first processor, see proc(5); an unknown one if it can't be read."""
    with contextlib.suppress(OSError):
        found = re.search(rb"^model name\s*:\s*(.*\S)", path.read_bytes(), re.MULTILINE)
        return found[1].decode("utf-8", "replace") if found else "unknown"
    return "unknown"
