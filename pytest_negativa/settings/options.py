"""The one table of options, and how their sources become ``Settings``.

A row gives an option its place in ``negativa.yaml``, its flag for pytest, its flag for the
``negativa`` command, its environment variable, its parser, default and help. Sources are
asked in this order: flag, environment, file, default. To add an option, add a row here and
a field of the same name to the records of ``config_models``.

Every pytest session imports this module to add the flags: msgspec, PyYAML and click are
imported only by the functions that need them, pytest by none.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from pytest_negativa.errors import OptionError
from pytest_negativa.settings import kinds as kinds

if TYPE_CHECKING:
    from pytest_negativa.models.settings import Settings, Source
    from pytest_negativa.settings.file import ConfigFile

CONFIG_NAME = "negativa.yaml"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        name: its place in the file, ``"keep.ptx"``, and what ``Settings.sources`` calls it.
        stem: what its flags and its variable are made of, ``"keep-ptx"``.
        kind: parser of its values.
        default: the value where no source has one.
        help: one sentence, for ``--help``, for editors and for the documentation.
        in_file: whether ``negativa.yaml`` can set it.
        in_cli: whether the ``negativa`` command has it.
        metavar: what stands for the value in help, where the kind's word is too vague.
        needs: switches of which one must be on, or it has no effect on a session.
    """

    name: str
    stem: str
    kind: kinds.Kind
    default: Any
    help: str
    in_file: bool = True
    in_cli: bool = True
    metavar: str | None = None
    needs: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "-".join(filter(None, ("--negativa", self.stem)))

    @property
    def cli_flag(self) -> str | None:
        return f"--{self.stem}" if self.in_cli else None

    @property
    def variable(self) -> str:
        return self.dest.upper()

    @property
    def dest(self) -> str:
        """Its name in a namespace of parsed flags."""
        return self.flag[2:].replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return isinstance(self.kind, kinds.Switch)

    @property
    def help_with_default(self) -> str:
        shown = self.kind.show(self.default)
        return f"{self.help} (default: {shown})" if shown else self.help


# What sessions may be, by the names of their switches, and what needs which.
_ANY = ("enabled", "verifying", "healing", "measuring")
_TESTED = ("enabled", "verifying", "healing")
_TRACED = ("enabled",)
_PROVED = ("verifying", "healing")
_HEALED = ("healing",)

_SWITCH = kinds.Switch()
_PATH = kinds.FilePath()
_EXPRESSION = kinds.Expression()
_GLOBS = kinds.ListOf(kinds.Glob())
_LIBRARY_GLOBS = kinds.ListOf(kinds.LibraryGlob())

