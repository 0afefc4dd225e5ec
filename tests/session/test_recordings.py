"""Recordings that are damaged or not there: one clear line, and missing data means keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.faults import PlantedFault
from tests.support.sessions import LOADED, Project

Lines = list[bytes]


def damage(project: Project, change: Callable[[Lines], bytes]) -> None:
    """Write the recording anew, as ``change`` makes it from its lines."""
    path = project.folder / "recorded" / "h200.jsonl"
    path.write_bytes(change(path.read_bytes().splitlines(keepends=True)))


def torn(lines: Lines) -> bytes:
    return b"".join(lines)[:-20]


def garbage(lines: Lines) -> bytes:
    lines[-3] = b'{"record": "kernel", "image": \n'
    return b"".join(lines)


def cut(lines: Lines) -> bytes:
    return b"".join(lines[:-4])


def without_device(lines: Lines) -> bytes:
    return b"".join(line for line in lines if b'"device"' not in line)


def without_a_context(lines: Lines) -> bytes:
    return b"".join(line for line in lines if b'"context","id":63' not in line)


@pytest.fixture
def suite(project: Project) -> Project:
    project.write("test_a.py", "def test_a():\n    pass\n")
    return project


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (torn, "h200.jsonl: the last line is torn: the end of the recording is lost"),
        (garbage, "h200.jsonl: line 70: "),
        (cut, "h200.jsonl: the recording has no end: it was interrupted, or its last lines"),
        (without_device, "all of it is kept (incomplete): the trace names no device"),
        (without_a_context, "nothing tells what these are: context "),
    ],
)
def test_damage_keeps_everything(
    suite: Project, change: Callable[[Lines], bytes], line: str
) -> None:
    damage(suite, change)

    # Each of several processes replays it, and each must say so.
    done = suite.pytest("-q", "--negativa", *(("-n1",) if change is torn else ()))

    assert line in done.stdout.replace(str(suite.folder / "recorded") + "/", "")
    assert {d[3] for d in suite.plan()} == {"incomplete"}
    assert suite.latest("spans/libquickstart.so.json")["spans"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda lines: b"".join(lines).replace(b'"format":1', b'"format":2'),
            "line 1: not a header of this release: Invalid enum value 2 - at `$.format`",
        ),
        (lambda lines: b"", "empty: the process was killed before it could say anything"),
        (lambda lines: b"no JSON at all\n", "line 1: JSON is malformed"),
        (lambda lines: b"".join(lines[1:]), "line 1: no header"),
    ],
)
def test_a_recording_that_cannot_be_read(
    suite: Project, change: Callable[[Lines], bytes], line: str
) -> None:
    damage(suite, change)

    done = suite.pytest("-q", "--negativa")

    [shown] = [s for s in done.stdout.splitlines() if s.startswith("negativa: ")]
    assert shown.startswith("negativa: nothing was traced: no recorded trace can be replayed: ")
    assert f"{suite.folder / 'recorded' / 'h200.jsonl'}: {line}" in shown
    assert not suite.planned()


@pytest.mark.slow
def test_one_of_two_recordings_cannot_be_read(suite: Project) -> None:
    """The rest of a run that lacks a process: what that one used is not known."""
    suite.write("recorded/worker.jsonl", '{"record":"header","format":99}\n')

    done = suite.pytest("-q", "--negativa")

    assert "worker.jsonl: line 1: not a header of this release: " in done.stdout
    assert {d[3] for d in suite.plan()} == {"incomplete"}


@pytest.mark.slow
@pytest.mark.planted_fault(
    "the folder of the recorded trace is missing in CI",
    says="elsewhere: no such folder; expected one with recorded traces",
)
def test_a_recording_that_is_not_there(suite: Project, fault: PlantedFault) -> None:
    done = suite.pytest("-q", "--negativa", "--negativa-replay=elsewhere", status=4)
    fault.check(done.stderr)
    assert "passed" not in done.stdout


@pytest.mark.slow
def test_a_library_that_is_not_there(suite: Project) -> None:
    library = suite.folder / "quickstart" / "libquickstart.so"
    content = library.read_bytes()
    library.unlink()

    gone = suite.pytest("-q", "--negativa").stdout
    assert "the recorded library isn't on this machine" in gone
    assert "nothing is proved here" in gone
    assert not suite.planned()

    # Another build of it: the same size, and another build id.
    note = bytes.fromhex("46a8ce413ca18294e9e43a0014c5c4c9f1de4822")
    assert content.count(note) == 1
    library.write_bytes(content.replace(note, note[::-1]))
    assert "the recorded library isn't on this machine" in suite.pytest("-q", "--negativa").stdout
    assert not suite.planned()


@pytest.mark.slow
def test_a_library_elsewhere_with_the_same_content(suite: Project) -> None:
    """Another time of installation makes it no other library."""
    library = suite.folder / "quickstart" / "libquickstart.so"
    library.touch()
    suite.pytest("-q", "--negativa")
    assert [tuple(d[:2]) for d in suite.plan() if d[2]] == list(LOADED)
