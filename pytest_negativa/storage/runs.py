"""The folder of a run: what it holds, under which names.

``.negativa/RUN/`` holds ``trace/`` (a file for each process), ``usage.json``, ``trace.json`` and
``spans/`` (readable by what reads Negativa-ML's), ``map/`` and ``plan/`` (a file for each
library) and ``report.json``; a file ``failed`` tells that the run did not end well, and why.
``tests.jsonl`` says how its tests ended. ``verify/`` holds the rounds of verifications and
``verdict.json`` the last verdict; ``healed.json`` what healing gave back, ``unhealed.json`` the
plans before a search that isn't finished. ``.negativa/latest`` leads to the last run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pytest_negativa.errors import OptionError, StoreError
from pytest_negativa.models.analysis import Analysis, AnalyzedLibrary
from pytest_negativa.models.plan import PLAN_VERSION, LibraryPlan
from pytest_negativa.models.trace import USAGE_VERSION, Usage
from pytest_negativa.models.verdict import VERDICT_VERSION, NeededSpan, Verdict
from pytest_negativa.storage.atomic import write_atomically
from pytest_negativa.storage.records import encode_hook, load_map, save_map

LATEST = "latest"
RECONSTRUCTED = "reconstructed"
"""The folder with the copies, beside those of the runs."""

_FAILED = "failed"
_HEALED = "healed.json"
_UNHEALED = "unhealed.json"

_T = TypeVar("_T")
_V = TypeVar("_V", LibraryPlan, Usage, Verdict)


def find_run(directory: Path, named: Path | None = None) -> Path:
    """The folder of a run: the named one, else the last one in the folder for runs.

    By its own name, not as ``latest``: messages are to say which run it is.

    Raises:
        OptionError: the named one is not there.
        StoreError: there is no run.
    """
    if named is not None:
        if not named.is_dir():
            raise OptionError(f"{named}: no such folder; expected that of a traced run")
        return named.resolve()
    return require_run(directory / LATEST)


def require_run(folder: Path) -> Path:
    """The folder, by its own name.

    Raises:
        StoreError: there is no such folder.
    """
    if not folder.is_dir():
        if folder.is_symlink():
            gone = f"{folder}: leads to {folder.readlink()}, which is gone"
            raise StoreError(f"{gone}; {_advice(folder.parent)}")
        raise StoreError(
            f"{folder}: no traced run here; make one with pytest --negativa, or with "
            "negativa debloat -- COMMAND"
        )
    return folder.resolve()


def write_run(directory: Path, analysis: Analysis, *, with_plans: bool) -> tuple[str, ...]:
    """Write what was found; returns the names of what was written, for the report.

    Args:
        directory: the run's folder.
        analysis: what to write.
        with_plans: False for a run that must not feed a plan: neither plans nor spans then.

    Raises:
        StoreError: a file can't be written.
    """
    names = _file_names(analysis.libraries)
    write_record(directory / "usage.json", analysis.usage)
    write_record(directory / "trace.json", negativa_ml_trace(analysis.usage))
    for library in analysis.libraries:
        name = names[library.plan.library.path]
        save_map(library.library_map, directory / "map" / name)
        if with_plans:
            write_record(directory / "plan" / name, library.plan)
            write_record(directory / "spans" / name, library.plan.spans(), indent=1)
    _remove_others(directory / "map", names.values())
    for folder in ("plan", "spans"):
        _remove_others(directory / folder, names.values() if with_plans else ())
    # A folder that holds nothing but traces, such as a recording, is no run's.
    if (directory / "trace").is_dir():
        point_latest(directory)
    written = ["trace/", "trace.json", "usage.json"]
    if analysis.libraries:
        written += ["map/", *(["plan/", "spans/"] if with_plans else [])]
    return tuple(written)


def negativa_ml_trace(usage: Usage) -> dict[str, Any]:
    """What Negativa-ML's ``trace.json`` holds, and what tells the two apart."""
    return {
        "format_version": usage.format_version,
        "loaded_sos": [library.library.path for library in usage.libraries],
        "detected_kernels": sorted({k.name for i in usage.iter_images() for k in i.kernels}),
        "devices": [device.compute_capability for device in usage.devices],
        "run_ids": list(usage.run_ids),
    }


