"""15,000 damaged files, 2,500 for each reader: each is taken or refused, and no reader hangs."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fuzz_targets import TARGETS, iter_seeds

COUNT = 2_500
LIMIT = 60
"""Seconds for an input; the slowest takes a tenth of one."""

_WORDS = (b"", b"\0", b"\xff", b"\n", b"\t", b"null", b"-1", b"1e999", b"9" * 40, b'"', b"[" * 2000)


def _change(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Change a bit, replace or double a part, cut, go on as another file, or mix lines."""
    at, there = rng.randrange(len(data)), rng.randrange(len(other))
    how = rng.randrange(6)
    if how == 0:
        return _put(data, at, bytes([data[at] ^ 1 << rng.randrange(8)]), 1)
    if how == 1:
        return _put(data, at, rng.choice(_WORDS), rng.randrange(9))
    if how == 2:
        return data[:at]
    if how == 3:
        return data[:at] + data[rng.randrange(at + 1) :]
    if how == 4:
        return data[:at] + other[there:]
    lines = data.split(b"\n")
    return b"\n".join(rng.sample(lines, len(lines)))


def _put(data: bytes, at: int, word: bytes, replaced: int) -> bytes:
    return data[:at] + word + data[at + replaced :]


def _mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    data = rng.choice(seeds)
    for _ in range(rng.randint(1, 4)):
        # Some change cuts everything off.
        if data:
            data = _change(rng, data, rng.choice(seeds))
    return data


@pytest.fixture
def alarm() -> Iterator[None]:
    def hung(_number: int, _frame: object) -> None:
        raise TimeoutError(f"the reader takes longer than {LIMIT} s")

    before = signal.signal(signal.SIGALRM, hung)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["library", "trace", "lock", "config", "log", "manifest"])
def test_damaged_files(target: str, tmp_path: Path, alarm: None) -> None:
    seeds = [seed for seed in iter_seeds(target) if seed]
    rng = random.Random(target)
    for _ in range(COUNT):
        data = _mutated(rng, seeds)
        # The last one stays, for who looks into a failure.
        (tmp_path / "input").write_bytes(data)
        signal.alarm(LIMIT)
        TARGETS[target](data)
        signal.alarm(0)
