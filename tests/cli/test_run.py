"""The command: trace, locate, debloat and combine, on recorded traces."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.storage.runs import Run
from tests.support.recordings import rewrite
from tests.support.sessions import (
    FIRST_USES,
    HEADLINE,
    KERNELS,
    LOADED,
    PROVE_EACH,
    Project,
    used_kernels,
)


@pytest.fixture
def recorded(project: Project) -> Project:
    """The recording, with the library's path as it is here: as if it had been traced here."""
    rewrite(project, "recorded/h200.jsonl")
    return project


@pytest.mark.parametrize("verb", ["trace", "debloat"])
@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_exit_status_is_that_of_the_command(
    project: Project, verb: str, code: str, status: int
) -> None:
    done = project.negativa(verb, "--", sys.executable, "-c", code, status=status)
    # Without a GPU no process can leave a trace: one line says so, and nothing stays behind.
    assert done.stdout == ""
    assert done.stderr.startswith("negativa: nothing was traced: ")
    assert done.stderr.count("\n") == 1
    assert project.runs() == []
    assert not (project.results / "latest").exists()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["trace", "debloat"])
def test_limits_do_not_pass_where_nothing_was_traced(project: Project, verb: str) -> None:
    project.write("negativa.yaml", "thresholds: {min_used_kernels: 1}\n")

    done = project.negativa(verb, "--", "true", status=1)

    assert done.stderr.endswith("negativa: the limits can't be checked\n")


def test_the_command_keeps_its_input_and_output(project: Project) -> None:
    code = "import sys; sys.stderr.write('e'); print(sys.argv[1:], sys.stdin.read())"
    done = project.negativa(
        "--dir", "out", "trace", "--", sys.executable, "-c", code, "--dir", "x", "-h"
    )
    assert done.stdout.startswith("['--dir', 'x', '-h']")
    assert done.stderr.startswith("enegativa: nothing was traced")
    assert [path.name for path in (project.folder / "out").iterdir()] == [".gitignore"]


@pytest.mark.parametrize("verb", ["trace", "debloat"])
@pytest.mark.parametrize("command", ["no-such-program", "./negativa.yaml", "./recorded"])
def test_a_command_that_is_not_there(project: Project, verb: str, command: str) -> None:
    done = project.negativa(verb, "--", command, status=127)
    assert done.stderr == f"negativa: error: {command}: not found, or not an executable file\n"
    assert done.stdout == "" and not project.results.exists()


@pytest.mark.parametrize("verb", ["trace", "debloat"])
def test_names_in_errors_do_not_reach_the_terminal_raw(project: Project, verb: str) -> None:
    done = project.negativa(verb, "--", "no\x1b[2Jsuch", status=127)
    assert done.stderr == "negativa: error: no\\x1b[2Jsuch: not found, or not an executable file\n"


def test_no_command_is_wrong_usage(project: Project) -> None:
    assert "COMMAND" in project.negativa("trace", status=2).stderr


def test_results_that_cannot_be_written(project: Project) -> None:
    project.write("taken", "a file")
    done = project.negativa("--dir=taken/x", "trace", "--", "true", status=1)
    assert done.stderr.startswith("negativa: error: ") and "cannot be" in done.stderr


def test_locate_without_a_run(project: Project) -> None:
    done = project.negativa("locate", status=2)
    latest = project.results / "latest"
    assert done.stderr.startswith(f"negativa: error: {latest}: no traced run here; make one with ")
    named = project.negativa("locate", "--run", "nowhere", status=2)
    assert f"{project.folder / 'nowhere'}: no such run" in named.stderr
    (project.folder / "empty").mkdir()
    empty = project.negativa("locate", "--run", "empty", status=1)
    assert "no trace files (*.jsonl) here or in its folder trace" in empty.stderr


