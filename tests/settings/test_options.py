"""The table of options: every option by every source, and the order of the sources."""

from __future__ import annotations

import argparse
import enum
import json
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pytest_negativa.cli.report import report
from pytest_negativa.errors import OptionError, one_of
from pytest_negativa.models.settings import ReportFormat, Settings
from pytest_negativa.models.verdict import FLAKY_RULE
from pytest_negativa.settings.file import ConfigFile, load_config
from pytest_negativa.settings.flags import (
    add_pytest_options,
    click_options,
    flag_without_effect,
    pick_flags,
)
from pytest_negativa.settings.options import (
    BY_NAME,
    FILE_OPTIONS,
    MODES,
    OPTIONS,
    SECTIONS,
    Option,
)
from pytest_negativa.settings.resolve import load_settings, resolve
from pytest_negativa.settings.values import type_of
from tests.support.verbs import VERBS

FORMATS = one_of([kind.value for kind in ReportFormat])
ROOT = "/project"
CWD = "/elsewhere"
TERMINAL = {"format": "terminal", "path": None}
MARKDOWN = {"format": "markdown", "path": "/project/.negativa/report.md"}


class Case(NamedTuple):
    """An option by each source, with values that all differ, also from the default.

    ``flag``: arguments after the flag, one per use. ``default``, ``by_*``: what comes out.
    """

    name: str
    flag: tuple[str, ...]
    by_flag: Any
    variable: str
    by_variable: Any
    yaml: str
    by_file: Any
    default: Any


def _growth(figure: str, limit: float, unit: str = "") -> dict[str, Any]:
    return {"figure": figure, "limit": limit, "is_percent": unit == "%"}


def _limits(overall: Any = None, libraries: Any = None) -> dict[str, Any]:
    return {"overall": overall, "libraries": libraries or {}}


def _json(path: str) -> dict[str, str]:
    return {"format": "json", "path": path}


