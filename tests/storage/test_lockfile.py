"""Locks that an edit, a merge or a stranger damaged: none is taken for what was proved."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from pytest_negativa.errors import StoreError
from pytest_negativa.models.lock import LeftOut, Lock, Place
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.storage.lockfile import (
    MAX_ITEMS,
    decode_lock,
    encode_lock,
    load_lock,
    save_lock,
)
from tests.support.faults import PlantedFault
from tests.support.libraries import MULTIARCH
from tests.support.reconstructing import trimmed_of
from tests.support.sites import planned_of, verdict_of
from tests.support.stores import memory_url


def make() -> Lock:
    planned = [planned_of(MULTIARCH), trimmed_of()]
    unplanned = [LeftOut(path="/lib/other.so", reason="it changed", soname="other.so")]
    return make_lock(
        "run",
        planned,
        verdict_of(*planned),
        lambda path: Place(f"lib/{path.rpartition('/')[2]}", "some-code", "1.0"),
        unplanned=unplanned,
        include=("dist:some-*",),
        exclude=("libkept*",),
    )


LOCK = make()
TEXT = encode_lock(LOCK)
PLAIN = yaml.safe_load(TEXT)


def refusal(text: bytes) -> str:
    with pytest.raises(StoreError) as caught:
        decode_lock(text, "negativa.lock")
    return str(caught.value)


def lines_with(words: str) -> list[int]:
    return [i for i, line in enumerate(TEXT.decode().splitlines()) if words in line]


def without_line(number: int) -> bytes:
    lines = TEXT.splitlines(keepends=True)
    return b"".join(lines[:number] + lines[number + 1 :])


@pytest.mark.planted_fault(
    "A merge conflict is resolved such that the lock loses a line of code that must stay.",
    says="its lines don't match their digest",
)
def test_a_lost_kept_line(fault: PlantedFault) -> None:
    first, *_ = lines_with("- {offset:")
    message = refusal(without_line(first))
    fault.check(message)
    assert message.startswith("negativa.lock:")
    assert "restore the file from version control" in message


@pytest.mark.planted_fault(
    "The lock loses the name of a function that must stay in its cubin.",
    says="its lines don't match their digest",
)
def test_a_lost_function(fault: PlantedFault) -> None:
    _, second = lines_with("    - ")
    fault.check(refusal(without_line(second)))


@pytest.mark.planted_fault(
    "A merge takes a kept line from one side and its neighbour from the other.",
    says="its lines don't match their digest",
)
def test_another_kept_line(fault: PlantedFault) -> None:
    first, *_ = lines_with("- {offset:")
    lines = TEXT.splitlines(keepends=True)
    lines[first] = lines[first].replace(b"offset: 0x2", b"offset: 0x1", 1)
    fault.check(refusal(b"".join(lines)))


@pytest.mark.planted_fault(
    "A merge loses a library of the lock, and --never-loaded takes it for never loaded.",
    says="its lines don't match their digest",
)
def test_a_lost_library(fault: PlantedFault) -> None:
    fault.check(refusal(edited(lambda plain: plain["libraries"].pop())))


@pytest.mark.planted_fault(
    "A merge loses a library that was left out because all of it is needed.",
    says="its lines don't match their digest",
)
def test_a_lost_library_that_was_left_out(fault: PlantedFault) -> None:
    fault.check(refusal(edited(lambda plain: plain["left_out"].pop())))


@pytest.mark.planted_fault(
    "A hand edit turns a lock that is not proved into one that says proved: true.",
    says="its lines don't match their digest",
)
def test_proved_by_hand(fault: PlantedFault) -> None:
    planned = [planned_of(MULTIARCH)]
    text = encode_lock(make_lock("run", planned, None, lambda path: Place(path), unproved=True))
    decode_lock(text, "negativa.lock")
    assert b"NOT PROVED" in text.splitlines()[0] and b"as proved" not in text
    plain = yaml.safe_load(text)
    plain["proof"]["proved"] = True
    del plain["proof"]["not_proved"]
    fault.check(refusal(yaml.safe_dump(plain).encode()))


@pytest.mark.planted_fault(
    "A lock still has the marks of a merge conflict.",
    says="it holds the marks of a merge conflict",
)
def test_marks_of_a_conflict(fault: PlantedFault) -> None:
    first, *_ = lines_with("- {offset:")
    lines = TEXT.splitlines(keepends=True)
    ours = b"<<<<<<< HEAD\n" + lines[first] + b"=======\n>>>>>>> branch\n"
    fault.check(refusal(b"".join([*lines[:first], ours, *lines[first + 1 :]])))


@pytest.mark.planted_fault(
    "A lock of an earlier format, which has more digests, is applied.",
    says="not a lock file of this release: format 4, this release reads 1",
)
def test_a_lock_of_the_format_before(fault: PlantedFault) -> None:
    fault.check(refusal(TEXT.replace(b"format: 1", b"format: 4")))


def test_messages_stay_short() -> None:
    """A stranger's lock may hold names of any length."""
    long = b"a" * 1_000_000
    for text in (
        TEXT.replace(b"include:", long + b":"),
        TEXT.replace(b"  run: run", b"  run: !" + long),
        TEXT.replace(b"format: 1", b"format: 4").replace(b"run: run", b"run: " + long),
        TEXT.replace(b"path: lib/", b"path: " + long),
    ):
        assert len(refusal(text)) < 1200