def test_locate_a_recording(recorded: Project) -> None:
    rewrite(recorded, ".negativa/run/trace/h200.jsonl")

    done = recorded.negativa("locate", "--run", ".negativa/run")

    assert done.stdout.startswith(f"{HEADLINE}\n\nlibrary ")
    # Nothing tells how that session ended.
    assert done.stderr == PROVE_EACH
    # Every other library of that machine isn't here, and is named.
    assert "libcuda.so.580.159.04: not found" in done.stdout
    assert [tuple(d[:2]) for d in recorded.plan() if d[2]] == list(LOADED)
    assert used_kernels(recorded.latest("usage.json")) == set(KERNELS)

    # The same again with another policy, now by its link; nothing of before is left.
    again = recorded.negativa("locate", "--keep-library", "libquick*", "--keep-arch", "sm_80")
    assert "all of it is kept (library-policy): keep.libraries: libquick*" in again.stdout
    assert {d[3] for d in recorded.plan()} == {"library-policy"}
    recorded.negativa("locate", "--exclude-library", "libquickstart.so")
    assert list((recorded.results / "run" / "spans").iterdir()) == []


def test_a_failed_run_is_not_planned_later(recorded: Project) -> None:
    trace = rewrite(recorded, ".negativa/run/trace/h200.jsonl")
    run = Run(trace.parents[1].resolve())
    run.mark("failed", "2 tests failed")
    run.make_latest()

    done = recorded.negativa("locate", status=1)
    assert "nothing is planned from this run: 2 tests failed" in done.stdout
    assert done.stderr == (
        f"negativa: error: {run}: nothing is planned from this run: 2 tests failed; trace again\n"
    )
    assert not recorded.planned()
    done = recorded.negativa("combine", ".negativa/latest", status=1)
    assert "nothing is planned from this run: .negativa/latest: 2 tests failed" in done.stdout


def test_a_session_without_an_end_is_not_planned_later(recorded: Project) -> None:
    rewrite(recorded, ".negativa/run/trace/h200.jsonl", lambda lines: lines[:-1])
    done = recorded.negativa("locate", "--run", ".negativa/run", status=1)
    assert "did not end by itself" in done.stdout
    assert "nothing is planned from this run: process " in done.stderr
    assert not recorded.planned()


def test_copies_that_are_not_compacted(recorded: Project) -> None:
    """The file would shrink by less than a page, so it is overwritten."""
    rewrite(recorded, ".negativa/run/trace/h200.jsonl")
    recorded.negativa("locate", "--run", ".negativa/run")
    reconstruct = ("reconstruct", "--run", ".negativa/run")
    for state in ("written", "unchanged"):
        done = recorded.negativa(*reconstruct, "--copies", "compacted")
        assert f"libquickstart.so: {state}, " in done.stdout
        assert " overwritten instead of compacted: saves only " in done.stdout
        assert done.stderr.endswith(PROVE_EACH)
    assert "compacted" not in recorded.negativa(*reconstruct).stdout


COMMANDS_ON_A_RUN = ("locate", "kernels", "reconstruct")
PROOFS = ("verify",)


@pytest.mark.slow
@pytest.mark.parametrize("command", (*COMMANDS_ON_A_RUN, *PROOFS))
def test_a_failed_last_run_leads_to_the_last_good_one(recorded: Project, command: str) -> None:
    """No command takes an older run unasked, and each says which there is."""
    for name in ("20260101T000001Z-0123ab", "20260101T000002Z-0123ab", "20260101T000003Z-0123ab"):
        rewrite(recorded, f".negativa/{name}/trace/h200.jsonl")
    for name in ("20260101T000001Z-0123ab", "20260101T000002Z-0123ab"):
        recorded.negativa("locate", "--run", f".negativa/{name}")
    bad = recorded.results / "20260101T000003Z-0123ab"
    Run(bad).mark("failed", "2 tests failed")
    recorded.negativa("locate", "--run", bad, status=1)
    assert (recorded.results / "latest").resolve() == bad

    done = recorded.negativa(command, status=1)

    good = recorded.results / "20260101T000002Z-0123ab"
    assert f"negativa: error: {bad}: nothing is planned from this run: 2 tests" in done.stderr
    assert f"take the last good run: --run {good} (with pytest: --negativa-run)" in done.stderr
    if command not in PROOFS:
        assert "libquickstart.so" in recorded.negativa(command, "--run", good).stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", (*COMMANDS_ON_A_RUN, *PROOFS))
