"""What follows if a process opens an original while the tests run on the copies."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_negativa.processes.file_users import FileUser, users_of
from pytest_negativa.processes.open_watch import CopyWatch, Opens, OpenWatch
from pytest_negativa.processes.redirect import (
    REDIRECT,
    redirect_environment,
    write_table,
)
from pytest_negativa.verifying.used_originals import NamedUses, held_originals, opened_originals
from tests.support.compiling import compile_c, compile_shared, needs_compiler
from tests.support.faults import PlantedFault
from tests.support.libraries import IS_ROOT, ROOT
from tests.support.sites import make_wheel, pip_install
from tests.support.verified import VerifiedProject

CHILD = """
import ctypes

CODE = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"

def test_use():
    use(LIB)

def test_child():
    child = [sys.executable, "-c", CODE, str(LIB)]
    if FAULT == "dladdr":
        # l_name of struct link_map, which dladdr tells, too.
        child[-1] = ctypes.c_char_p.from_address(ctypes.CDLL(str(LIB))._handle + 8).value.decode()
        subprocess.check_output(child, env={})
    elif FAULT == "maps":
        ctypes.CDLL(str(LIB))
        lines = Path("/proc/self/maps").read_text().splitlines()
        child[-1] = next(line.split()[-1] for line in lines if line.endswith("lib.so"))
        child[2] += "; sys.stdout.flush(); import os; os.close(1); sys.stdin.read()"
        outlives = subprocess.Popen(
            child, env={}, stdin=os.open("pipe", os.O_RDONLY), stdout=subprocess.PIPE
        )
        assert b".negativa/" in outlives.stdout.read()
    elif FAULT in ("relative", "grandchild"):
        # The shell ignores how its child ends.
        clean = "env -i" if FAULT == "grandchild" else ""
        script = f'cd "$1"; {clean} "$0" -c "$2" ./lib.so; true'
        words = ["sh", "-c", script, sys.executable, str(LIB.parent), CODE]
        assert (".negativa/" in subprocess.check_output(words, text=True)) == (not clean)
    elif FAULT == "environment":
        assert f" {LIB.resolve()}\\n" in subprocess.check_output(child, text=True, env={})
    else:
        assert ".negativa/" in subprocess.check_output(child, text=True) or ROUND != "verify"
    if FAULT == "read":
        LIB.read_bytes()
"""


def test_each_round_counts_and_the_first_finding_is_told() -> None:
    unseen = Opens(unseen={"/a.so": "no descriptors", "/b.so": "no descriptors"})
    user = FileUser("process 7 (/bin/x)", 1.0)
    opened = Opens(times={"/a.so": 1, "/c.so": 2}, openers={"/c.so": (user,)})
    found, _ = opened_originals([opened, unseen])
    assert found.keys() == {"/a.so", "/b.so", "/c.so"}
    assert "opened the original 1 time while" in found["/a.so"]
    assert "its opener is unknown" in found["/a.so"]
    assert "nothing tells whether" in found["/b.so"] and "no descriptors" in found["/b.so"]
    assert "2 times" in found["/c.so"]
    assert "process 7 (/bin/x) had it open or mapped then" in found["/c.so"]
    assert all("in verify.opened_originals" in text for text in found.values())
    assert opened_originals([Opens()]) == ({}, {})


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> VerifiedProject:
    return VerifiedProject(tmp_path_factory.mktemp("opened") / "project", CHILD).trace()


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test starts a child process with an emptied environment, which runs on the original.",
    says="a process opened the original 1 time while the tests ran on the copies",
)
def test_a_child_with_an_emptied_environment(traced: VerifiedProject, fault: PlantedFault) -> None:
    fault.check(traced.verify(status=1, FAULT="environment"))
    status, detail = traced.statuses()["lib.so"]
    assert status == "not proved" and "pass the environment on" in str(detail)
    assert traced.differing() == {}


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A grandchild with an emptied environment loads a library by a path relative to its folder.",
    says="a process opened the original 1 time while the tests ran on the copies",
)
def test_a_grandchild_with_a_relative_path(traced: VerifiedProject, fault: PlantedFault) -> None:
    fault.check(traced.verify(status=1, FAULT="grandchild"))
    assert "\nPROVED" in traced.verify(FAULT="relative")


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A child with an emptied environment loads the path that dladdr told its parent.",
    says="a process opened the original 1 time while the tests ran on the copies",
)
def test_a_child_that_loads_what_dladdr_told(traced: VerifiedProject, fault: PlantedFault) -> None:
    fault.check(traced.verify(status=1, FAULT="dladdr"))


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A child with an emptied environment loads the copy, whose path is in /proc/self/maps of its "
    "parent.",
    says=") used the copy without the redirect, so what it needed was not seen",
)
def test_a_child_that_loads_the_copy_by_its_path(
    traced: VerifiedProject, fault: PlantedFault
) -> None:
    with pipes_of(traced, "pipe"):
        fault.check(traced.verify(status=1, FAULT="maps"))
    assert traced.statuses()["lib.so"][0] == "not proved"


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test reads an original by itself, as cuModuleLoad of a path does.",
    says="a process opened the original 1 time while the tests ran on the copies (",
)
def test_a_test_that_reads_the_original(traced: VerifiedProject, fault: PlantedFault) -> None:
    fault.check(traced.verify(status=1, FAULT="read"))


@pytest.mark.slow
def test_a_library_that_the_settings_name_may_be_read(traced: VerifiedProject) -> None:
    """A test of a package's files reads them."""
    traced.write("negativa.yaml", "verify: {opened_originals: /elsewhere/lib.so}\n")
    traced.verify(status=1, FAULT="read")
    traced.write("negativa.yaml", "verify: {opened_originals: project/lib.so}\n")
    shown = traced.verify(FAULT="read")
    (traced.folder / "negativa.yaml").unlink()
    assert "\nPROVED" in shown and "lib.so: a process opened the original 1 time" in shown
    [row] = traced.verdict["libraries"]
    assert row["status"] == "proved" and "opened the original" in row["notes"][-1]