def edited(change: Callable[[Any], object]) -> bytes:
    plain = yaml.safe_load(TEXT)
    change(plain)
    return yaml.safe_dump(plain, sort_keys=False).encode()


def test_a_rewritten_file_is_the_same_lock() -> None:
    assert decode_lock(edited(lambda plain: None), "lock") == LOCK


def test_a_lock_at_a_url() -> None:
    url = memory_url()
    save_lock(LOCK, url)
    assert load_lock(url) == LOCK
    url.write(TEXT.replace(b"kept_elements: ", b"kept_elements: 1", 1))
    with pytest.raises(StoreError, match=rf"^{url}: .*don't match their digest"):
        load_lock(url)


def places(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, below in items:
            yield from places(below, *path, key)


OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**70,
    1.5,
    "",
    "text",
    "sm_90",
    [],
    [1],
    {},
    {"a": 1},
)


@pytest.mark.planted_fault(
    "A value of a lock has another type or value, whichever key it is.",
    says="update pytest-negativa, or make it again with negativa lock",
)
def test_each_key_with_each_type(fault: PlantedFault) -> None:
    last = ""
    for place in places(PLAIN):
        for other in OTHERS:
            plain = json.loads(json.dumps(PLAIN))
            if not place:
                plain = other
            else:
                parent = plain
                for step in place[:-1]:
                    parent = parent[step]
                parent[place[-1]] = other
            try:
                found = decode_lock(json.dumps(plain).encode(), "negativa.lock")
            except StoreError as e:
                last = str(e) if place and place[0] != "format" else last
                assert str(e).startswith("negativa.lock:"), (place, other)
                continue
            # An empty value may stand for one that is not there.
            assert found == LOCK, (place, other)
    fault.check(last)


def test_the_digest_can_be_computed_by_others() -> None:
    """With the standard library, as the reference says."""
    plain = yaml.safe_load(TEXT)
    digest = plain.pop("digest")
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert digest == hashlib.sha256(text.encode()).hexdigest()


KEPT = b"  - {offset: 0x%x, arch: sm_90, reason: loaded, region: 0x1}\n"
LONG = {
    "kept lines": b"".join(KEPT % number for number in range(464_000)),
    "kept in one line": b"  - [" + b"1," * (MAX_ITEMS + 1) + b"1]\n",
    "other line breaks": b"  - a\r" * (MAX_ITEMS + 1),
    "libraries": b"- {path: a, sha256: b, size: 1}\n" * 400_000,
    "keys": b"".join(b"  key%d: 1\n" % number for number in range(MAX_ITEMS + 1)),
    "documents": b"--- 1\n" * 900_000,
    "deep lists": b"[" * 10_000_000,
    "deep mappings": b"{a: " * 5_000_000,
    "deep blocks": b"- " * 10_000_000,
    "long text": b"a" * 70_000_000,
    "another encoding": ("a: [" + "1\x85" * MAX_ITEMS).encode("utf-16"),
}


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A lock of a stranger has lists that would take minutes to read.",
    says="more than 1,000,000 commas and lines",
)
@pytest.mark.parametrize("name", LONG)
def test_hostile_lengths_are_refused_at_once(name: str, fault: PlantedFault) -> None:
    fault.check(refusal(b"kept:\n" + LONG["kept lines"]))
    text = TEXT + b"more:\n" + LONG[name]
    begin = time.process_time()
    refusal(text)
    # Not the minutes that a YAML reader takes.
    assert time.process_time() - begin < 10