def test_a_last_run_that_is_gone(recorded: Project, command: str) -> None:
    rewrite(recorded, ".negativa/20260101T000001Z-0123ab/trace/h200.jsonl")
    recorded.negativa("locate", "--run", ".negativa/20260101T000001Z-0123ab")
    (recorded.results / "latest").unlink()
    (recorded.results / "latest").symlink_to("20260101T000002Z-0123ab")
    error = recorded.negativa(command, status=2).stderr
    assert "latest: leads to 20260101T000002Z-0123ab, which is gone; trace again, or" in error
    assert f"--run {recorded.results / '20260101T000001Z-0123ab'}" in error


WRONG = [
    ("locate", "--no-such-option"),
    ("locate", "--keep-ptx=some"),
    ("locate", "--keep-arch=ninety"),
    ("locate", "--report=xml"),
    ("--config=nowhere.yaml", "locate"),
    ("locate", "--run=nowhere"),
    ("kernels", "--run=nowhere"),
    ("reconstruct", "--copies=thin"),
    ("reconstruct", "--run=nowhere"),
    ("verify", "--run=nowhere"),
    ("verify", "--heal", "--rerun=often"),
    ("combine",),
    ("combine", "x", "--path=relative=y"),
    ("trace",),
    ("report", "--top=few"),
    ("measure", "--slim-dir=nowhere", "--", "true"),
    ("inspect", "--packages", "nowhere"),
    ("inspect", "nowhere"),
    ("schema", "nothing"),
    ("no-such-command",),
    (),
]


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_usage(project: Project, words: tuple[str, ...]) -> None:
    done = project.negativa(*words, status=2)
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert not project.results.exists()


def test_a_value_that_cannot_be_used_is_named_as_it_was_given(project: Project) -> None:
    flag = project.negativa("locate", "--keep-ptx=some", status=2).stderr
    assert flag == "negativa: error: --keep-ptx: found 'some', expected off, newest or all\n"
    variable = project.negativa("locate", status=2, NEGATIVA_REQUIRE_GPU="some").stderr
    assert variable.startswith("negativa: error: NEGATIVA_REQUIRE_GPU: found 'some'")


@pytest.mark.slow
def test_a_report_without_limits_shows_what_its_run_crossed(recorded: Project) -> None:
    rewrite(recorded, ".negativa/run/trace/h200.jsonl")
    limits = recorded.write("negativa.yaml", "thresholds: {max_gpu_code: 1}\n")
    recorded.negativa("locate", "--run", ".negativa/run", status=1)
    limits.unlink()
    recorded.negativa("report", "json:shown.json")
    assert "max_gpu_code" in (recorded.folder / "shown.json").read_text()
    # It checks limits of its own.
    other = recorded.negativa("report", "--max-gpu-code=*other*=67200", status=1)
    assert "'*other*'" in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["max_unused_percent: 100", "max_gpu_code: 1 GB"])
def test_limits_do_not_pass_where_nothing_is_counted(recorded: Project, limit: str) -> None:
    rewrite(recorded, ".negativa/run/trace/h200.jsonl")
    text = "libraries: {include: [libquikstart.so]}\n"
    recorded.write("negativa.yaml", text)
    shown = recorded.negativa("locate", "--run", ".negativa/run").stdout
    told = "/negativa.yaml:1:22: libraries.include: 'libquikstart.so' matches no library "
    assert shown.count(told) == 1
    assert "did you mean libquickstart.so?" in shown

    recorded.write("negativa.yaml", f"{text}thresholds: {{{limit}}}\n")
    for command in (("locate", "--run", ".negativa/run"), ("report",)):
        done = recorded.negativa(*command, status=1)
        assert (done.stdout + done.stderr).count(told) == done.stderr.count(told) == 1
        assert "left out by libraries.include: libquickstart.so\n" in done.stderr

    # Its trace alone does not tell how large they are.
    (recorded.folder / "quickstart" / "libquickstart.so").unlink()
    done = recorded.negativa("locate", "--run", ".negativa/run", status=1)
    assert "negativa: no library whose GPU code was used is here to look at\n" in done.stderr