NOTEBOOK = "import mmap, sys; file = open(sys.argv[1]); "
NOTEBOOK += "kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); file.close(); "
NOTEBOOK += "print(flush=True); sys.stdin.read()"


@contextlib.contextmanager
def using(path: Path, name: str) -> Iterator[None]:
    """A process that has a file mapped, and this name at the end of its command line."""
    with subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK, str(path), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield
        process.stdin.close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.mark.slow
def test_a_notebook_that_the_settings_name(traced: VerifiedProject) -> None:
    """It began after the traced run, and speaks against nothing."""
    with using(traced.folder / "lib.so", "notebook"):
        shown = traced.verify("--negativa-opened-originals=command:* notebook")
    assert "\nPROVED" in shown
    assert "had the original open or mapped before the tests ran on the copies" in shown


def test_each_opener_is_named_or_none_is(tmp_path: Path) -> None:
    original, other = tmp_path / "a.so", tmp_path / "b.so"
    for path in original, other:
        path.write_bytes(b"a" * 5000)
    named = NamedUses(["command:* notebook"])
    watching = OpenWatch([str(original), str(other)])
    with using(other, "notebook"), watching as watch, using(original, "notebook"):
        wait_for(lambda: watch.opens.openers)
        before = opened_originals([watch.opens], named=named)
        # It used this one before, so nobody tells that it is the one that opened it again.
        other.read_bytes()
        with using(original, "else"):
            wait_for(lambda: len(watch.opens.openers[str(original)]) == 2)
    against, noted = before
    assert not against and "opened the original 1 time" in noted[str(original)]
    against, noted = opened_originals([watch.opens], named=named)
    assert against.keys() == {str(original), str(other)} and not noted
    assert "its opener is unknown" in against[str(other)]


@pytest.mark.slow
def test_our_own_work_opens_no_original(traced: VerifiedProject) -> None:
    """Nor does a child that inherits the environment."""
    assert "\nPROVED" in traced.verify()
    assert traced.verdict["libraries"][0]["notes"] == []
    assert Path(traced.verdict["libraries"][0]["path"]).is_file()


def test_older_processes_that_had_an_original_are_told_from_younger_ones() -> None:
    held = [("/a.so", FileUser("process 7 (/bin/x)", 100.0))]
    younger, older = held_originals(held, since=99.0)
    assert younger.keys() == {"/a.so"} and not older
    # A process that began in the same second may have begun later.
    assert held_originals(held, since=100.9)[0].keys() == {"/a.so"}
    younger, older = held_originals(held, since=200.0, twins={"/a.so": "/b.so"})
    assert not younger and older["/b.so"].startswith("process 7 (/bin/x) had the original open")


