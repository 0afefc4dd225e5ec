"""``pytest --negativa-verify`` as a user runs it: what is proved, and all that must not be."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from pytest_negativa.storage.schema import schema_text
from tests.support.faults import PlantedFault
from tests.support.sessions import Project
from tests.support.verified import HEAD, VerifiedProject, spawn

SUITE = r"""
if FAULT == "import":
    os.kill(os.getpid(), signal.SIGSEGV)
if FAULT == "collect":
    raise RuntimeError("no such luck")


def test_use():
    use(LIB, 0, 1)


def test_fault():
    if FAULT == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if FAULT == "exit":
        os._exit(0)
    if FAULT in ("hang", "sleep"):
        child = subprocess.Popen(["sleep", "97"])
        if FAULT == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("sleeping", flush=True)
        time.sleep(97)
    assert FAULT != "fail"


@pytest.fixture
def broken():
    assert FAULT != "fixture"


def test_fixture(broken):
    pass


def test_other():
    use(LIB, 2)


@pytest.mark.parametrize("odd", ["\u00fc\n[a::b]", "\t", "\U0001f4a5", "a -- b", "\udc80"])
def test_odd(odd):
    pass


@pytest.mark.xfail(strict=False)
def test_xfail():
    assert 0


@pytest.mark.skip(reason="always")
def test_skip():
    pass


if FAULT == "missing":
    del test_skip