CASES = [
    Case(
        "directory",
        ("out",), "/elsewhere/out",
        "/abs/env", "/abs/env",
        "results", "/project/conf/results",
        "/project/.negativa",
    ),
    Case(
        "paths",
        ("/a/*/v=here", "/b=/c"), {"/a/*/v": "/elsewhere/here", "/b": "/c"},
        "/a=/b;/c=d=e", {"/a": "/b", "/c=d": "/elsewhere/e"},
        "[/a/*=x]", {"/a/*": "/project/conf/x"},
        {},
    ),
    Case(
        "libraries.include",
        ("liba*", "dist:torch"), ["liba*", "dist:torch"],
        "libb.so;*/lib/c,1.so", ["libb.so", "*/lib/c,1.so"],
        "[libc.so]", ["libc.so"],
        [],
    ),
    Case(
        "libraries.exclude",
        ("liba*",), ["liba*"],
        "libb.so\nlibd.so", ["libb.so", "libd.so"],
        "[libc.so, '*/x/*']", ["libc.so", "*/x/*"],
        [],
    ),
    Case(
        "keep.kernels",
        ("gemm<int, 4>*", "f"), ["gemm<int, 4>*", "f"],
        "a(int, float);b", ["a(int, float)", "b"],
        "['k(float [3])']", ["k(float [3])"],
        [],
    ),
    Case(
        "keep.libraries",
        ("liba*",), ["liba*"],
        "dist:b", ["dist:b"],
        "\n    - libc.so", ["libc.so"],
        [],
    ),
    Case(
        "keep.archs",
        ("sm_80,sm_86", "sm_90a"), ["sm_80", "sm_86", "sm_90a"],
        "sm_75, sm_120f", ["sm_75", "sm_120f"],
        "[sm_100]", ["sm_100"],
        [],
    ),
    Case("keep.ptx", ("all",), "all", "newest", "newest", "newest", "newest", "off"),
    Case("granularity", ("kernel",), "kernel", "kernel", "kernel", "kernel", "kernel", "element"),
    Case("require_gpu", (), True, "True", True, "true", True, False),
    Case("no_jit", (), True, "1", True, "true", True, False),
    Case("cpu", (), True, "1", True, "true", True, False),
    Case("trace.level", ("launch",), "launch", "launch", "launch", "launch", "launch", "lookup"),
    Case("trace.children", (), True, "0", False, "false", False, True),
    Case(
        "trace.replay",
        ("r1",), "/elsewhere/r1",
        "r2", "/elsewhere/r2",
        "r3", "/project/conf/r3",
        None,
    ),
    Case(
        "verify.copies",
        ("compacted",), "compacted",
        "compacted", "compacted",
        "compacted", "compacted",
        "overwritten",
    ),
    Case("verify.rerun", ("2",), 2, "3", 3, "4", 4, None),
    Case("verify.timeout", ("0",), 0, "90", 90, "30", 30, None),
    Case(
        "verify.tolerate",
        ("subtests", "attempts, error-type"), ["subtests", "attempts", "error-type"],
        "subtests,error-type", ["subtests", "error-type"],
        "[subtest-names]", ["subtest-names"],
        [],
    ),
    Case(
        "verify.opened_originals",
        ("liba.so", "command:*, b"), ["liba.so", "command:*, b"],
        "liba.so,command:*b", ["liba.so,command:*b"],
        "[liba.so]", ["liba.so"],
        [],
    ),
    Case(
        "reports.formats",
        ("json:j.json", "markdown"),
        [_json("/elsewhere/j.json"), MARKDOWN],
        "terminal,json:/x/e.json", [TERMINAL, _json("/x/e.json")],
        "json:f.json", [_json("/project/conf/f.json")],
        [TERMINAL],
    ),
    Case("reports.top", ("0",), 0, "7", 7, "8", 8, 10),
    Case("coverage.libraries", ("a.so",), ["a.so"], "b;dist:c", ["b", "dist:c"], "[d]", ["d"], []),
    Case(
        "coverage.fail_under",
        ("100", "a=b.so=80"), _limits(100.0, {"a=b.so": 80.0}),
        "d.so=1;dist:e=2.5%", _limits(None, {"d.so": 1.0, "dist:e": 2.5}),
        "[f.so=90]", _limits(None, {"f.so": 90.0}),
        _limits(),
    ),
    Case(
        "thresholds.max_unused_percent",
        ("0",), _limits(0.0),
        "12.5%", _limits(12.5),
        "[99, a=1]", _limits(99.0, {"a": 1.0}),
        _limits(),
    ),
    Case(
        "thresholds.min_used_kernels",
        ("0",), _limits(0),
        "10", _limits(10),
        "11", _limits(11),
        _limits(),
    ),
    Case(
        "thresholds.max_gpu_code",
        ("0",), _limits(0),
        "1.5 GiB", _limits(3 * 2**29),
        "500 MB", _limits(500_000_000),
        _limits(),
    ),
    Case(
        "compare.baseline",
        ("b.json",), "/elsewhere/b.json",
        "/x/c.json", "/x/c.json",
        "d.json", "/project/conf/d.json",
        None,
    ),
    Case(
        "compare.fail",
        ("size:5%,unused:100 MB", "new-kernels-untested:0", "a.so=size:5%,code:1"),
        _limits(
            [_growth("size", 5, "%"), _growth("unused", 1e8), _growth("new-kernels-untested", 0)],
            {"a.so": [_growth("size", 5, "%"), _growth("code", 1)]},
        ),
        "code:250%", _limits([_growth("code", 250, "%")]),
        "['unused: 1 kB', 'c=unused:3']",
        _limits([_growth("unused", 1000)], {"c": [_growth("unused", 3)]}),
        _limits(),
    ),
    Case(
        "cache_dir",
        ("../c",), "/c",
        "~/maps", "/users/ada/maps",
        "../maps", "/project/maps",
        "/users/ada/.cache/negativa",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("compare-fail", "size"),
        ("compare-fail", "size:"),
        ("compare-fail", "size:-1%"),
        ("compare-fail", "big:1%"),
        ("compare-fail", "new-kernels-untested:1%"),
        ("fail-under", "libours.so=101"),
        ("max-gpu-code", "=1"),
    ],
)
def test_limits_that_limit_nothing(flag: str, text: str) -> None:
    with pytest.raises(OptionError, match=f"--negativa-{flag}: .*expected"):
        run(parse(f"--negativa-{flag}={text}"), {}, None)


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/ada")