def write_record(path: Path, record: object, *, indent: int = 0) -> None:
    """Write a record or plain value as JSON.

    Raises:
        StoreError: it can't be written.
    """
    data = msgspec.json.encode(record, enc_hook=encode_hook)
    write_atomically(path, msgspec.json.format(data, indent=indent) if indent else data)


def _file_names(libraries: Sequence[AnalyzedLibrary]) -> dict[str, str]:
    """A file name for each library: its own, with a mark where two share one."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for library in libraries:
        path = library.plan.library.path
        name = f"{Path(path).name}.json"
        if name in taken:
            mark = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
            name = f"{Path(path).name}.{mark}.json"
        taken.add(name)
        names[path] = name
    return names


def _remove_others(folder: Path, names: Collection[str]) -> None:
    """Remove what an earlier look at the same run had left: it would feed what comes next."""
    try:
        for path in folder.glob("*.json"):
            if path.name not in names:
                path.unlink()
    except OSError as e:
        raise StoreError(f"{folder}: cannot be cleared: {e.strerror}") from e


def mark_failed(directory: Path, why: str) -> None:
    """Note that the run failed or was interrupted, for whoever takes it up later.

    Raises:
        StoreError: it can't be written.
    """
    write_atomically(directory / _FAILED, f"{why}\n".encode(errors="backslashreplace"))


def is_failed(directory: Path) -> bool:
    return (directory / _FAILED).exists()


def failure_of(directory: Path) -> str | None:
    """Why the run failed; None if it didn't."""
    try:
        why = (directory / _FAILED).read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as e:
        why = f"{_FAILED} cannot be read: {e.strerror}"
    return " ".join(why.split()) or "it is marked as failed"


def why_unplanned(directory: Path) -> str:
    """Why there is nothing planned from a run, and what to do about it."""
    again = f"negativa locate --run {shlex.quote(str(directory))}"
    if (failure := failure_of(directory)) is not None:
        return (
            f"{directory}: nothing is planned from this run: {failure}; "
            f"{_advice(directory.parent)}, or plan this one all the same: {again} --accept-failed"
        )
    if (directory / "usage.json").exists():
        return f"{directory}: no plans here: no GPU code was loaded that is looked at"
    if (directory / "trace").is_dir():
        return f"{directory}: no plans here; make them with {again}"
    return f"{directory}: no plans here, nor a trace; expected the folder of a run"


def _last_good(directory: Path) -> Path | None:
    """The newest run in a folder for runs that something is planned from."""
    # They are named by time.
    for folder in sorted(_folders(directory), reverse=True):
        if not is_failed(folder) and any((folder / "plan").glob("*.json")):
            return folder
    return None