SERVERS = {
    "TCP": "server = socket.create_server(('', 0))",
    "IPv6": "server = socket.create_server(('::1', 0), family=socket.AF_INET6)",
    "Unix": "server = socket.socket(socket.AF_UNIX); server.bind('socket'); server.listen()",
    "abstract": "server = socket.socket(socket.AF_UNIX); server.bind('\\0'); server.listen()",
}


@pytest.mark.planted_fault(
    "A server of an earlier session, which tests talk to by TCP or at a Unix socket, has an "
    "original.",
    says="had the original open or mapped before the tests ran on the copies, and listens",
)
@pytest.mark.parametrize("how", SERVERS)
def test_an_older_server(tmp_path: Path, fault: PlantedFault, how: str) -> None:
    if how == "IPv6" and not Path("/proc/net/tcp6").exists():
        pytest.skip("the system has no IPv6")
    original = tmp_path / "a.so"
    original.touch()
    code = f"import socket, sys; file = open(sys.argv[1]); {SERVERS[how]}; "
    code += "print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(original)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline() == b"\n"
        fatal, _ = held_originals(users_of([str(original)]), since=time.time() + 60)
        server.stdin.close()
    fault.check(fatal[str(original)])


def test_a_client_is_no_server(tmp_path: Path) -> None:
    original = tmp_path / "a.so"
    original.touch()
    code = "import socket, sys; file = open(sys.argv[1]); pair = socket.socketpair(); "
    code += "print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(original)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        assert client.stdin is not None and client.stdout is not None
        assert client.stdout.readline() == b"\n"
        [(_, user)] = users_of([str(original)])
        client.stdin.close()
    assert not user.listens


def test_a_process_without_the_redirect_is_seen_while_it_uses_a_copy(tmp_path: Path) -> None:
    copy = tmp_path / "a.so"
    copy.write_bytes(b"a" * 5000)
    auditor = REDIRECT
    assert auditor is not None
    command = [sys.executable, "-c", NOTEBOOK, str(copy)]
    table, logs = tmp_path / "table", tmp_path / "logs"
    logs.mkdir()
    # Without a table, the auditor is unloaded at once.
    write_table(table, tmp_path / "copies", ())
    with CopyWatch([str(copy)], str(auditor)) as watch:
        for environ in redirect_environment({}, table, logs), {}:
            with subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as process:
                assert process.stdin is not None and process.stdout is not None
                assert process.stdout.readline() == b"\n"
                deadline = time.monotonic() + 60
                while not (environ or watch.opens.strangers) and time.monotonic() < deadline:
                    time.sleep(0.01)
                process.stdin.close()
    [(path, [user])] = watch.opens.strangers.items()
    assert path == str(copy) and user.who.startswith(f"process {process.pid} (")
    found, _ = opened_originals([watch.opens], copies={str(copy): "/a.so"})
    assert "used the copy without the redirect" in found["/a.so"]


@contextlib.contextmanager
def pipes_of(project: VerifiedProject, *names: str) -> Iterator[None]:
    """Pipes to a service that outlives the session; it ends with them."""
    with contextlib.ExitStack() as stack:
        for name in names:
            os.mkfifo(project.folder / name)
            stack.enter_context(os.fdopen(os.open(project.folder / name, os.O_RDWR)))
        yield


DAEMON = """
def test_use():
    use(LIB, 0)

def test_service(tmp_path):
    if not ROUND:
        code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(flush=True); sys.stdin.read()"
        pipe = os.open("pipe", os.O_RDONLY)
        daemon = subprocess.Popen(
            [sys.executable, "-c", code, str(LIB)],
            env={}, stdin=pipe, stdout=subprocess.PIPE, start_new_session=True,
        )
        assert daemon.stdout.readline() == b"\\n"
"""