OPTIONS: tuple[Option, ...] = (
    # Whether the plugin works at all can't be a matter of the file: a session without the
    # flag must not have to look for one.
    Option(
        name="enabled",
        stem="",
        kind=_SWITCH,
        default=False,
        help="Trace which GPU code the tests use, and report what no test needs.",
        in_file=False,
        in_cli=False,
    ),
    # Alike: what a session does is said where it is started.
    Option(
        name="verifying",
        stem="verify",
        kind=_SWITCH,
        default=False,
        help="Run the tests on copies whose unused GPU code is overwritten, to prove it unused.",
        in_file=False,
        in_cli=False,
    ),
    Option(
        name="healing",
        stem="heal",
        kind=_SWITCH,
        default=False,
        help="Verify; if that fails, find what must be given back, keep it, and verify again.",
        in_file=False,
        in_cli=False,
    ),
    Option(
        name="measuring",
        stem="measure",
        kind=_SWITCH,
        default=False,
        help="Run the tests on their original libraries and on slim ones in turns, and compare.",
        in_file=False,
        in_cli=False,
    ),
    Option(
        name="run",
        stem="run",
        kind=_PATH,
        default=None,
        help="Take the plan of the traced run in this folder instead of the last one's.",
        in_file=False,
        metavar="DIR",
        needs=_PROVED,
    ),
    Option(
        name="config",
        stem="config",
        kind=_PATH,
        default=None,
        help=f"Read this file instead of the {CONFIG_NAME} found from the root folder upwards.",
        in_file=False,
        metavar="FILE",
        needs=_ANY,
    ),
    Option(
        name="directory",
        stem="dir",
        kind=_PATH,
        default=".negativa",
        help="Folder for traces, maps, plans and reports.",
        metavar="DIR",
        needs=_ANY,
    ),
    Option(
        name="libraries.include",
        stem="include-library",
        kind=_LIBRARY_GLOBS,
        default=(),
        help="Look only at these libraries: path, file name, soname or dist:NAME.",
        needs=_TRACED,
    ),
    Option(
        name="libraries.exclude",
        stem="exclude-library",
        kind=_LIBRARY_GLOBS,
        default=(),
        help="Leave these libraries out of everything, the report too.",
        needs=_TRACED,
    ),
    Option(
        name="keep.kernels",
        stem="keep-kernel",
        kind=_GLOBS,
        default=(),
        help="Keep these kernels even if no test uses them: mangled or demangled name.",
        needs=_TRACED,
    ),
    Option(
        name="keep.libraries",
        stem="keep-library",
        kind=_LIBRARY_GLOBS,
        default=(),
        help="Report these libraries, but keep all of their GPU code.",
        needs=_TRACED,
    ),
    Option(
        name="keep.archs",
        stem="keep-arch",
        kind=kinds.ListOf(kinds.Arch(), commas=True),
        default=(),
        help="Keep what is used for these archs too, not only for the traced devices.",
        needs=_TRACED,
    ),
    Option(
        name="keep.ptx",
        stem="keep-ptx",
        kind=kinds.Choice("off", "newest", "all"),
        default="off",
        help="Keep PTX that no traced device needs, for newer devices.",
        needs=_TRACED,
    ),
    Option(
        name="keep.relocatable",
        stem="keep-relocatable",
        kind=kinds.Choice("auto", "keep", "drop"),
        default="auto",
        help="Keep relocatable code, drop it, or drop it where a linked cubin fits.",
        needs=_TRACED,
    ),
    Option(
        name="granularity",
        stem="granularity",
        kind=kinds.Choice("element", "kernel"),
        default="element",
        help="Take whole elements as unused, or unused kernels inside elements that stay, too.",
        needs=_TESTED,
    ),
    Option(
        name="tests.markers",
        stem="test-markers",
        kind=_EXPRESSION,
        default=None,
        help="Run only tests that this expression selects too, as pytest's -m would.",
        in_cli=False,
        needs=_TESTED,
    ),
    Option(
        name="tests.keywords",
        stem="test-keywords",
        kind=_EXPRESSION,
        default=None,
        help="Run only tests that this expression selects too, as pytest's -k would.",
        in_cli=False,
        needs=_TESTED,
    ),
    Option(
        name="tests.include",
        stem="include-test",
        kind=_GLOBS,
        default=(),
        help="Run only tests with such a node id.",
        in_cli=False,
        needs=_TESTED,
    ),
    Option(
        name="tests.exclude",
        stem="exclude-test",
        kind=_GLOBS,
        default=(),
        help="Leave out tests with such a node id.",
        in_cli=False,
        needs=_TESTED,
    ),
    Option(
        name="trace.level",
        stem="level",
        kind=kinds.Choice("lookup", "launch"),
        default="lookup",
        help="Record where a kernel was first looked up, or which test launched it how often.",
        needs=_TESTED,
    ),
    Option(
        name="trace.children",
        stem="children",
        kind=_SWITCH,
        default=True,
        help="Trace processes that tests start, too.",
        needs=_TESTED,
    ),
    Option(
        name="trace.replay",
        stem="replay",
        kind=_PATH,
        default=None,
        help="Where there is no GPU, replay the trace recorded in this folder.",
        metavar="DIR",
        in_cli=False,
        needs=_TRACED,
    ),
    Option(
        name="trace.accept_failed",
        stem="accept-failed",
        kind=_SWITCH,
        default=False,
        help="Plan from a session that failed or was interrupted, too.",
        needs=_TESTED,
    ),
    Option(
        name="verify.fill",
        stem="fill",
        kind=kinds.Choice("0x01", "0x00", "0xCC"),
        default="0x01",
        help="Overwrite unused GPU code with this byte.",
        needs=_PROVED,
    ),
    Option(
        name="verify.copies",
        stem="copies",
        kind=kinds.Choice("overwritten", "compacted"),
        default="overwritten",
        help="Run on copies whose unused GPU code is overwritten, or taken out of the files.",
        needs=_PROVED,
    ),
    Option(
        name="verify.rerun",
        stem="rerun",
        kind=kinds.Count(),
        default=0,
        help="Run tests that end otherwise so many times on the originals: are they flaky?",
        needs=_PROVED,
    ),
    Option(
        name="verify.timeout",
        stem="verify-timeout",
        kind=kinds.Count(),
        default=None,
        help="End a run in which no test begins or ends for so many seconds; 0 never does. "
        "If not set, five times the longest such time of the traced run, and at least a minute.",
        metavar="SECONDS",
        needs=_PROVED,
    ),
    Option(
        name="verify.heal_runs",
        stem="heal-runs",
        kind=kinds.Count(),
        default=200,
        help="Start failing tests at most so many times to heal; 0 sets no limit.",
        needs=_HEALED,
    ),
    Option(
        name="verify.heal_minutes",
        stem="heal-minutes",
        kind=kinds.Count(),
        default=60,
        help="Heal for at most so many minutes; 0 sets no limit.",
        needs=_HEALED,
    ),
    Option(
        name="reports.formats",
        stem="report",
        kind=kinds.Reports(
            kinds.Report(to_screen=("terminal",), to_file=("json", "markdown")),
        ),
        default=({"format": "terminal", "path": None},),
        help="Write this report: terminal, json or markdown; json and markdown are files, and go "
        "to the folder for reports where no path is given.",
        needs=_TRACED,
    ),
    Option(
        name="reports.top",
        stem="top",
        kind=kinds.Count(),
        default=20,
        help="Show this many rows of each table; 0 shows all.",
        needs=_TRACED,
    ),
    Option(
        name="reports.demangle",
        stem="demangle",
        kind=_SWITCH,
        default=True,
        help="Show kernels by their C++ signature instead of their mangled name.",
        needs=_TESTED,
    ),
    Option(
        name="thresholds.max_unused_percent",
        stem="max-unused-percent",
        kind=kinds.Percent(),
        default=None,
        help="Fail (exit 1) if more of the GPU code than this is unused.",
        needs=_TRACED,
    ),
    Option(
        name="thresholds.min_used_kernels",
        stem="min-used-kernels",
        kind=kinds.Count(),
        default=None,
        help="Fail (exit 1) if fewer kernels than this are used.",
        needs=_TRACED,
    ),
    Option(
        name="thresholds.min_used_kernels_percent",
        stem="min-used-kernels-percent",
        kind=kinds.Percent(),
        default=None,
        help="Fail (exit 1) if less of all kernels than this is used.",
        needs=_TRACED,
    ),
    Option(
        name="thresholds.max_gpu_code",
        stem="max-gpu-code",
        kind=kinds.Size(),
        default=None,
        help="Fail (exit 1) if the libraries hold more bytes of GPU code than this.",
        needs=_TRACED,
    ),
    Option(
        name="cache.dir",
        stem="cache-dir",
        kind=_PATH,
        default=None,
        help="Folder for maps of libraries, kept between sessions; "
        "negativa in the user's cache folder if not set.",
        metavar="DIR",
        needs=_TRACED,
    ),
    Option(
        name="cache.limit",
        stem="cache-limit",
        kind=kinds.Size(),
        default=2**30,
        help="Drop the maps used longest ago when the cache grows beyond this.",
        needs=_TRACED,
    ),
)

BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
FILE_OPTIONS: Mapping[str, Option] = {o.name: o for o in OPTIONS if o.in_file}
SECTIONS = frozenset(name.partition(".")[0] for name in FILE_OPTIONS if "." in name)


class OptionGroup(Protocol):
    """What is needed of pytest's option group."""

    def addoption(self, *opts: str, **attrs: Any) -> None: ...


def add_pytest_options(group: OptionGroup) -> None:
    """Add every option to ``group``.

    All default to None: a flag with a default of its own would hide the other sources.
    """
    for option in OPTIONS:
        common = {"dest": option.dest, "default": None}
        text = option.help_with_default.replace("%", "%%")  # argparse formats the help
        if option.is_switch:
            group.addoption(option.flag, action="store_true", help=text, **common)
            off = f"--no-{option.flag[2:]}"
            group.addoption(off, action="store_false", help=f"Undo {option.flag}.", **common)
        else:
            action = "append" if option.kind.repeated else "store"
            metavar = option.metavar or option.kind.metavar
            group.addoption(option.flag, action=action, metavar=metavar, help=text, **common)


_Command = TypeVar("_Command", bound=Callable[..., Any])


def click_options(*names: str) -> Callable[[_Command], _Command]:
    """A decorator that gives a click command these options, or all that it can have.

    The command receives them as keywords by ``Option.dest``; ``pick_flags`` sorts them out.
    """
    import click

    chosen = [BY_NAME[name] for name in names] or [o for o in OPTIONS if o.in_cli]

    def decorate(command: _Command) -> _Command:
        for option in reversed(chosen):  # click shows them in reverse order of decoration
            flag = option.cli_flag
            if flag is None:
                raise ValueError(f"{option.name} is no option of the command line")
            if option.is_switch:
                flag = f"{flag}/--no-{option.stem}"
            command = click.option(
                flag,
                option.dest,
                default=None,
                multiple=option.kind.repeated,
                metavar=None if option.is_switch else option.metavar or option.kind.metavar,
                help=option.help_with_default,
            )(command)
        return command

    return decorate


