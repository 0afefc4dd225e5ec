"""Files that get their name when they are complete, by whatever the file system can do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.storage.atomic import new_file, remove_abandoned
from tests.support.mounts import in_namespace, mount

# What a kernel without O_TMPFILE makes of it: a folder can't be opened for writing.
NAMED = os.O_DIRECTORY
FLAGS = pytest.mark.parametrize("flag", [os.O_TMPFILE, NAMED])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "lib.so"
    path.write_text("earlier")
    return path


@FLAGS
def test_it_takes_the_place_of_what_was_there(target: Path, flag: int) -> None:
    with target.open() as earlier:
        with new_file(target, flag=flag) as new:
            os.write(new.fd, b"complete")
            assert target.read_text() == "earlier"
            new.publish()
        assert earlier.read() == "earlier"
    assert target.read_text() == "complete"
    assert os.listdir(target.parent) == [target.name]


@FLAGS
def test_a_file_that_must_not_be_replaced(target: Path, flag: int) -> None:
    with pytest.raises(FileExistsError), new_file(target, flag=flag) as new:
        new.publish(replace=False)
    assert target.read_text() == "earlier"
    target.unlink()
    with new_file(target, flag=flag) as new:
        os.write(new.fd, b"complete")
        new.publish(replace=False)
    assert target.read_text() == "complete"
    assert os.listdir(target.parent) == [target.name]


@FLAGS
def test_other_programs_can_open_it_before(target: Path, flag: int) -> None:
    with new_file(target, flag=flag) as new:
        os.write(new.fd, b"half")
        assert new.path().read_text() == "half"
        assert new.path() == new.path() != target
        new.publish()
    assert target.read_text() == "half"
    assert os.listdir(target.parent) == [target.name]


@in_namespace
def test_without_proc(target: Path) -> None:
    """As in a chroot in which an image is built."""
    mount("-t", "tmpfs", "tmpfs", "/proc")
    with new_file(target) as new:
        os.write(new.fd, b"complete")
        new.publish()
    assert target.read_text() == "complete"
    assert os.listdir(target.parent) == [target.name]


@FLAGS
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted(target: Path, flag: int, named: bool, error: type[BaseException]) -> None:
    with pytest.raises(error), new_file(target, flag=flag) as new:
        if named:
            new.path()
        raise error
    assert target.read_text() == "earlier"
    assert os.listdir(target.parent) == [target.name]


KILLED = """
import os, signal, sys
from pathlib import Path
from pytest_negativa.storage.atomic import new_file

with new_file(Path(sys.argv[1]), flag=int(sys.argv[2])) as new:
    os.write(new.fd, b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@FLAGS
def test_killed(target: Path, flag: int) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), str(flag)])
    assert done.returncode == -signal.SIGKILL
    assert target.read_text() == "earlier"
    left = [name for name in os.listdir(target.parent) if name != target.name]
    assert len(left) == (flag == NAMED)
    other = target.with_name(".other.so.k3l4.tmp")
    other.touch()
    remove_abandoned(target)
    assert {path.name for path in target.parent.iterdir()} == {target.name, other.name}