"""
TESTS = 11
PROVED = "PROVED: 60.2 kB of 67.2 kB GPU code in 1 library is not needed by 11 tests on Stand-in"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> VerifiedProject:
    """A traced run that tests only verify, in a folder with a space."""
    return VerifiedProject(tmp_path_factory.mktemp("a b") / "project", SUITE).trace()


@pytest.mark.parametrize(
    "how",
    [
        ("-m", "pytest", "-q", "--negativa-verify"),
        ("-m", "pytest", "-q", "--negativa-verify", "-n2"),
        pytest.param(
            ("-m", "pytest", "--negativa-verify", "-s", "-x", "-p", "no:logging"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "workers", "options"],
)
def test_a_sound_plan_is_proved(traced: VerifiedProject, how: tuple[str, ...]) -> None:
    done = traced.run(sys.executable, *how)
    assert PROVED in done.stdout
    verdict = traced.verdict
    jsonschema.validate(verdict, json.loads(schema_text("verdict")))
    assert verdict["proved"] and verdict["reasons"] == [] and len(verdict["tests"]) == TESTS
    [library] = verdict["libraries"]
    assert library["status"] == "proved" and library["processes"] == (2 if "-n2" in how else 1)
    assert {t["after"] for t in verdict["tests"]} == {"passed", "xfailed", "skipped"}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["addopts", "ini"])
def test_it_is_asked_for_elsewhere_than_on_the_command_line(
    traced: VerifiedProject, source: str
) -> None:
    addopts = traced.environ["PYTEST_ADDOPTS"]
    arguments = ["-q"]
    if source == "addopts":
        addopts += " --negativa-verify"
    else:
        traced.write("other.ini", "[pytest]\naddopts = --negativa-verify\n")
        arguments += ["-c", "other.ini", f"--rootdir={traced.folder}"]
    done = traced.pytest(*arguments, PYTEST_ADDOPTS=addopts)
    assert PROVED in done.stdout


@pytest.mark.parametrize("option", ["--co", "--help", "--fixtures"])
def test_nothing_is_verified_where_no_test_runs(traced: VerifiedProject, option: str) -> None:
    before = len(list((traced.run_folder / "verify").glob("*")))
    assert "PROVED" not in traced.verify(option)
    assert len(list((traced.run_folder / "verify").glob("*"))) == before


@pytest.mark.nightly
def test_modules_named_like_others_do_no_harm(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", "def test_a():\n    use(LIB)\n").trace()
    for name in ("json.py", "signal.py", "plan.py", "msgspec.py", "pytest_negativa.py"):
        project.write(name, "raise ImportError('not me')\n")
    # The command, not "python -m", which would put this folder first for pytest itself.
    command = Path(sys.executable).with_name("pytest")
    assert "\nPROVED" in project.run(command, "-q", "--negativa-verify").stdout
    assert "\nPROVED" in project.run(command, "-q", "--negativa-verify", PYTHONSAFEPATH="1").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers",
    [pytest.param((), id="alone"), pytest.param(("-n2",), id="workers", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("fail", ("test_fault", "passed", "failed")),
        ("segv", ("test_fault", "passed", "crashed")),
    ],
)
def test_an_outcome_that_differs(
    traced: VerifiedProject, fault: str, expected: tuple[str, str, str], workers: tuple[str, ...]
) -> None:
    shown = traced.verify(*workers, "--negativa-rerun=0", status=1, FAULT=fault)
    name, before, after = expected
    assert traced.differing() == {name: (before, after)}
    assert f"test_a.py::{name}: {before} -> {after}" in shown
    assert traced.verdict["reasons"] == ["1 test ended with another outcome than in the traced run"]
    assert traced.statuses() == {
        "lib.so": ("not proved", "the tests don't agree with the traced run")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("fixture", ("test_fixture", "passed", "error")),
        ("exit", ("test_fault", "passed", "crashed")),
        ("missing", ("test_skip", "skipped", None)),
    ],
)
def test_every_kind_of_difference(
    traced: VerifiedProject, fault: str, expected: tuple[str, str | None, str | None]
) -> None:
    traced.verify("--negativa-rerun=0", status=1, FAULT=fault)
    name, before, after = expected
    assert traced.differing() == {name: (before, after)}
    # The tests behind a crash ran, in a process of their own.
    assert len(traced.verdict["rounds"]) == (2 if fault == "exit" else 1)


@pytest.mark.nightly
def test_a_test_that_hangs(traced: VerifiedProject) -> None:
    traced.verify("--negativa-verify-timeout=30", status=1, FAULT="hang")
    assert traced.differing() == {"test_fault": ("passed", "timed out")}
    rounds = [r for r in traced.verdict["rounds"] if r["kind"] == "verify"]
    assert [r["silent"] for r in rounds] == [True, False]
    assert traced.processes() == []


def test_a_crash_at_import(traced: VerifiedProject) -> None:
    shown = traced.verify(status=1, FAULT="import")
    assert "the session ended before its first test (signal 11)" in shown
    assert set(traced.differing().values()) == {
        ("passed", None),
        ("xfailed", None),
        ("skipped", None),
    }
    assert len(traced.verdict["rounds"]) == 1, "what dies before its first test dies again"
    assert traced.statuses() == {"lib.so": ("not substituted", "no process loaded its copy")}


def test_an_error_in_collection(traced: VerifiedProject) -> None:
    shown = traced.verify(status=1, FAULT="collect")
    assert "not collected: test_a.py: RuntimeError: no such luck" in shown


def test_a_selection_other_than_the_traced_one(traced: VerifiedProject) -> None:
    shown = traced.verify("-k", "use or other", status=1)
    assert f"{TESTS - 2} tests of the traced run did not run" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "group", "workers"),
    [
        (signal.SIGINT, True, ()),
        pytest.param(signal.SIGINT, False, (), marks=pytest.mark.slow),
        (signal.SIGTERM, False, ()),
        pytest.param(signal.SIGTERM, False, ("-n2",), marks=pytest.mark.slow),
    ],
)
def test_an_interruption_ends_everything(
    traced: VerifiedProject, number: signal.Signals, group: bool, workers: tuple[str, ...]
) -> None:
    (traced.run_folder / "verdict.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--negativa-verify", "-s", *workers]
    session = spawn(traced, *command, FAULT="sleep")
    try:
        wait_for(lambda: traced.processes(b"sleep\x0097"))
        (os.killpg if group else os.kill)(session.pid, number)
        shown, _ = session.communicate(timeout=120)
    finally:
        if session.poll() is None:
            os.killpg(session.pid, signal.SIGKILL)
    assert session.returncode == 128 + number
    assert f"negativa: error: interrupted ({number.name}): nothing is proved" in shown
    assert "PROVED" not in shown and not (traced.run_folder / "verdict.json").exists()
    assert traced.processes() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_while_the_supervisor_starts(
    traced: VerifiedProject, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nif 'NEGATIVA_SUPERVISE' in os.environ:\n    os.kill(os.getpid(), {number:d})\n"
    )
    path = f"{tmp_path}{os.pathsep}{traced.environ['PYTHONPATH']}"
    done = traced.pytest("--negativa-verify", status=128 + number, PYTHONPATH=path)
    assert done.stderr == f"negativa: error: interrupted ({number.name}): nothing is proved\n"
    assert not done.stdout


@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_session(traced: VerifiedProject) -> None:
    session = spawn(traced, sys.executable, "-m", "pytest", "--negativa-verify", FAULT="sleep")
    try:
        wait_for(lambda: traced.processes(b"sleep\x0097"))
        session.kill()
        session.wait()
        # What the test had started has no parent any more that could end it.
        wait_for(lambda: not traced.processes(b"pytest"))
    finally:
        os.killpg(session.pid, signal.SIGKILL)
        session.communicate()


def wait_for(condition: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.nightly
def test_the_debugger_has_the_terminal_and_all_time(traced: VerifiedProject) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(traced.folder)
        words = ["-m", "pytest", "-q", "--negativa-verify", "--pdb", "--negativa-verify-timeout=30"]
        environ = {**traced.environ, "FAULT": "fail"}
        os.execve(sys.executable, [sys.executable, *words], environ)
    shown, asked, end = b"", False, time.monotonic() + 240
    try:
        while time.monotonic() < end:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    shown += os.read(terminal, 4096)
                except OSError:
                    break
            if b"(Pdb)" in shown and not asked:
                time.sleep(32)
                os.write(terminal, b"p 40 + 2\nc\n")
                asked = True
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert b"\r\n42\r\n" in shown
    assert b"test_a.py::test_fault: passed -> failed" in shown and b"timed out" not in shown
    assert os.waitstatus_to_exitcode(status) == 1


LOSES = """
import os, pytest_negativa.session.round_hooks as hooks