def test_limits_do_not_pass_without_a_plan(recorded: Project) -> None:
    trace = rewrite(recorded, ".negativa/run/trace/h200.jsonl")
    Run(trace.parents[1].resolve()).mark("failed", "2 tests failed")
    recorded.negativa("locate", "--run", ".negativa/run", status=1)

    recorded.negativa("report", "--run", ".negativa/run")
    done = recorded.negativa("report", "--run", ".negativa/run", "--max-gpu-code=1", status=1)

    limits = "negativa: the limits can't be checked: this run has no plan\n"
    assert done.stderr == f"Next: pytest --negativa\n{limits}"


@pytest.mark.slow
def test_a_limit_of_coverage_that_a_run_does_not_have_is_an_error(
    recorded: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(recorded, ".negativa/run/trace/h200.jsonl")
    monkeypatch.chdir(recorded.folder)
    recorded.write("negativa.yaml", "coverage: {libraries: [libnone.so]}\n")
    assert CliRunner().invoke(main, ("locate", "--run", ".negativa/run")).exit_code == 0
    done = CliRunner().invoke(main, ["report", "--fail-under=*=1"])
    assert done.exit_code == 1
    assert "libquickstart.so; plan it again with negativa locate" in done.stderr


def test_a_type_of_report_that_is_misspelt(project: Project) -> None:
    for word in ("htm", "htm:a.html"):
        refused = project.negativa("report", word, status=2).stderr
        assert refused.startswith(f"negativa: error: --report: found '{word}'")
        assert "did you mean html?" in refused


def test_faults_of_the_file(project: Project) -> None:
    path = project.write("negativa.yaml", "directory: [a]\n")
    done = project.negativa("debloat", "--", "true", status=2)
    assert done.stderr.startswith(f"negativa: error: {path}:1:12: directory: ")


def test_kernels_of_a_run(recorded: Project) -> None:
    rewrite(recorded, ".negativa/run/trace/h200.jsonl")
    recorded.negativa("locate", "--run", ".negativa/run")

    unused = recorded.negativa("kernels", "--run", ".negativa/run").stdout.splitlines()
    other = recorded.negativa("kernels", "--library", "libother*", status=2)
    same = recorded.negativa("kernels", "--library", "libquick*").stdout.splitlines()

    assert unused[0].endswith("libquickstart.so: 9 of 13 kernels unused")
    assert any("image_blur" in name for name in unused)
    assert len(unused) == 10
    assert same == unused
    assert other.stdout == ""
    assert "'libother*' is none of the run's libraries: libquickstart.so (see " in other.stderr


def test_a_used_kernel_names_the_test_that_used_it_first(recorded: Project) -> None:
    """From the trace to plan, spans, report and ``negativa kernels --used``."""
    rewrite(recorded, ".negativa/run/trace/h200.jsonl")
    recorded.negativa("locate", "--run", ".negativa/run")

    expected = [[name, {"phase": "call", "nodeid": test}] for name, test in FIRST_USES.items()]
    name = "libquickstart.so.json"
    assert recorded.latest(f"plan/{name}")["used_kernels"] == expected
    assert recorded.latest(f"spans/{name}")["used_kernels"] == expected
    assert recorded.latest("report.json")["libraries"][0]["first_uses"] == expected
    [head, *lines] = recorded.negativa("kernels", "--used").stdout.splitlines()
    assert head.endswith("libquickstart.so: 4 of 13 kernels used")
    assert [line.strip() for line in lines] == [
        line
        for name, test in FIRST_USES.items()
        for line in (demangle(name), f"first used in {test} (call)")
    ]


def test_kernels_of_a_run_without_plans(project: Project) -> None:
    done = project.negativa("kernels", "--run", ".", status=1)
    assert "no plans here" in done.stderr
