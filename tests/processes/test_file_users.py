"""Which processes have a file open or mapped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_negativa.processes.file_users import users_of, wait_for_users
from tests.support.emulators import IS_PROGRAM, not_in_qemu

USES = {
    "open": "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()",
    "mapped": "import mmap, sys; file = open(sys.argv[1]); "
    "mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); file.close(); print(flush=True); "
    "sys.stdin.read()",
}


@pytest.mark.parametrize("how", USES)
@not_in_qemu(IS_PROGRAM)
def test_a_process_without_environment_is_found(tmp_path: Path, how: str) -> None:
    file, other = tmp_path / "a.so", tmp_path / "b.so"
    file.write_bytes(b"a" * 5000)
    other.touch()
    paths = [str(file), str(other), str(tmp_path / "missing.so")]
    begin = time.time()
    command = [sys.executable, "-c", USES[how], str(file)]
    with subprocess.Popen(command, env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        [(path, user)] = users_of(paths)
        # It is older than that, so nothing waits for its end.
        assert wait_for_users(paths, since=time.time() + 60) == ((path, user),)
        assert child.stdin is not None
        child.stdin.close()
        assert wait_for_users(paths, since=begin) == ()
    assert path == str(file)
    assert user.who == f"process {child.pid} ({os.path.realpath(sys.executable)})"
    assert user.may_be_younger(begin) and not user.may_be_younger(time.time() + 60)


def test_what_this_process_runs_in_was_started_by_no_test(tmp_path: Path) -> None:
    file = tmp_path / "a.so"
    file.write_bytes(b"a" * 5000)
    asks = (
        "import sys\n"
        "from pytest_negativa.processes.file_users import wait_for_users\n"
        "[(_, user)] = wait_for_users(sys.argv[1:], since=1.0)\n"
        "assert not user.may_be_younger(1.0)\n"
    )
    wrapper = "import subprocess, sys; file = open(sys.argv[2]); subprocess.run("
    wrapper += "[sys.executable, '-c', *sys.argv[1:]], check=True)"
    subprocess.run([sys.executable, "-c", wrapper, asks, str(file)], check=True)