def _folders(directory: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (p for p in directory.iterdir() if p.is_dir() and not p.is_symlink())


def _advice(directory: Path) -> str:
    good = _last_good(directory)
    if good is None:
        return "trace again"
    named = f"--run {shlex.quote(str(good))}"
    return f"trace again, or take the last good run: {named} (with pytest: --negativa-run)"


def point_latest(directory: Path) -> None:
    """Make ``latest``, beside the run's folder, lead to it.

    Raises:
        StoreError: it can't be written.
    """
    link = directory.parent / LATEST
    temporary = directory.parent / f".{LATEST}.{os.getpid()}"
    try:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        temporary.symlink_to(directory.name)
        temporary.replace(link)
    except OSError as e:
        raise StoreError(f"{link}: cannot be written: {e.strerror}") from e


def load_plans(folder: Path) -> tuple[LibraryPlan, ...]:
    """The plans of a run, by library.

    Raises:
        StoreError: there are none, or one can't be read.
    """
    return tuple(_load_plan(path) for path in _plan_files(folder))


def load_planned(folder: Path) -> tuple[AnalyzedLibrary, ...]:
    """The maps and plans of a run, by library.

    Raises:
        StoreError: there are none, one can't be read, or a plan's map is not there.
    """
    found = []
    for path in _plan_files(folder):
        plan = _load_plan(path)
        library_map = load_map(folder / "map" / path.name)
        if library_map.library != plan.library:
            raise StoreError(
                f"{path}: of {plan.library.path}, and the map of that name is of another state or "
                "file; plan again (negativa locate)"
            )
        found.append(AnalyzedLibrary(library_map, plan))
    return tuple(found)


def save_plans(folder: Path, plans: Iterable[LibraryPlan]) -> None:
    """Write plans of a run anew, and the spans that follow from them.

    Raises:
        StoreError: a file can't be read or written.
    """
    changed = {plan.library.path: plan for plan in plans}
    for path in _plan_files(folder):
        plan = changed.get((before := _load_plan(path)).library.path)
        if plan is not None and plan != before:
            write_record(path, plan)
            write_record(folder / "spans" / path.name, plan.spans(), indent=1)


def load_healed(folder: Path) -> tuple[NeededSpan, ...]:
    """What healing gave back in a run's plans, all in all.

    Raises:
        StoreError: the file can't be read.
    """
    return _load_rows(folder / _HEALED, NeededSpan, "not a list of healed spans")


def save_healed(folder: Path, spans: Iterable[NeededSpan], unhealed: Sequence[LibraryPlan]) -> None:
    """Note what healing gave back, so that planning the run again keeps it.

    Args:
        spans: all of it, that of earlier healing too.
        unhealed: where a search isn't finished, plans without what it gave back.

    Raises:
        StoreError: a file can't be written.
    """
    path = folder / _UNHEALED
    if unhealed:
        write_record(path, tuple(unhealed))
    write_record(folder / _HEALED, tuple(dict.fromkeys(spans)), indent=1)
    if not unhealed:
        try:
            path.unlink(missing_ok=True)
        except OSError as e:
            raise StoreError(f"{path}: cannot be removed: {e.strerror}") from e


def load_unhealed(folder: Path) -> tuple[LibraryPlan, ...]:
    """Plans without what an unfinished search gave back; none where all are finished.

    Raises:
        StoreError: the file can't be read.
    """
    return _load_rows(folder / _UNHEALED, LibraryPlan, "not a list of plans")


def _load_rows(path: Path, row: type[_T], problem: str) -> tuple[_T, ...]:
    """The records of a file, or none where there is no file."""
    if not path.exists():
        return ()
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[row, ...])  # type: ignore[valid-type]
    except (OSError, msgspec.DecodeError) as e:
        raise StoreError(f"{path}: {problem}: {e}; remove it, or trace again") from e


def _plan_files(folder: Path) -> list[Path]:
    folder = require_run(folder)
    paths = sorted((folder / "plan").glob("*.json"))
    if not paths:
        raise StoreError(why_unplanned(folder))
    return paths


def load_usage(folder: Path) -> Usage | None:
    """What a run used and loaded; None where it isn't located yet, or no run.

    Raises:
        StoreError: the file can't be read.
    """
    path = folder / "usage.json"
    if not path.exists():
        return None
    what = "the usage of a traced run"
    return _load_record(path, Usage, USAGE_VERSION, what, "plan again (negativa locate)")


def load_verdict(folder: Path) -> Verdict | None:
    """The last verdict on a run; None where there is none.

    Raises:
        StoreError: the file can't be read.
    """
    path = folder / "verdict.json"
    if not path.exists():
        return None
    return _load_record(path, Verdict, VERDICT_VERSION, "a verdict", "verify again")


def _load_plan(path: Path) -> LibraryPlan:
    return _load_record(path, LibraryPlan, PLAN_VERSION, "a plan", "make the plan again")


def _load_record(path: Path, kind: type[_V], version: int, what: str, remedy: str) -> _V:
    """A record of a format that must be this release's."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as e:
        raise StoreError(f"{path}: not {what} of this release: {e}") from e
    if record.format_version != version:
        raise StoreError(
            f"{path}: format_version {record.format_version}, this release reads {version}; "
            f"{remedy}"
        )
    return record
