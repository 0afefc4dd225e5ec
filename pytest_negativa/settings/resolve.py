"""Sources of an option: flag before variable before file before default; the cache's folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from pytest_negativa.errors import OptionError
from pytest_negativa.models.settings import Report, Settings
from pytest_negativa.settings.file import ConfigFile, find_config, load_config
from pytest_negativa.settings.options import BY_NAME, OPTIONS, REPORT_FILES, Option
from pytest_negativa.settings.values import (
    Found,
    anchor,
    anchored,
    value_of,
)
from pytest_negativa.storage.runs import why_no_folder_for_runs


def load_settings(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    root: str | os.PathLike[str],
    cwd: str | os.PathLike[str] | None = None,
    of_command: bool = False,
) -> Settings:
    """Find the file, if there is one, and resolve all options.

    Args:
        flags: the given ones by option name, see ``flags.pick_flags``.
        environ: the environment variables.
        root: pytest's rootdir; the ``negativa`` command passes the current folder.
        cwd: where relative paths of flags and variables start; None: the current folder.
        of_command: the flags are those of the ``negativa`` command; messages name them so.

    Raises:
        OptionError: a source has a value that can't be used, a folder has no UTF-8 name, or a limit
            of growth has no baseline.
    """
    here = os.fspath(cwd or Path.cwd())
    named = _from_flag_or_environment(
        BY_NAME["config"], flags, environ, here, of_command=of_command
    )
    path = find_config(root) if named is None else named.value
    config = load_config(path, was_searched=named is None) if path else None
    settings = resolve(flags, environ, config, root=root, cwd=cwd, of_command=of_command)
    # Commands need no folder for runs, but those that make one refuse it, too.
    paths = () if of_command else (os.fspath(root), settings.directory)
    if (problem := next(filter(None, map(why_no_folder_for_runs, paths)), None)) is not None:
        raise OptionError(problem)
    # Limits of growth that are never checked must not pass.
    if settings.compare.fail and settings.compare.baseline is None:
        raise OptionError(
            f"{settings.sources['compare.fail']}: compare.fail needs a baseline to compare with: "
            "compare.baseline"
        )
    return settings


def resolve(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    config: ConfigFile | None,
    *,
    root: str | os.PathLike[str],
    cwd: str | os.PathLike[str] | None = None,
    of_command: bool = False,
) -> Settings:
    """All options by flag > environment > file > default, each with its source.

    Relative paths in flags and variables start at ``cwd`` (None: the process's), those in a file at
    the file's folder. The default folder for runs lies beside a file that was found by searching,
    otherwise in ``root``.

    Args:
        of_command: the flags are those of the ``negativa`` command; messages name them so.

    Raises:
        OptionError: a flag or a variable has a value that can't be used.
    """
    here = os.fspath(cwd or Path.cwd())
    home = anchor(Path(config.path).parent if config and config.was_searched else root, here)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in OPTIONS:
        name = option.name
        found = _from_flag_or_environment(option, flags, environ, here, of_command=of_command)
        if found is None and config:
            found = config.values.get(name)
        if found is None:
            found = Found(anchored(name, value_of(option, option.default), home), "")
        values[name], sources[name] = found
    values["config"] = config.path if config else None
    values["cache_dir"] = values["cache_dir"] or _user_cache()
    # A report without a path lies in the folder for runs.
    files = {name: os.path.join(values["directory"], file) for name, file in REPORT_FILES.items()}
    values["reports.formats"] = tuple(
        Report(format=report.format, path=report.path or files.get(report.format.value))
        for report in values["reports.formats"]
    )
    fields: dict[str, Any] = {"sources": sources}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        (fields.setdefault(section, {}) if section else fields)[key] = value
    return msgspec.convert(fields, Settings)


def _user_cache() -> str | None:
    """``$XDG_CACHE_HOME/negativa`` or ``~/.cache/negativa``; None for a user without a home."""
    # Containers run as users that have neither HOME nor an entry in /etc/passwd.
    try:
        folder = platformdirs.user_cache_path("negativa")
    except RuntimeError:
        return None
    # Older releases of platformdirs leave "~" as it is, and take a relative XDG folder.
    return str(folder) if folder.is_absolute() else None


def _from_flag_or_environment(
    option: Option,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    here: str,
    *,
    of_command: bool = False,
) -> Found | None:
    """The value by the stronger of the two sources; None if neither has one."""
    given, where = flags.get(option.name), option.cli_flag if of_command else option.flag
    if given is None and option.variable:
        # CI systems hand over a variable that is not set as an empty one.
        given, where = environ.get(option.variable, "").strip() or None, option.variable
    if given is None:
        return None
    try:
        return Found(anchored(option.name, value_of(option, given), here), where)
    except OptionError as problem:
        raise OptionError(f"{where}: {problem}") from None
