"""Files that get their name when they are complete, by whatever the file system can do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.storage.atomic import NewFile, remove_abandoned


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "lib.so"
    path.write_text("earlier")
    return path


def test_it_takes_the_place_of_what_was_there(target: Path) -> None:
    with target.open() as earlier:
        with NewFile(target) as new:
            os.write(new.fd, b"complete")
            assert target.read_text() == "earlier"
            new.publish()
        assert earlier.read() == "earlier"
    assert target.read_text() == "complete"
    assert os.listdir(target.parent) == [target.name]


def test_a_file_that_must_not_be_replaced(target: Path) -> None:
    with pytest.raises(FileExistsError), NewFile(target) as new:
        new.publish(replace=False)
    assert target.read_text() == "earlier"
    target.unlink()
    with NewFile(target) as new:
        os.write(new.fd, b"complete")
        new.publish(replace=False)
    assert target.read_text() == "complete"
    assert os.listdir(target.parent) == [target.name]


def test_other_programs_can_open_it_before(target: Path) -> None:
    with NewFile(target) as new:
        os.write(new.fd, b"half")
        assert new.path.read_text() == "half"
        assert new.path == new.path != target
        new.publish()
    assert target.read_text() == "half"
    assert os.listdir(target.parent) == [target.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted(target: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), NewFile(target):
        raise error
    assert target.read_text() == "earlier"
    assert os.listdir(target.parent) == [target.name]


KILLED = """
import os, signal, sys
from pathlib import Path
from pytest_negativa.storage.atomic import NewFile

with NewFile(Path(sys.argv[1])) as new:
    os.write(new.fd, b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed(target: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(target)])
    assert done.returncode == -signal.SIGKILL
    assert target.read_text() == "earlier"
    left = [name for name in os.listdir(target.parent) if name != target.name]
    assert len(left) == 1
    other = target.with_name(".other.so.k3l4.tmp")
    other.touch()
    remove_abandoned(target)
    assert {path.name for path in target.parent.iterdir()} == {target.name, other.name}
