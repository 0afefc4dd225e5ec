"""Files whose path the user gave: what lies there is replaced, followed, written to or refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pytest_negativa.errors import StoreError
from pytest_negativa.storage.user_files import write_output
from tests.support.faults import PlantedFault
from tests.support.stores import memory_url

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def test_a_regular_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old, and longer")
    path.chmod(0o640)
    write_output(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    target = tmp_path / "reports" / "real.json"
    (tmp_path / "second").symlink_to("reports/real.json")
    (tmp_path / "first").symlink_to(tmp_path / "second")
    write_output(tmp_path / "first", b"data")
    assert target.read_bytes() == b"data"
    assert (tmp_path / "first").is_symlink()
    assert (tmp_path / "second").is_symlink()


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_output(pipe, b"data")
    reader.join()
    assert got == [b"data"]
    assert pipe.is_fifo()


def test_no_other_file_is_taken_for_a_closed_standard_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(StoreError, match="standard output is closed"):
        write_output(Path("-"), b"data")


def test_devices_and_descriptors_stay_what_they_are(tmp_path: Path) -> None:
    kept = tmp_path / "stdout"
    script = (
        "import sys; from pathlib import Path; from pytest_negativa.storage.user_files import *\n"
        "print('before', flush=True)\n"
        "for path in sys.argv[1:]: write_output(Path(path), path.encode() + b'\\n')"
    )
    paths = ["/dev/null", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "-"]
    with kept.open("wb") as file:
        subprocess.run([sys.executable, "-c", script, *paths], stdout=file, check=True)
    assert kept.read_text().split() == ["before", *paths[1:]]
    assert Path("/dev/null").is_char_device()
    assert Path("/dev/stdout").is_symlink()


@pytest.mark.planted_fault("a report goes to a folder that is missing", says="make it first")
def test_a_missing_folder_is_an_error(tmp_path: Path, fault: PlantedFault) -> None:
    with pytest.raises(StoreError) as error:
        write_output(tmp_path / "missing" / "report.json", b"data")
    fault.check(str(error.value))
    assert not (tmp_path / "missing").exists()


def test_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written: Is a directory"):
        write_output(tmp_path, b"data")


@AS_ROOT
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
@pytest.mark.planted_fault(
    "another user plants a link under the name of a report that root writes",
    says="is a link of another user (uid 1234)",
)
def test_a_planted_link_is_not_followed(tmp_path: Path, mode: int, fault: PlantedFault) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = shared / "report.json"
    link.symlink_to(victim)
    os.lchown(link, 1234, 1234)
    with pytest.raises(StoreError) as error:
        write_output(link, b"data")
    fault.check(str(error.value))
    assert victim.read_text() == "precious"


def test_links_that_go_round_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(StoreError, match="Too many levels of symbolic links"):
        write_output(tmp_path / "a", b"data")


def test_a_url_is_written() -> None:
    url = memory_url()
    write_output(url, b"text")
    assert url.read(4) == b"text"
