"""The one table of options: default, file, flag, variable, help; what needs which mode.

A row gives an option its place in ``negativa.yaml``, its flags for pytest and ``negativa``, its
default and its help. Defaults stand here and nowhere else. An option has the type of its field in
the records of ``models.settings``. To add an option, add a row and a field of the same name.

The documentation's reference is made from ``OPTIONS`` and ``SECTIONS``.

Every pytest session imports this module: plain values and nothing else. ``NamedTuple`` compiles
annotations that are texts, so they are none here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

CONFIG_NAME = "negativa.yaml"

REPORT_FILES: Mapping[str, str] = {
    "json": "report.json",
    "markdown": "report.md",
    "lcov": "kernels.lcov",
    "cobertura": "kernels.xml",
    "html": "report.html",
    "baseline": "baseline.json",
}
"""Default file name of each report that is a file, by format; it lies in the folder for reports.

Reports of all other formats are printed.
"""


class Option(NamedTuple):
    """One option.

    Attributes:
        name: its place in the file, ``"keep.ptx"``, and its key in ``Settings.sources``.
        help: one sentence for ``--help``, at most 72 characters.
        flag_name: the stem of its flags, ``"keep-ptx"``; None: its name.
        value: stands for its value in help; empty for a switch, whose flag takes none.
        default: the value if no source has one, as the file would have it.
        detail: a further sentence for editors and for the documentation.
        is_repeated: whether its flag may be given several times.
        has_commas: whether one flag may hold several values, with commas between them.
        in_file: whether ``negativa.yaml`` can set it.
        has_variable: whether an environment variable can set it.
        requires: names of switches; at least one must be on, or the option has no effect. Without
            any, the option is that of a command, and pytest has no flag for it.
        excludes: names of switches; with one of them on, the option has no effect.
    """

    name: str
    help: str
    flag_name: str | None = None
    value: str = ""
    default: Any = None
    detail: str = ""
    is_repeated: bool = False
    has_commas: bool = False
    in_file: bool = True
    has_variable: bool = False
    requires: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """Part of its flags after ``--`` or ``--negativa-``."""
        return self.name if self.flag_name is None else self.flag_name

    @property
    def flag(self) -> str:
        """Its flag for pytest."""
        return f"--negativa-{self.stem}" if self.stem else "--negativa"

    @property
    def off_flag(self) -> str | None:
        """The flag for pytest that switches it off; None if it is no switch."""
        return None if self.value else f"--no-{self.flag[2:]}"

    @property
    def cli_flag(self) -> str:
        """Its flag for those commands of ``negativa`` that have the option."""
        return f"--{self.stem}"

    @property
    def dest(self) -> str:
        """Its name in a namespace of parsed flags."""
        return self.flag[2:].replace("-", "_")

    @property
    def variable(self) -> str | None:
        """Its environment variable, if it has one."""
        return self.dest.upper() if self.has_variable else None

    @property
    def default_text(self) -> str:
        """Its default for people; empty if there is none."""
        if self.default is None:
            return ""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return "; ".join(self.default) if isinstance(self.default, tuple) else str(self.default)

    @property
    def help_with_default(self) -> str:
        """Its help, with the default if there is one."""
        return f"{self.help} (default: {self.default_text})" if self.default_text else self.help


MODES = ("enabled", "verifying", "healing")
"""Modes of a session: the names of the switches."""

PROVED = ("verifying", "healing")
"""Those for which a supervisor runs the tests in a process of their own."""
_TRACED = ("enabled",)

_BY_LIBRARY = (
    "A GLOB before it limits each library that the glob matches, and the first that matches counts."
)

OPTIONS: tuple[Option, ...] = (
    # The file can't switch the plugin on: a session without the flag must not search for a file.
    Option(
        name="enabled",
        flag_name="",
        default=False,
        help="Trace the GPU code that the tests use, and report what none needs.",
        in_file=False,
    ),
    # Nor can it choose what a session does: the command that starts the session says so.
    Option(
        name="verifying",
        flag_name="verify",
        default=False,
        help="Run the tests on copies without unused GPU code, to prove it unused.",
        in_file=False,
    ),
    Option(
        name="healing",
        flag_name="heal",
        default=False,
        help="Verify, keep removed code that is seen to be needed, and verify again.",
        in_file=False,
    ),
    Option(
        name="run",
        value="RUN",
        help="Use this traced run, not the last: its id, its folder or a URL.",
        in_file=False,
        requires=PROVED,
        excludes=("enabled",),
    ),
    Option(
        name="config",
        value="FILE",
        help="Read this file instead of searching for negativa.yaml.",
        detail="The search starts in the root folder and goes upwards.",
        in_file=False,
        requires=MODES,
        has_variable=True,
    ),
    Option(
        name="directory",
        flag_name="dir",
        value="DIR",
        default=".negativa",
        help="Write traces, plans and reports to this folder.",
        requires=MODES,
        has_variable=True,
    ),
    Option(
        name="paths",
        flag_name="path",
        value="GLOB=PATH",
        help="Search here for what was traced under other paths: GLOB=PATH.",
        detail="For `negativa combine` and for replays of traces of other machines. A glob is "
        "compared with a path and with the folders above it; the first that matches "
        "counts.",
        is_repeated=True,
        requires=_TRACED,
    ),
    Option(
        name="libraries.include",
        flag_name="include-library",
        value="GLOB",
        help="Analyse only these libraries: path, file name, soname or dist:NAME.",
        is_repeated=True,
        requires=_TRACED,
    ),
    Option(
        name="libraries.exclude",
        flag_name="exclude-library",
        value="GLOB",
        help="Leave these libraries out of the analysis and the report.",
        is_repeated=True,
        requires=_TRACED,
    ),
    Option(
        name="keep.kernels",
        flag_name="keep-kernel",
        value="GLOB",
        help="Keep these kernels even if unused: mangled or demangled names.",
        is_repeated=True,
        requires=_TRACED,
    ),
    Option(
        name="keep.libraries",
        flag_name="keep-library",
        value="GLOB",
        help="Report these libraries, but keep all of their GPU code.",
        is_repeated=True,
        requires=_TRACED,
    ),
    Option(
        name="keep.archs",
        flag_name="keep-arch",
        value="ARCH|GPU,...",
        help="Keep used code for these archs too, not only for the traced devices.",
        detail="An arch (sm_90, sm_90a, 9.0), a GPU (H100, RTX 4090), `native` for this machine's "
        "GPUs, or `all-major`.",
        is_repeated=True,
        has_commas=True,
        requires=_TRACED,
    ),
    Option(
        name="keep.ptx",
        flag_name="keep-ptx",
        value="{off,newest,all}",
        default="off",
        help="Keep PTX that no traced device needs, for newer devices.",
        requires=_TRACED,
    ),
    Option(
        name="granularity",
        value="{element,kernel}",
        default="element",
        help="Plan whole elements as unused, or also kernels inside kept elements.",
        requires=MODES,
    ),
    Option(
        name="require_gpu",
        flag_name="require-gpu",
        default=False,
        help="Fail (exit 1) if no GPU code was loaded on a GPU here.",
        detail="For CI: a runner that lost its GPU must not pass. A replayed trace doesn't count.",
        requires=_TRACED,
        has_variable=True,
    ),
    Option(
        name="no_jit",
        flag_name="no-jit",
        default=False,
        help="Fail (exit 1) if the tests compiled GPU code at run time.",
        detail="Code from a cache that was filled before the session is allowed. `runtime` of the "
        "JSON report lists both.",
        requires=_TRACED,
    ),
    Option(
        name="cpu",
        default=False,
        help="Trace the pages of CPU code, too; a proof covers the untouched ones.",
        requires=MODES,
    ),
    Option(
        name="trace.level",
        flag_name="level",
        value="{lookup,launch,range}",
        default="lookup",
        help="Record first look-ups of kernels, all launches, or these by range.",
        detail="launch: how often each test launched each kernel, and how long the GPU ran it. "
        "range: the same by the NVTX ranges around the launches, such as PyTorch's "
        "`emit_nvtx`.",
        requires=MODES,
    ),
    Option(
        name="trace.children",
        flag_name="children",
        default=True,
        help="Trace the processes that tests start, too.",
        requires=MODES,
    ),
    Option(
        name="trace.replay",
        flag_name="replay",
        value="DIR",
        help="Replay the trace recorded in this folder if there is no GPU.",
        requires=_TRACED,
    ),
    Option(
        name="verify.copies",
        flag_name="copies",
        value="{overwritten,compacted}",
        default="overwritten",
        help="Overwrite unused GPU code in copies, or remove it as slim does.",
        requires=PROVED,
    ),
    Option(
        name="verify.rerun",
        flag_name="rerun",
        value="N",
        help="Rerun tests that differ up to N times on the originals, in one run.",
        detail="A test is flaky if the originals alone gave both outcomes. If not set: 20 times; "
        "after 40% of the suite's time, 3 times. 0 reruns nothing.",
        requires=PROVED,
    ),
    Option(
        name="verify.timeout",
        flag_name="verify-timeout",
        value="SECONDS",
        help="End a run if no test begins or ends for this long; 0 never does.",
        detail="If not set: 5 times the longest such time of the traced run, at least 5 minutes.",
        requires=PROVED,
    ),
    Option(
        name="verify.tolerate",
        flag_name="tolerate",
        value="{attempts,subtests,subtest-names,error-type,children}",
        help="Ignore these differences between equal outcomes of a test.",
        detail="The verdict lists them as tolerated.",
        is_repeated=True,
        has_commas=True,
        requires=PROVED,
    ),
    Option(
        name="verify.opened_originals",
        flag_name="opened-originals",
        value="GLOB",
        help="Ignore processes that open the originals of these libraries.",
        detail="`command:GLOB` names processes by their whole command line, instead of libraries. "
        "While the tests run on the copies, each other process that opens an original may run on "
        "it, and the library is not proved. The verdict notes what was opened. A program that is "
        "started without the environment of a trace of CPU code voids its proof alone.",
        is_repeated=True,
        requires=PROVED,
    ),
    Option(
        name="reports.formats",
        flag_name="report",
        value="TYPE[:PATH]",
        default=("terminal",),
        help="Write this report; negativa report --help lists the types.",
        detail="terminal: tables that fit the terminal. terminal-missing: unused kernels of the "
        "project's own libraries. github: annotations of GitHub Actions. json: all rows. "
        "markdown: tables for a comment or a job summary. lcov, cobertura: kernel coverage for "
        "coverage tools. html: one page with pictures and tables. baseline: figures by which "
        "later runs are compared. "
        "Without a PATH, a file lies in the folder for reports. `-` is standard output.",
        is_repeated=True,
        has_commas=True,
        requires=MODES,
    ),
    Option(
        name="reports.top",
        flag_name="top",
        value="N",
        default=10,
        help="Show this many rows of each table; 0 shows all.",
        requires=MODES,
    ),
    Option(
        name="coverage.libraries",
        flag_name="cover-library",
        value="GLOB",
        help="Report which tests ran each kernel of these libraries.",
        detail="If not set: the libraries in the root folder, and those of editable installs.",
        is_repeated=True,
        requires=_TRACED,
    ),
    Option(
        name="coverage.fail_under",
        flag_name="fail-under",
        value="[GLOB=]PERCENT",
        help="Fail (exit 1) if the tests ran less of these libraries' kernels.",
        detail=_BY_LIBRARY,
        is_repeated=True,
        requires=_TRACED,
    ),
    Option(
        name="thresholds.max_unused_percent",
        flag_name="max-unused-percent",
        value="[GLOB=]PERCENT",
        help="Fail (exit 1) if more of the GPU code than this is unused.",
        detail=_BY_LIBRARY,
        is_repeated=True,
        requires=_TRACED,
    ),
    Option(
        name="thresholds.min_used_kernels",
        flag_name="min-used-kernels",
        value="[GLOB=]N",
        help="Fail (exit 1) if fewer kernels than this are used.",
        detail=_BY_LIBRARY,
        is_repeated=True,
        requires=_TRACED,
    ),
    Option(
        name="thresholds.max_gpu_code",
        flag_name="max-gpu-code",
        value="[GLOB=]SIZE",
        help="Fail (exit 1) if libraries and files hold more GPU code than this.",
        detail=_BY_LIBRARY,
        is_repeated=True,
        requires=_TRACED,
    ),
    Option(
        name="compare.baseline",
        flag_name="compare",
        value="FILE|URL",
        help="Show what grew since this baseline, a report of that type.",
        requires=_TRACED,
    ),
    Option(
        name="compare.fail",
        flag_name="compare-fail",
        value="[GLOB=]FIGURE:LIMIT",
        help="Fail (exit 1) if a figure grew by more than this since the baseline.",
        detail="`size` is the libraries' files, `code` their GPU code, `unused` what no test "
        "needs of it. `new-kernels-untested` counts kernels of the project's own "
        "libraries that are not in the baseline and that no test ran. " + _BY_LIBRARY,
        is_repeated=True,
        requires=_TRACED,
    ),
    Option(
        name="cache_dir",
        flag_name="cache-dir",
        value="DIR",
        help="Keep maps of libraries in this folder between sessions.",
        detail="If not set: negativa in the user's cache folder.",
        requires=_TRACED,
        has_variable=True,
    ),
)

BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
FILE_OPTIONS: Mapping[str, Option] = {o.name: o for o in OPTIONS if o.in_file}

SECTIONS: Mapping[str, str] = {
    "libraries": "Which libraries are analysed; without include, all with GPU code.",
    "keep": "GPU code that is never planned as unused, whether the tests use it or not.",
    "trace": "What is recorded, and what counts.",
    "verify": "How a plan is proved, and healed if the proof fails.",
    "reports": "Which reports are written, and what they show.",
    "coverage": "Kernel coverage of the libraries that the project builds itself.",
    "thresholds": "Limits over all analysed libraries; a session that crosses one exits with 1.",
    "compare": "What may have grown since a baseline.",
}
"""The sections of ``negativa.yaml``, by their keys."""