def parse(*arguments: str) -> dict[str, Any]:
    """As pytest parses them: a namespace of ``dest`` names."""

    class Group:
        def addoption(self, *opts: str, **attrs: Any) -> None:
            parser.add_argument(*opts, **attrs)

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_pytest_options(Group())
    text = parser.format_help()
    assert [o.name for o in OPTIONS if f" {o.flag}" not in text] == []
    return pick_flags(vars(parser.parse_args(arguments)))


def flags_for(case: Case) -> list[str]:
    option = BY_NAME[case.name]
    if not option.value:
        return [option.flag]
    return [f"{option.flag}={argument}" for argument in case.flag]


def flags_of(*cases: Case) -> dict[str, Any]:
    """The flags of cases, as pytest or a command parses them."""
    return parse(*(flag for case in cases for flag in flags_for(case)))


def environ_for(case: Case) -> dict[str, str]:
    variable = BY_NAME[case.name].variable
    return {variable: case.variable} if variable else {}


@pytest.fixture
def file_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a file that sets the option of a case; for ``get`` it is /project/conf/n.yaml."""

    def load(case: Case) -> ConfigFile:
        section, _, key = case.name.rpartition(".")
        path = tmp_path / "project" / "conf" / "n.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{section}:\n  {key}: {case.yaml}\n" if section else f"{key}: {case.yaml}")
        return load_config(path)

    return load


def get(found: Settings, name: str) -> Any:
    value: Any = msgspec.to_builtins(found)
    for key in name.split("."):
        value = value[key]
    # Lists and tuples are the same to a reader of plain values.
    text = msgspec.json.encode(value).decode()
    if found.config is not None:
        text = text.replace(str(Path(found.config).parents[2]), "")
    return msgspec.json.decode(text)


def run(flags: Any, environ: Any, config: ConfigFile | None) -> Settings:
    environ = {"HOME": "/users/ada", **environ}
    return resolve(flags, environ, config, root=ROOT, cwd=CWD)


by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
with_variable = pytest.mark.parametrize(
    "case", [c for c in CASES if BY_NAME[c.name].variable], ids=lambda case: case.name
)


def test_every_option_has_a_case() -> None:
    assert [c.name for c in CASES] == [o.name for o in OPTIONS if o.in_file]


@by_case
def test_default(case: Case) -> None:
    found = run({}, {}, None)
    assert get(found, case.name) == case.default
    assert found.sources[case.name] == ""


@by_case
def test_file_beats_default(case: Case, file_of: Any) -> None:
    found = run({}, {}, file_of(case))
    assert get(found, case.name) == case.by_file
    assert "n.yaml:" in found.sources[case.name]


@with_variable
def test_environment_beats_file(case: Case, file_of: Any) -> None:
    found = run({}, environ_for(case), file_of(case))
    assert get(found, case.name) == case.by_variable
    variable = str(BY_NAME[case.name].variable)
    assert found.sources[case.name] == variable


@by_case
def test_flag_beats_all(case: Case, file_of: Any) -> None:
    found = run(flags_of(case), environ_for(case), file_of(case))
    assert get(found, case.name) == case.by_flag
    flag = BY_NAME[case.name].flag
    assert found.sources[case.name] == flag


@with_variable
def test_empty_variable_counts_as_not_set(case: Case, file_of: Any) -> None:
    found = run({}, {str(BY_NAME[case.name].variable): " "}, file_of(case))
    assert get(found, case.name) == case.by_file


@by_case
def test_command_line_of_negativa(case: Case) -> None:
    received: dict[str, Any] = {}

    @click.command()
    @click_options(case.name)
    def command(**parsed: Any) -> None:
        received.update(pick_flags(parsed))

    arguments = [flag.replace("--negativa-", "--") for flag in flags_for(case)]
    assert CliRunner().invoke(command, arguments).exit_code == 0
    assert get(run(received, environ_for(case), None), case.name) == case.by_flag
    received.clear()
    assert CliRunner().invoke(command, []).exit_code == 0
    assert received == {}


switches = pytest.mark.parametrize(
    "option", [o for o in OPTIONS if o.off_flag], ids=lambda o: str(o.name)
)


@switches
def test_switches_have_an_opposite(option: Option) -> None:
    assert parse(f"--no-{option.flag[2:]}") == {option.name: False}
    assert parse(option.flag, f"--no-{option.flag[2:]}") == {option.name: False}
    found = run(parse(f"--no-{option.flag[2:]}"), {str(option.variable): "1"}, None)
    assert get(found, option.name) is False


def test_command_line_help_names_every_option_in_order() -> None:
    names = [option.name for option in OPTIONS if option.in_file]
    command = click.command()(click_options(*names)(lambda: None))
    text = CliRunner().invoke(command, ["--help"]).output
    places = [text.index(f" {BY_NAME[name].cli_flag}") for name in names]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("words", "has_all"),
    [
        (["-q", "tests", "-p", "pytest_negativa.plugin"], False),
        (["--negativa"], True),
        (["--no-negativa-children"], True),
        (["-o", "addopts=--negativa-top=3"], True),
        (["--help"], True),
        (["@arguments"], True),
        (None, True),
    ],
)
def test_flags_are_there_if_the_command_line_may_have_some(
    words: list[str] | None, has_all: bool
) -> None:
    found: set[str] = set()

    class Group:
        def addoption(self, *opts: str, **attrs: Any) -> None:
            found.update(opts)

    add_pytest_options(Group(), words)
    modes = {flag for name in MODES for flag in (BY_NAME[name].flag, BY_NAME[name].off_flag)}
    assert modes <= found
    assert ({o.flag for o in OPTIONS} <= found) == has_all == (found != modes)


def test_the_reference_names_the_formats_of_reports() -> None:
    option = BY_NAME["reports.formats"]
    for kind in ReportFormat:
        assert kind.value in option.detail
        assert kind.value in str(report.help)


def test_a_flag_is_named_as_the_command_has_it() -> None:
    flags = {"keep.ptx": "some", "keep.kernels": ("a*",)}
    with pytest.raises(OptionError, match=r"^--keep-ptx: found 'some'"):
        resolve(flags, {}, None, root=ROOT, of_command=True)
    with pytest.raises(OptionError, match=r"^--negativa-keep-ptx: found 'some'"):
        resolve(flags, {}, None, root=ROOT)
    found = resolve({"keep.kernels": ("a*",)}, {}, None, root=ROOT, of_command=True)
    assert found.sources["keep.kernels"] == "--keep-kernel"


def test_what_an_option_requires() -> None:
    """Each but the switches themselves has an effect in some kind of session."""
    for option in OPTIONS:
        assert bool(option.requires) == (option.name not in MODES)
        assert set(option.requires) <= set(MODES)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_help_is_one_line_and_one_sentence(option: Option) -> None:
    assert len(option.help) <= 72
    assert option.help.split()[0].rstrip(";,") in VERBS
    assert option.help.endswith(".")


def test_the_flaky_rule_is_that_of_the_verdict() -> None:
    assert FLAKY_RULE in BY_NAME["verify.rerun"].detail


def test_every_section_is_described() -> None:
    assert list(SECTIONS) == list(
        dict.fromkeys(n.partition(".")[0] for n in FILE_OPTIONS if "." in n)
    )


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        ((), None),
        (("-k", "x", "test_a.py"), None),
        (("--negativa-top=3",), "--negativa-top"),
        (("--negativa-top", "3"), "--negativa-top"),
        (("--no-negativa-children",), "--no-negativa-children"),
        (("--negatively-different=3",), None),
        (("--", "--negativa-top=3"), None),
    ],
)
def test_flags_without_effect(words: tuple[str, ...], idle: str | None) -> None:
    found = flag_without_effect(words, {})
    assert (found and found.split()[0]) == idle
    assert flag_without_effect(words, {"enabled": True}) is None
    # As what starts sessions of its own, untraced, adds to a user's command line.
    assert flag_without_effect(words, {"verifying": False}) is None


def test_all_together(file_of: Any) -> None:
    """No option's value lands in another's place."""
    flags = flags_of(*CASES)
    environ = {key: value for case in CASES for key, value in environ_for(case).items()}
    by_flag = run(flags, environ, None)
    by_variable = run({}, environ, None)
    for case in CASES:
        if case.name != "reports.formats":  # its default paths follow the directory
            assert get(by_flag, case.name) == case.by_flag
            expected = case.by_variable if BY_NAME[case.name].variable else case.default
            assert get(by_variable, case.name) == expected


def test_config_by_flag_environment_and_search(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name, top in (("flag", 1), ("variable", 2), ("negativa", 3)):
        (tmp_path / f"{name}.yaml").write_text(f"reports: {{top: {top}}}")
    root = tmp_path / "a"
    root.mkdir()
    environ = {"NEGATIVA_CONFIG": "variable.yaml"}

    def load(flags: dict[str, Any], environ: dict[str, str], start: Path = root) -> Settings:
        return load_settings(flags, environ, root=start, cwd=tmp_path)

    by_flag = load(parse("--negativa-config=flag.yaml"), environ)
    assert (by_flag.reports.top, by_flag.config) == (1, str(tmp_path / "flag.yaml"))
    assert by_flag.sources["config"] == "--negativa-config"
    # A named file may lie anywhere; results stay with the project.
    assert by_flag.directory == str(root / ".negativa")
    by_variable = load({}, environ)
    assert (by_variable.reports.top, by_variable.config) == (2, str(tmp_path / "variable.yaml"))
    by_search = load({}, {})
    assert (by_search.reports.top, by_search.config) == (3, str(tmp_path / "negativa.yaml"))
    assert by_search.directory == str(tmp_path / ".negativa")
    (tmp_path / "negativa.yaml").unlink()
    without = load({}, {})
    assert (without.reports.top, without.config) == (10, None)
    assert without.directory == str(root / ".negativa")


def test_named_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"gone\.yaml: cannot be read: No such file"):
        load_settings({"config": "gone.yaml"}, {}, root=tmp_path, cwd=tmp_path)


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("--negativa-level", "lunch",
         "found 'lunch', expected lookup, launch or range; did you mean launch?"),
        ("--negativa-keep-arch", "sm_80,9",
         "'9' is no GPU architecture; expected a form like sm_90, sm_90a, compute_90, 90 or 9.0, "
         "a GPU like H100 or RTX 4090, native or all-major; did you mean sm_90?"),
        ("--negativa-report", "jsn:a",
         f"found 'jsn:a', expected {FORMATS}; did you mean json?"),
        ("--negativa-report", "json:",
         "found 'json:', expected json alone, or with a path"),
        ("--negativa-keep-kernel", "a\x07",
         "found 'a\\x07', expected a glob with * and ?"),
    ],
)  # fmt: skip
def test_bad_values_name_the_flag(flag: str, text: str, message: str) -> None:
    with pytest.raises(OptionError) as by_flag:
        run(parse(f"{flag}={text}"), {}, None)
    assert str(by_flag.value) == f"{flag}: {message}"


def test_a_bad_switch_in_the_environment() -> None:
    with pytest.raises(
        OptionError, match=r"^NEGATIVA_REQUIRE_GPU: found 'maybe', expected true or false$"
    ):
        run({}, {"NEGATIVA_REQUIRE_GPU": "maybe"}, None)


def test_an_empty_flag_empties_a_list(file_of: Any) -> None:
    case = next(c for c in CASES if c.name == "keep.kernels")
    found = run(parse("--negativa-keep-kernel="), environ_for(case), file_of(case))
    assert found.keep.kernels == ()
    assert found.sources["keep.kernels"] == "--negativa-keep-kernel"


def size_of(text: str) -> float | None:
    return run({"thresholds.max_gpu_code": text}, {}, None).thresholds.max_gpu_code.overall


@given(
    whole=st.integers(0, 9999),
    thousandths=st.integers(0, 999),
    unit=st.sampled_from(["k", "M", "G", "Ki", "mi", "G", "Gi", "ti"]),
    space=st.sampled_from(["", " "]),
)
def test_a_size_with_a_unit_is_exact_or_refused(
    whole: int, thousandths: int, unit: str, space: str
) -> None:
    text = f"{whole}.{thousandths:03d}{space}{unit}B"
    factor = (1024 if unit[1:] else 1000) ** ("kmgt".index(unit[0].lower()) + 1)
    product = (1000 * whole + thousandths) * factor
    if product % 1000:
        with pytest.raises(OptionError):
            size_of(text)
    else:
        assert size_of(text) == product // 1000


@pytest.mark.parametrize(
    "text", ["9.3e3", "1iB", "9999999999 GB", "- 1", "1 k", "0.5 B", "∞", "\u0661"]
)
def test_no_size(text: str) -> None:
    with pytest.raises(OptionError, match="expected a size"):
        size_of(text)


def test_table_and_records_have_the_same_options() -> None:
    def leaves(value: dict[str, Any], prefix: str = "") -> list[str]:
        names = []
        for key, inner in value.items():
            if isinstance(inner, dict) and f"{prefix}{key}" not in BY_NAME:
                names += leaves(inner, f"{prefix}{key}.")
            else:
                names.append(prefix + key)
        return names

    plain = msgspec.to_builtins(run({}, {}, None))
    del plain["sources"]
    assert sorted(leaves(plain)) == sorted(option.name for option in OPTIONS)


def test_names_are_unique_and_follow_from_the_flag_name() -> None:
    assert len({o.flag for o in OPTIONS}) == len({o.dest for o in OPTIONS}) == len(OPTIONS)
    option = BY_NAME["keep.ptx"]
    assert (option.flag, option.cli_flag) == ("--negativa-keep-ptx", "--keep-ptx")
    assert (option.variable, option.dest) == (None, "negativa_keep_ptx")
    assert BY_NAME["enabled"].flag == "--negativa"
    assert {option.variable for option in OPTIONS} == {
        None,
        "NEGATIVA_CACHE_DIR",
        "NEGATIVA_CONFIG",
        "NEGATIVA_DIR",
        "NEGATIVA_REQUIRE_GPU",
    }


def test_help_names_the_words_that_the_records_have() -> None:
    for option in OPTIONS:
        found = type_of(option.name)
        if isinstance(found, type) and issubclass(found, enum.Enum):
            assert option.value == "{" + ",".join(word.value for word in found) + "}"


def test_the_user_has_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a user without an entry in /etc/passwd."""

    def refuse(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", refuse)
    assert resolve({}, {}, None, root=ROOT, cwd=CWD).cache_dir is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert resolve({}, {}, None, root=ROOT, cwd=CWD).cache_dir == "/caches/negativa"


def test_settings_travel_to_workers() -> None:
    environ = {key: value for case in CASES for key, value in environ_for(case).items()}
    sent = run(parse("--negativa", "--negativa-level=launch"), environ, None)
    execnet = pytest.importorskip("execnet", reason="comes with pytest-xdist")
    plain = msgspec.to_builtins(sent)
    for received in (execnet.loads(execnet.dumps(plain)), json.loads(json.dumps(plain))):
        assert msgspec.convert(received, Settings) == sent


def test_names_in_errors_do_not_reach_the_terminal_raw(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--negativa", "--negativa-config=no\x1b[2Jsuch")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "\x1b" not in result.stderr.str()
    result.stderr.fnmatch_lines(
        ["ERROR: negativa: */no\\x1b*2Jsuch: cannot be read: No such file*"]
    )


def test_import_is_cheap() -> None:
    """Every pytest session imports the table, with --negativa or without."""
    code = (
        "import sys, pytest; before = set(sys.modules)\n"
        "import pytest_negativa.plugin\n"
        "heavy = {'msgspec', 'yaml', 'click', 'cupti', 'elftools',"
        " 'zstandard', 'lz4', 'rich', 'tabulate', 'difflib', 'decimal', 'platformdirs',"
        " 'pytest_negativa.arch', 'pytest_negativa.storage', 'pytest_negativa.settings.values'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