def pick_flags(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given, by option name, out of parsed ones by ``Option.dest``.

    Takes ``vars(namespace)`` of pytest and the keywords of a click command alike.
    """
    found = {option.name: parsed.get(option.dest) for option in OPTIONS}
    # click hands over an empty tuple for a repeatable flag that is not there.
    return {name: value for name, value in found.items() if value is not None and value != ()}


def value_before_file(name: str, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    """The value by flag or environment of an option that no file can set, or its default.

    Raises:
        OptionError: the value can't be used.
    """
    found = _from_flag_or_environment(BY_NAME[name], flags, environ)
    return found.value if found else BY_NAME[name].default


def is_enabled(name: str, flags: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Whether a switch is on that no file can set; asked in every session, so it reads none.

    Raises:
        OptionError: the environment variable is neither true nor false.
    """
    return bool(value_before_file(name, flags, environ))


def idle_flag(
    words: Iterable[str], flags: Mapping[str, Any], environ: Mapping[str, str]
) -> str | None:
    """Why a flag on a session's command line has no effect; None if all may have one.

    Args:
        words: as typed: who keeps flags in ``addopts`` means them for sessions of every kind.

    Raises:
        OptionError: an environment variable is neither true nor false.
    """
    if any(flags.get(name) is False for name in _ANY):
        return None  # Switched off for once, in a command line that is otherwise as always.
    on = [name for name in _ANY if is_enabled(name, flags, environ)]
    typed = {word.partition("=")[0] for word in itertools.takewhile(lambda w: w != "--", words)}
    for option in OPTIONS:
        flag = next((f for f in (option.flag, f"--no-{option.flag[2:]}") if f in typed), None)
        if flag is None or not option.needs:
            continue
        if not set(option.needs) & set(on):
            return f"{flag} has no effect without {_one_of_switches(option.needs)}"
        if option.name == "run" and "enabled" in on:
            return f"{flag} has no effect with --negativa, which traces a run of its own"
    return None


def _one_of_switches(names: Sequence[str]) -> str:
    return kinds.one_of([BY_NAME[name].flag for name in names])


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

    Relative paths start at ``cwd`` (None: the process's) in flags and variables, at the
    file's folder in a file. The default folder for results lies beside a file that was
    found by searching, otherwise in ``root``.

    Args:
        of_command: the flags are those of the ``negativa`` command, and named so.

    Raises:
        OptionError: a flag or a variable has a value that can't be used.
    """
    import msgspec

    from pytest_negativa.models.settings import Settings, Source, SourceKind, nested

    here = os.fspath(cwd or Path.cwd())
    beside = str(Path(config.path).parent) if config else ""
    home = beside if config and config.was_searched else kinds.anchor(root, here)
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for option in OPTIONS:
        name = option.name
        if found := _from_flag_or_environment(option, flags, environ, of_command=of_command):
            values[name] = option.kind.anchored(found.value, here)
            source = Source(kind=SourceKind(found.source), where=found.where)
        elif config and name in config.written:
            written = config.written[name]
            values[name] = option.kind.anchored(written.value, beside)
            source = Source(kind=SourceKind.FILE, where=written.where, items=written.items)
        else:
            values[name] = option.kind.anchored(option.default, home)
            source = Source(kind=SourceKind.DEFAULT)
        sources[name] = source
    values["config"] = config.path if config else None
    if values["cache.dir"] is None:
        values["cache.dir"] = _user_cache(environ)
    values["reports.formats"] = tuple(
        _with_path(report, values["directory"]) for report in values["reports.formats"]
    )
    return msgspec.convert({**nested(values), "sources": sources}, Settings)


class _Found(NamedTuple):
    value: Any
    source: str
    where: str


def _from_flag_or_environment(
    option: Option,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    of_command: bool = False,
) -> _Found | None:
    where = (of_command and option.cli_flag) or option.flag
    try:
        if option.name in flags:
            return _Found(option.kind.parse_flag(flags[option.name]), "flag", where)
        where = option.variable
        # Set but empty is how CI systems hand over a variable that nobody set.
        if text := environ.get(where, "").strip():
            return _Found(option.kind.parse(text), "environment", where)
    except kinds.Problem as problem:
        raise OptionError(f"{where}: {problem}") from None
    return None


def _user_cache(environ: Mapping[str, str]) -> str:
    # The XDG base directory specification: a relative value is to be ignored.
    base = environ.get("XDG_CACHE_HOME", "")
    if not base.startswith("/"):
        base = os.path.join(environ.get("HOME") or Path.home(), ".cache")
    return os.path.join(base, "negativa")


_FILE_NAMES = {"json": "report.json", "markdown": "report.md"}


def _with_path(report: Mapping[str, Any], directory: str) -> dict[str, Any]:
    name = _FILE_NAMES.get(report["format"])
    if report["path"] is None and name:
        return {**report, "path": os.path.join(directory, name)}
    return dict(report)


def explain(settings: Settings) -> list[tuple[str, str, str]]:
    """Rows for people: option, value in force, where it comes from."""
    import msgspec

    plain = msgspec.to_builtins(settings)
    rows = []
    for option in OPTIONS:
        value = plain
        for key in option.name.split("."):
            value = value[key]
        source = settings.sources[option.name]
        rows.append((option.name, option.kind.show(value), source.where or source.kind.value))
    return rows
