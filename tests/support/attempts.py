"""Recorded attempts: what end-to-end verifications gave ``judge``, for tests that start nothing.

``RECORD_ATTEMPTS=FOLDER pytest ...`` makes every verification of a ``Project`` write each attempt
and its verdict into FOLDER. ``python -m tests.support.attempts FOLDER`` compares them with
``tests/data/attempts.jsonl.zst``; with ``--record``, that file has them from then on.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from pytest_negativa.models.verdict import Verdict
from pytest_negativa.storage.records import decode_hook, encode_hook
from pytest_negativa.verifying.evidence import Attempt

RECORDER = Path(__file__).parent / "recorder"
RECORDED = Path(__file__).parent.parent / "data" / "attempts.jsonl.zst"

_FOLDER = "RECORD_ATTEMPTS"
_TEST = "RECORDED_TEST"
_PROJECT = "RECORDED_PROJECT"
# Attempts differ little, so a window over many of them makes the file small. Bytes.
_WINDOW = 1 << 27
# What two runs of one test never share: folders, ids of runs and processes, temporary names.
_VARYING = re.compile(
    r"python3[.\d]*|/(?:[^\s/'\",:;()]+/)+|\d{8}T\d{6}Z-[0-9a-f]+|\b\d+\b|\bgw\d+\b|0x[0-9a-f]+"
)


class Recorded(msgspec.Struct, frozen=True):
    """An attempt of a test, by the node id of the test that verified, and its verdict."""

    test: str
    attempt: Attempt
    verdict: Verdict


def _encode(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    return encode_hook(value)


def _decode(kind: type, value: Any) -> object:
    if issubclass(kind, Path):
        return Path(value)
    if kind is object:
        return tuple(value) if isinstance(value, list) else value
    return decode_hook(kind, value)


def _encode_recorded(recorded: Recorded) -> bytes:
    # Encoders sort keys that are strings alone.
    plain = msgspec.to_builtins(recorded, str_keys=True, enc_hook=_encode)
    return msgspec.json.encode(plain, order="sorted")


_decoder = msgspec.json.Decoder(Recorded, dec_hook=_decode)


def recording_environ(project: Path, import_path: str | None) -> dict[str, str]:
    """Variables by which a project's session records its attempts; none if nobody asks for it."""
    if _FOLDER not in os.environ:
        return {}
    # A test may have a sitecustomize of its own.
    paths = [*([import_path] if import_path else []), str(RECORDER)]
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    return {"PYTHONPATH": os.pathsep.join(paths), _TEST: test, _PROJECT: str(project)}


def write_attempt(attempt: Attempt, verdict: Verdict) -> None:
    """Write an attempt of the test that started this process; its paths name no machine."""
    # The environment is nothing to judge.
    program = replace(attempt.program, environ={})
    recorded = Recorded(os.environ[_TEST], replace(attempt, program=program), verdict)
    data = _encode_recorded(recorded).decode()
    for folder, name in (
        (os.path.dirname(os.environ[_PROJECT]), "/tests"),
        (sys.prefix, "/venv"),
        (str(Path(__file__).parents[2]), "/source"),
    ):
        data = data.replace(folder, name)
    Path(os.environ[_FOLDER], f"{time.time_ns()}-{os.getpid()}.json").write_text(data)


def read_recorded(path: Path = RECORDED) -> dict[str, list[Recorded]]:
    """By node id of the test that verified: its attempts, in their order."""
    found: dict[str, list[Recorded]] = defaultdict(list)
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    for line in decompressor.decompress(path.read_bytes()).splitlines():
        recorded = _decoder.decode(line)
        found[recorded.test].append(recorded)
    return found


def _collect(folder: Path) -> dict[str, list[bytes]]:
    """By test: what it recorded. Verification judges its last attempt twice."""
    found: dict[str, list[bytes]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        recorded = _decoder.decode(path.read_bytes())
        data = _encode_recorded(recorded)
        if data not in found[recorded.test]:
            found[recorded.test].append(data)
    return dict(sorted(found.items()))


def summarize(verdict: Verdict) -> Iterator[str]:
    """A line for each thing that a verdict says, alike in all runs of one test."""
    said = [f"proved: {verdict.proved}", *(f"reason: {reason}" for reason in verdict.reasons)]
    said += [
        f"library: {Path(row.path).name} {row.status} {row.detail}" for row in verdict.gpu_libraries
    ]
    said += [f"CPU code: {reason}" for reason in verdict.cpu_reasons or ()]
    said += [
        f"test: {test.nodeid} {test.before} {test.after} flaky: {test.flaky} "
        f"lost: {test.gpu_error is not None} {[(c.aspect, c.tolerated) for c in test.changes]}"
        for test in verdict.tests
    ]
    said += [f"work: {w.witness} {w.kernel} {w.test} {w.note}" for w in verdict.needs]
    said += [f"round: {r.kind} {r.tests} {r.status} {r.silent}" for r in verdict.rounds]
    yield from sorted(_VARYING.sub("*", line) for line in said)


def _compare(old: dict[str, list[Recorded]], new: dict[str, list[bytes]]) -> Iterator[str]:
    """A line for each difference between two recordings."""
    yield from (f"{test}: was not run" for test in sorted(old.keys() - new.keys()))
    yield from (f"{test}: is not recorded" for test in sorted(new.keys() - old.keys()))
    for test in sorted(old.keys() & new.keys()):
        before = [list(summarize(r.verdict)) for r in old[test]]
        after = [list(summarize(_decoder.decode(data).verdict)) for data in new[test]]
        if len(before) != len(after):
            yield f"{test}: {len(before)} attempts were recorded, now there are {len(after)}"
        for number, (was, now) in enumerate(zip(before, after, strict=False)):
            gone, added = Counter(was) - Counter(now), Counter(now) - Counter(was)
            for sign, lines in (("-", gone), ("+", added)):
                yield from (f"{test} [{number}]: {sign} {line}" for line in sorted(lines))


def main() -> int:
    """Compare a folder of attempts with the recorded ones; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what RECORD_ATTEMPTS named")
    parser.add_argument("--record", action="store_true", help="make it what is recorded")
    arguments = parser.parse_args()
    new = _collect(arguments.folder)
    old = read_recorded() if RECORDED.exists() else {}
    differences = list(_compare(old, new))
    print(*differences, sep="\n")
    print(
        f"{len(new)} tests, {sum(map(len, new.values()))} attempts; {len(old)} tests are recorded; "
        f"{len(differences)} differences"
    )
    if arguments.record:
        lines = [line for of in new.values() for line in of]
        parameters = zstandard.ZstdCompressionParameters.from_level(
            19, window_log=_WINDOW.bit_length() - 1
        )
        compressor = zstandard.ZstdCompressor(compression_params=parameters)
        RECORDED.write_bytes(compressor.compress(b"\n".join(lines) + b"\n"))
        return 0
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