hooks.lost_context = lambda: (
    "CUDA_ERROR_ILLEGAL_ADDRESS" if os.path.exists(f"lost.{os.getpid()}") else None
)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers",
    [
        pytest.param((), id="alone"),
        pytest.param(("-n2", "--dist=loadfile"), id="workers", marks=pytest.mark.slow),
    ],
)
def test_after_a_lost_context_tests_run_in_a_fresh_process(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        """
def test_use():
    use(LIB)

def test_loses():
    if ROUND == "verify":
        Path(f"lost.{os.getpid()}").touch()
        assert 0

def test_after():
    assert not Path(f"lost.{os.getpid()}").exists()
""",
    )
    project.write("loses.py", LOSES)
    project.environ["PYTHONPATH"] += f"{os.pathsep}{project.folder}"
    project.environ["PYTEST_ADDOPTS"] += " -p loses"
    project.trace()
    shown = project.verify(*workers, status=1)
    assert project.differing() == {"test_loses": ("passed", "failed")}
    assert "left the CUDA context with CUDA_ERROR_ILLEGAL_ADDRESS" in shown
    assert len(project.verdict["rounds"]) == 2


@pytest.mark.nightly
def test_flaky_tests_are_named_not_blamed(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        """
def test_use():
    use(LIB)

def test_flaky():
    count = Path("count")
    with count.open("a") as file:
        file.write("x")
    assert count.stat().st_size % 2
""",
    ).trace()
    # The 2nd fails. On the originals the 3rd passes, and the 4th fails.
    shown = project.verify(status=1)
    assert project.verdict["proved"]
    assert [t["nodeid"] for t in project.verdict["tests"] if t["flaky"]] == [
        "test_a.py::test_flaky"
    ]
    assert "Flaky (the originals alone gave both outcomes):" in shown
    project.verify("--negativa-rerun=0")  # The 5th passes.
    assert project.verdict["proved"]
    project.verify("--negativa-rerun=0", status=1)  # The 6th fails.
    assert not project.verdict["proved"]
    project.verify()  # The 7th passes.
    assert project.verdict["proved"]