@pytest.mark.nightly
@pytest.mark.planted_fault(
    "A test starts a service that outlives the session, with an emptied environment. The proof "
    "talks to that service, which has the original.",
    says="had the original open or mapped before the tests ran on the copies, and began after the "
    "traced run",
)
def test_a_service_that_the_traced_run_started(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", DAEMON)
    with pipes_of(project, "pipe"):
        fault.check(project.trace().verify(status=1))
    assert project.statuses()["lib.so"][0] == "not proved"


REMEMBERS = """
CODE = '''
import ctypes, os, sys
code = open(sys.argv[1], "rb").read()
ctypes.CDLL(os.environ["DRIVER"])
print(flush=True)
sys.stdin.read()
'''

def test_use():
    use(LIB, 0)

def test_service():
    if not ROUND:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
        service = subprocess.Popen(
            [sys.executable, "-c", CODE, str(LIB)], env=environ,
            stdin=os.open("pipe", os.O_RDONLY), stdout=subprocess.PIPE, start_new_session=True,
        )
        assert service.stdout.readline() == b"\\n"
"""


@needs_compiler
@pytest.mark.slow
@pytest.mark.planted_fault(
    "A service of the traced run has read a library into memory, and answers for the proof.",
    says="outlived the traced run or a round, and still used a copy or the CUDA driver",
)
def test_a_service_that_has_read_the_library(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", REMEMBERS)
    driver = compile_shared("libcuda.c", tmp_path / "driver" / "libcuda.so.1")
    project.environ["DRIVER"] = str(driver)
    with pipes_of(project, "pipe"):
        fault.check(project.trace().verify(status=1))
    assert not project.verdict["proved"]


KEEPS = """
CODE = "import sys; from standin_gpu import load; load(sys.argv[1]); print(flush=True); "
CODE += "sys.stdin.read()"

def test_use():
    use(LIB, 0)

def test_service():
    if FAULT:
        service = subprocess.Popen(
            [sys.executable, "-c", CODE, str(LIB)],
            stdin=os.open("pipe", os.O_RDONLY), stdout=subprocess.PIPE, start_new_session=True,
        )
        assert service.stdout.readline() == b"\\n"
"""


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A service of an earlier proof, on a copy that is still the same, answers for the next one.",
    says="outlived the traced run or a round, and still used a copy or the CUDA driver",
)
def test_a_service_of_an_earlier_proof(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", KEEPS).trace()
    with pipes_of(project, "pipe"):
        # Nor does the proof that left it behind hold: what it needs later is not seen.
        fault.check(project.verify(status=1, FAULT="service"))
        fault.check(project.verify(status=1))


LEFTOVER = """
CODE = '''
import sys
from standin_gpu import USED, need
for line in sys.stdin:
    try:
        need(sys.argv[1], USED[1])
        print("ok", flush=True)
    except RuntimeError:
        print("no kernel image", flush=True)
'''

def test_use():
    use(LIB, 0)

def test_service():
    if ROUND == "verify":
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(LIB)],
            stdin=os.open("asks", os.O_RDONLY), stdout=os.open("answers", os.O_RDWR),
            stderr=subprocess.DEVNULL, start_new_session=True,
        )
    if ROUND:
        Path("asks").write_text("?\\n")
        with Path("answers").open() as answers:
            assert answers.readline() == "ok\\n"
"""


@pytest.mark.nightly
@pytest.mark.planted_fault(
    "A service that a test starts on the copies fails, outlives the session, and fails for the "
    "same test on the originals, too.",
    says="removed, and touched on the copies: _ZN8matrices9transposeEPKfPfii of lib.so",
)
def test_a_service_on_copies_that_answers_on_originals(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", LEFTOVER)
    with pipes_of(project, "asks", "answers"):
        fault.check(project.trace().verify("--negativa-rerun=1", status=1))
    assert not project.verdict["proved"]


EARLIER = """
CODE = '''
import sys
from standin_gpu import need
for line in sys.stdin:
    try:
        need(sys.argv[1], 46168)
        print("ok", flush=True)
    except RuntimeError:
        print("no kernel image", flush=True)
        break
'''

def is_there():
    try:
        status = Path("/proc", Path("pid").read_text(), "stat").read_text()
        return status.rpartition(")")[2][1] != "Z"
    except FileNotFoundError:
        return False

def test_use():
    use(LIB, 0)

def test_in_turn():
    for region in (3, 1) if ROUND else ():
        use(LIB, region)

def test_service():
    if ROUND in ("", "original"):
        need(LIB, 46168)
        return
    if not is_there():
        service = subprocess.Popen(
            [sys.executable, "-c", CODE, str(LIB)],
            stdin=os.open("asks", os.O_RDONLY), stdout=os.open("answers", os.O_RDWR),
            stderr=subprocess.DEVNULL, start_new_session=True,
        )
        Path("pid").write_text(str(service.pid))
    Path("asks").write_text("?\\n")
    with Path("answers").open() as answers:
        assert answers.readline() == "ok\\n"
"""


@pytest.mark.nightly
@pytest.mark.planted_fault(
    "A service ends at its first fault. One that a test starts when healing has given the code "
    "back outlives the round, and answers for the proof.",
    says="outlived the traced run or a round, and still used a copy or the CUDA driver",
)
def test_a_service_on_earlier_copies(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(tmp_path / "project", EARLIER)
    with pipes_of(project, "asks", "answers"):
        fault.check(project.trace().heal(status=1))
    assert not project.verdict["proved"]


TWINS = """
SITE = Path(os.environ["SITE"])

def test_use():
    use(SITE / "one/lib.so", 0)

def test_child():
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    child = [sys.executable, "-c", load, str(SITE / "two/lib.so")]
    subprocess.run(child, env={} if FAULT else None, check=True)
"""


@pytest.mark.slow
@pytest.mark.planted_fault(
    "Two packages, or a package and the project, have the same library, and a child with an "
    "emptied environment uses the second.",
    says="two/lib.so, which has the content of the original, 1 time while the tests ran",
)
@pytest.mark.parametrize("where", ["installed", "in the project"])
def test_a_twin_of_the_original_is_opened(tmp_path: Path, fault: PlantedFault, where: str) -> None:
    """The lock is applied by content, so slim would take code out of both."""
    project = VerifiedProject(tmp_path / "project", TWINS)
    files = {f"{name}/lib.so": project.folder / "lib.so" for name in ("one", "two")}
    if where == "installed":
        pip_install(tmp_path / "site", make_wheel(tmp_path, "twins", "1.0", files))
        project.environ["SITE"] = str(tmp_path / "site")
    else:
        for name, source in files.items():
            (project.folder / "src" / name).parent.mkdir(parents=True)
            shutil.copy(source, project.folder / "src" / name)
        project.environ["SITE"] = str(project.folder / "src")
    fault.check(project.trace().verify(status=1, FAULT="emptied"))
    assert project.statuses()["lib.so"][0] == "not proved"


@needs_compiler
@pytest.mark.planted_fault(
    "A static program, also in a changed root or as another user, opens an original.",
    says="a process opened the original 1 time while the tests ran on the copies",
)
@pytest.mark.parametrize("way", ["directly", "changed root", "another user"])
def test_a_static_program_that_opens_the_original(
    tmp_path: Path, fault: PlantedFault, way: str
) -> None:
    if way != "directly" and not IS_ROOT:
        pytest.skip("only root may change the root and the user")
    original = tmp_path / "a.so"
    original.write_bytes(b"code")
    program = compile_c("opens.c", tmp_path / "opens", "-static")
    # Inside of the changed root, anybody may pass this folder.
    tmp_path.chmod(0o755)
    root = tmp_path if way == "directly" else Path("/")

    def change() -> None:
        if way != "directly":
            os.chroot(tmp_path)
            os.chdir("/")
        if way == "another user":
            os.setuid(65534)

    with OpenWatch([str(original)]) as watch:
        words = [str(root / path.name) for path in (program, original)]
        subprocess.run(words, env={}, check=True, preexec_fn=change)
    fault.check(opened_originals([watch.opens])[0][str(original)])


WATCHES = """
import sys
from pytest_negativa.processes.open_watch import OpenWatch
from pytest_negativa.verifying.used_originals import opened_originals
with OpenWatch(sys.argv[1:]) as watch:
    open(sys.argv[1]).close()
print(*opened_originals([watch.opens])[0].values())
"""


@needs_compiler
@pytest.mark.planted_fault(
    "A file system reports no opens, and a child with an emptied environment runs on an original.",
    says="nothing tells whether a process opened the original while the tests ran on the copies "
    "(the kernel reported no open of",
)
def test_a_file_system_that_reports_no_opens(tmp_path: Path, fault: PlantedFault) -> None:
    blind = compile_shared("blind_inotify.c", tmp_path / "blind.so")
    original = tmp_path / "a.so"
    original.touch()
    command = [sys.executable, "-c", WATCHES, str(original)]
    environ = {**os.environ, "LD_PRELOAD": str(blind)}
    fault.check(subprocess.check_output(command, env=environ, text=True, cwd=ROOT))
