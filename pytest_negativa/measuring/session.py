"""One measurement from start to end, for the command and for pytest sessions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_negativa.errors import OptionError
from pytest_negativa.measuring.experiment import MeasureRequest, measure
from pytest_negativa.models.measurement import Loading, Measurement
from pytest_negativa.models.settings import Settings
from pytest_negativa.reporting.measurement import render_measurement
from pytest_negativa.reporting.next_command import next_line
from pytest_negativa.reporting.text import print_error
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.runs import RunsFolder
from pytest_negativa.tracing.gpu import has_gpu


def make_request(
    command: Sequence[str],
    settings: Settings,
    *,
    copies: Path | None = None,
    loading: str | None = None,
    **options: Any,
) -> MeasureRequest:
    """A request for a measurement into a new folder.

    Args:
        copies: the folder with the slim libraries; None: that of a proof or of reconstruct.
        loading: ``lazy``, ``eager`` or ``both``; None: both, or lazy without a GPU, where they
            don't differ.
        options: further fields of the request.

    Raises:
        OptionError: there are no slim libraries.
    """
    runs = RunsFolder(Path(settings.directory))
    copies = copies or runs.copies
    if not copies.is_dir():
        raise OptionError(
            f"{copies}: no slim libraries here; make some with pytest --negativa "
            "--negativa-verify, or with negativa reconstruct"
        )
    if loading is None:
        loading = "both" if has_gpu() else "lazy"
    runs.make()
    return MeasureRequest(
        command=tuple(command),
        copies=copies,
        folder=runs.new_measurement(),
        loadings=tuple(Loading) if loading == "both" else (Loading(loading),),
        **options,
    )


def measure_session(
    command: Sequence[str], settings: Settings, environ: Mapping[str, str], cwd: Path
) -> int:
    """Measure a session's own command with the defaults, and show the result; the exit status.

    Raises:
        NegativaError: see ``experiment.measure``.
    """
    request = make_request(command, settings, environ=environ, cwd=cwd)
    return show(measure_and_write(request), request.folder)


def measure_and_write(request: MeasureRequest) -> Measurement:
    """Measure, with a line to stderr for each run, and write the measurement into its folder.

    Raises:
        NegativaError: see ``experiment.measure``; or the file can't be written.
    """
    measurement = measure(request, _say)
    write_record(request.folder / "measurement.json", measurement, indent=1)
    return measurement


def show(measurement: Measurement, folder: Path) -> int:
    """Print the tables and the failures; the exit status."""
    sys.stdout.write("\n\n".join([*render_measurement(measurement), f"Files in {folder}\n"]))
    sys.stdout.flush()
    status = report_failures(measurement)
    if not status:
        _say(next_line("negativa lock"))
    return status


def report_failures(measurement: Measurement) -> int:
    """Print the failures to stderr; the exit status."""
    for failure in measurement.failures:
        print_error(failure)
    return 1 if measurement.failures else 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