# ---- What must not be proved ----


@pytest.mark.slow
def test_an_original_opened_behind_the_redirect(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        """
import ctypes

def test_use():
    use(LIB)

def test_behind():
    if ROUND == "verify":
        # glibc shows no auditor a path that is opened into another namespace (LM_ID_NEWLM, -1).
        dlmopen = ctypes.CDLL(None).dlmopen
        dlmopen.restype = ctypes.c_void_p
        assert dlmopen(ctypes.c_long(-1), os.fsencode(LIB), os.RTLD_NOW)
""",
    ).trace()
    shown = project.verify(status=1)
    status, detail = project.statuses()["lib.so"]
    assert status == "not proved" and detail is not None
    assert f"opened the original, as {project.folder}/lib.so" in detail and detail in shown
    assert project.differing() == {} and "1 library could not be proved: each row says why" in shown


@pytest.mark.slow
def test_a_library_opened_by_its_descriptor_is_replaced_too(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        """
import ctypes

def test_behind():
    ctypes.CDLL(f"/proc/self/fd/{os.open(LIB, os.O_RDONLY)}")
    mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/lib.so" in line}
    copy = f"{LIB.parent}/.negativa/reconstructed{LIB.resolve()}"
    assert mapped == {copy if ROUND == "verify" else str(LIB.resolve())}
    use(LIB)
""",
    ).trace()
    # Its first open is of the original.
    assert "\nPROVED" in project.verify("--negativa-opened-originals=*")


@pytest.mark.slow
def test_a_library_that_was_not_loaded_is_not_proved(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        """
def test_use():
    use(LIB)

def test_second():
    if ROUND != "verify":
        use(LIB.with_name("second.so"))
""",
        "lib.so",
        "second.so",
    ).trace()
    project.verify("--negativa-rerun=0", status=1)
    assert project.statuses() == {
        # The cause may lie in any library.
        "lib.so": ("not proved", "the tests don't agree with the traced run"),
        "second.so": ("not substituted", "no process loaded its copy"),
    }


@pytest.mark.slow
def test_without_gpu_use_nothing_is_proved(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        "def test_use():\n    use(LIB) if ROUND != 'verify' else load(LIB)\n",
    ).trace()
    assert "no test was seen to use the GPU" in project.verify(status=1)


@pytest.mark.slow
def test_another_device_is_another_matter(traced: VerifiedProject) -> None:
    shown = traced.verify(status=1, STANDIN_DEVICE="8.0")
    assert "it ran on compute capability 8.0, the plan is for 9.0" in shown


@pytest.mark.slow
def test_a_library_that_changed_is_refused(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project", "def test_use():\n    load(LIB)\n    use(LIB)\n"
    )
    project.trace()
    library = project.folder / "lib.so"
    data = bytearray(library.read_bytes())
    data[-1] ^= 1
    library.write_bytes(data)
    shown = project.verify(status=1)
    status, detail = project.statuses()["lib.so"]
    assert status == "not proved" and "changed since it was traced: sha256" in (detail or "")
    assert "changed since it was traced" in shown


@pytest.mark.slow
def test_without_the_native_library_it_is_said(traced: VerifiedProject, tmp_path: Path) -> None:
    """As on a machine that had no compiler."""
    import pytest_negativa

    package = Path(pytest_negativa.__file__).parent
    ignored = shutil.ignore_patterns("_redirect.so", "__pycache__")
    shutil.copytree(package, tmp_path / "pytest_negativa", ignore=ignored)
    path = f"{tmp_path}{os.pathsep}{traced.environ['PYTHONPATH']}"
    shown = traced.verify(status=1, PYTHONPATH=path)
    assert "the native library was not built" in shown and "\nPROVED" not in shown


# ---- What can't be verified ----


def test_without_a_traced_run(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", "def test_a():\n    pass\n")
    assert "negativa: error:" in project.verify(status=4)
    assert "no traced run here" in project.verify(status=4)


def test_a_replayed_run_proves_nothing(project: Project) -> None:
    project.write("test_a.py", "def test_a():\n    pass\n")
    project.pytest("-q", "--negativa")
    done = project.pytest("-q", "--negativa-verify", status=1)
    assert "replays a trace of another machine, which proves nothing" in done.stderr


@pytest.mark.nightly
@pytest.mark.planted_fault(
    "A session stops at a failed test, and what the other tests need looks unused.",
    says="nothing is planned from this run: it was stopped: stopping after 1 failures",
)
def test_a_session_that_was_stopped_is_not_verified(tmp_path: Path, fault: PlantedFault) -> None:
    suite = "def test_a():\n    use(LIB)\n    assert 0\ndef test_b():\n    use(LIB, 1)\n"
    project = VerifiedProject(tmp_path / "project", suite)
    project.pytest("-q", "--negativa", "-x", status=1)
    fault.check(project.verify("-x", status=1))
    shown = project.pytest("-q", "--negativa", "--negativa-verify", "-x", status=1).stdout
    assert "the traced run has no plan" in shown
    # A failed test is compared like any other.
    project.pytest("-q", "--negativa", status=1)
    project.verify(status=1)
    assert project.verdict["proved"] and project.verdict["exit_status"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "detail"),
    [
        ("tests.jsonl", None, "no tests.jsonl, so nothing says how this run ended"),
        ("tests.jsonl", "x\n{}\n", "tests.jsonl:1: not a record of test outcomes"),
        ("map/lib.so.json", "[]", "map/lib.so.json: not a library map"),
    ],
)
def test_a_damaged_run(traced: VerifiedProject, name: str, text: str | None, detail: str) -> None:
    path = traced.run_folder / name
    sound = path.read_bytes()
    try:
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        done = traced.pytest("-q", "--negativa-verify", status=1)
    finally:
        path.write_bytes(sound)
    [line] = done.stderr.splitlines()
    assert line.startswith("negativa: error: ") and detail in line
    assert "passed" not in done.stdout, "no test runs for nothing"


@pytest.mark.nightly
def test_a_session_within_a_session_is_not_verified(tmp_path: Path) -> None:
    """A test starts pytest in a project whose addopts ask for verification."""
    project = VerifiedProject(
        tmp_path / "project",
        """
def test_nested():
    use(LIB)
    if ROUND:
        command = [sys.executable, "-m", "pytest", "-q", "-c", "addopts.ini", "inner.py"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and "PROVED" not in done.stdout, done.stdout + done.stderr
""",
    )
    project.write("addopts.ini", "[pytest]\naddopts = --negativa-verify\n")
    project.write("inner.py", "def test_inner():\n    pass\n")
    project.trace()
    assert "\nPROVED" in project.verify()


# ---- Commands ----


@pytest.mark.slow
def test_a_trace_and_its_verification_in_one(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", "def test_a():\n    use(LIB)\n")
    shown = project.pytest("-q", "--negativa", "--negativa-verify").stdout
    assert "is unused on Stand-in" in shown and "\nPROVED: 60.2 kB" in shown


def test_reconstruct(traced: VerifiedProject) -> None:
    root = traced.results / "reconstructed"
    copy = Path(f"{root}{traced.folder.resolve()}/lib.so")
    shutil.rmtree(root, ignore_errors=True)
    assert "lib.so: written, 60.2 kB overwritten" in traced.negativa("reconstruct").stdout
    assert "lib.so: unchanged, 60.2 kB overwritten" in traced.negativa("reconstruct").stdout
    original = (traced.folder / "lib.so").read_bytes()
    found = copy.read_bytes()
    assert len(found) == len(original) and found != original
    done = traced.negativa("reconstruct", "--run", traced.folder, status=1)
    assert "no plans here" in done.stderr


PROGRAM = """
import sys
from standin_gpu import need, trace_program, use

detector = trace_program()
use("lib.so")
for start in sys.argv[1:]:
    need("lib.so", int(start))
detector.stop()
sys.exit(7)
"""


@pytest.mark.slow
def test_commands_verify_and_heal_a_program(tmp_path: Path) -> None:
    """Its exit status is all that counts, whatever it is."""
    project = VerifiedProject(tmp_path / "project", "")
    project.write("program.py", PROGRAM)
    command = (sys.executable, "program.py", "72856")
    project.negativa("debloat", "--", *command, status=7)
    failed = project.negativa("verify", status=1).stdout
    assert "program.py 72856: passed -> failed\n    exit status 1, 7 when traced" in failed
    assert "NOT PROVED" in failed

    healed = project.negativa("verify", "--heal", status=7, COLUMNS="80").stdout
    _, proved, conclusion = healed.rpartition("\nPROVED: 55.6 kB")
    assert proved and max(map(len, f"{proved}{conclusion}".split("\n"))) <= 80
    assert "lib.so [0x11c98, 0x125d8): touched on the copies by a process" in healed
    again = project.negativa("verify", "--report=markdown:v.md", status=7).stdout
    # Wrong usage ends a command with 2, also if it shows in the end.
    wrong = project.negativa("verify", "--report=json:nowhere://x/y", status=2)
    assert "PROVED" in wrong.stdout and "Protocol not known: nowhere" in wrong.stderr
    assert "\nPROVED: 55.6 kB" in again
    # The rows are of the healed plan.
    markdown = (project.folder / "v.md").read_text()
    assert "\n55.6 kB of " in markdown and "\nProved: the tests end as before without" in markdown
    other = project.negativa("verify", "--", "true", status=1).stdout
    assert "1 test ran that the traced run doesn't have" in other


@pytest.mark.slow
def test_a_program_that_failed_when_traced(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", "")
    project.write("program.py", PROGRAM)
    project.negativa("debloat", "--", sys.executable, "program.py", status=7)
    assert "\nPROVED: 60.2 kB" in project.negativa("verify", status=7).stdout
    project.write(
        "program.py", PROGRAM.replace("sys.exit(7)", "import os; os.kill(os.getpid(), 9)")
    )
    project.negativa("debloat", "--", sys.executable, "program.py", status=137)
    failed = project.negativa("verify", status=1).stderr
    told = "nothing is planned from this run: the command ended with exit status 137; trace again"
    assert told in failed


@pytest.mark.slow
def test_a_run_that_was_combined(traced: VerifiedProject, tmp_path: Path) -> None:
    """As one that was combined of several."""
    project = VerifiedProject(tmp_path / "project", "")
    project.negativa("combine", traced.run_folder)
    error = project.negativa("verify", status=1).stderr
    assert f"{project.run_folder}: no tests.jsonl, so nothing says how this run ended" in error


@pytest.mark.parametrize("verb", ["verify", "heal"])
def test_the_command_refuses_what_pytest_traced(traced: VerifiedProject, verb: str) -> None:
    """A plain program has one outcome, the traced session one for each test."""
    run = traced.run_folder
    before = len(list((traced.run_folder / "verify").glob("*")))
    for words in ((), ("--", sys.executable, "-m", "pytest", "-q")):
        heals = ("--heal",) if verb == "heal" else ()
        done = traced.negativa("verify", *heals, *words, status=2)
        assert done.stdout == ""
        assert done.stderr.endswith(
            f"negativa: error: {run} was traced by pytest; {verb} it with pytest "
            f"--negativa-{verb} --negativa-run '{run}'\n"
        )
    assert len(list((traced.run_folder / "verify").glob("*"))) == before


TRACED_CONFTEST = """
from standin_gpu import trace_program

def pytest_configure(config):
    config.detector = trace_program()

def pytest_unconfigure(config):
    config.detector.stop()
"""


@pytest.mark.nightly
def test_pytest_as_a_plain_program(tmp_path: Path) -> None:
    """Its tests are its own matter: the session takes no part in the round."""
    project = VerifiedProject(
        tmp_path / "project",
        """
def test_use(request):
    use(LIB)
    names = ("negativa-traced-process", "negativa-outcomes", "negativa-round")
    assert not any(map(request.config.pluginmanager.has_plugin, names))

def test_fault():
    assert FAULT != "fail"
""",
    )
    project.write("conftest.py", TRACED_CONFTEST)
    project.negativa("debloat", "--", sys.executable, "-m", "pytest", "-q")
    assert "\nPROVED: 60.2 kB" in project.negativa("verify").stdout
    [test] = project.verdict["tests"]
    assert test["nodeid"].endswith("-m pytest -q") and test["after"] == "passed"
    failed = project.negativa("verify", status=1, FAULT="fail").stdout
    assert "exit status 1, 0 when traced" in failed and "NOT PROVED" in failed


@pytest.fixture
def cached(tmp_path: Path) -> VerifiedProject:
    """A project with pytest's cache, one of whose tests failed in the last session."""
    suite = """
def test_use():
    use(LIB)

def test_fails_once():
    use(LIB, 0)
    assert "BREAK" not in os.environ
"""
    project = VerifiedProject(tmp_path / "project", suite)
    project.write("test_b.py", HEAD + "use(LIB, 3)\ndef test_other():\n    pass\n")
    project.write(
        "conftest.py",
        "def pytest_runtest_setup(item):\n    print(item.name, file=open('order.txt', 'a'))\n",
    )
    project.environ["PYTEST_ADDOPTS"] = "-p no:hypothesispytest -p no:randomly -p standin_gpu"
    project.pytest("-q", "--sw", status=2, BREAK="1")
    (project.folder / "order.txt").unlink()
    return project


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--lf", "--lf -n2", "--ff", "--sw"])
@pytest.mark.parametrize("source", ["flag", pytest.param("addopts", marks=pytest.mark.nightly)])
def test_tests_that_are_selected_by_the_last_session(
    cached: VerifiedProject, option: str, source: str
) -> None:
    """The traced session changes what the next one would select, so no round selects tests so."""
    words = option.split()
    if source == "addopts":
        cached.write("pytest.ini", f"[pytest]\naddopts = {option}\n")
        words = []
    done = cached.pytest("-q", "--negativa", "--negativa-verify", *words)
    assert "\nPROVED" in done.stdout
    assert len(cached.verdict["tests"]) == 3
    order = (cached.folder / "order.txt").read_text().splitlines()
    assert len(order) == 6 and ("-n2" in option or order[:3] == order[3:])


@pytest.mark.slow
def test_last_failed_of_a_run_that_was_traced_before(cached: VerifiedProject) -> None:
    """A proof is of all tests of the traced run."""
    cached.trace()
    cached.pytest("-q", status=1, BREAK="1")
    assert "\nPROVED" in cached.verify("--lf")
    assert len(cached.verdict["tests"]) == 3


NUMBERS = """
import os, pytest, sys

class Numbers:
    @pytest.fixture
    def number(self):
        return 3
"""


@pytest.mark.slow
def test_a_conftest_that_runs_the_tests_itself(tmp_path: Path) -> None:
    suite = "def test_use(number):\n    use(LIB)\n    assert number == 3\n"
    project = VerifiedProject(tmp_path / "project", suite)
    project.write(
        "conftest.py",
        f"""{NUMBERS}
def pytest_cmdline_main(config):
    if os.environ.pop("OUTER", None):
        return pytest.main(list(config.invocation_params.args), plugins=[Numbers()])
""",
    )
    done = project.pytest("-q", "--negativa", "--negativa-verify", status=1, OUTER="1")
    assert done.stdout.count("1 passed") == 2 and "failed" not in done.stdout
    told = "tests that a conftest.py runs by pytest.main can't be seen"
    assert f"- the session ended before its first test (status 0; {told})" in done.stdout


@pytest.mark.slow
def test_what_a_program_set_up_for_pytest_is_not_left_out(tmp_path: Path) -> None:
    suite = "def test_use(number):\n    use(LIB)\n    assert number == 3\n"
    project = VerifiedProject(tmp_path / "project", suite)
    project.write(
        "run.py",
        f"{NUMBERS}\nsys.exit(pytest.main(['-q', *sys.argv[1:]], plugins=[Numbers()]))\n",
    )
    assert "1 passed" in project.run(sys.executable, "run.py", "--negativa").stdout
    done = project.run(sys.executable, "run.py", "--negativa", "--negativa-verify", status=4)
    [line] = filter(None, done.stderr.splitlines())
    assert line.startswith("ERROR: negativa: a program called pytest.main, and a proof starts")
    assert done.stdout == ""
