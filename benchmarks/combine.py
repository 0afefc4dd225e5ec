"""Times ``negativa combine`` on many shards that are made from one recorded run.

    python benchmarks/combine.py tests/data/traces/h200-ops --shards 1000

Each shard is the recording with another run id, process id, time of start and host: its libraries
have other inodes and times. So nothing but digests tells that two shards had the same library.
A shard takes the recorded digests, or else digests that stand for the recorded build ids.
``--own-tests`` gives each shard tests of its own, and ``--launches`` the launches of level launch.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from pytest_negativa.models.trace import TracedLibrary
from pytest_negativa.storage.results import save_digests


def add_launches(records: list[dict[str, Any]], count: int) -> None:
    """Add launches before the end of a trace: as many in each context, of all kernels in turn."""
    names = sorted({record["name"] for record in records if record["record"] == "kernel"})
    contexts = [record["id"] for record in records if record["record"] == "context"]
    kernels = itertools.cycle(names)
    records[-1:-1] = [
        {"record": "launch", "name": name, "count": 3, "context": context, "gpu_ns": 12345}
        for context in contexts
        for name in itertools.islice(kernels, count // len(contexts))
    ]


def write_shard(
    folder: Path, recorded: list[list[dict[str, Any]]], number: int, *, own_tests: bool
) -> int:
    """Write a shard's traces and digests; return how many lines there are."""
    traces = folder / "trace"
    traces.mkdir(parents=True)
    libraries = {}
    for index, records in enumerate(recorded):
        lines = []
        for record in records:
            if record["record"] == "header":
                run_id = f"20260101T000000Z-{number:06x}"
                start = record["start_ns"] + number * 10**9
                record = {**record, "run_id": run_id, "pid": 1000 + index, "start_ns": start}
            elif record["record"] == "library":
                library = {**record["library"], "device": number, "ctime_ns": number}
                record = {**record, "library": library}
                name = library.get("build_id") or library["path"]
                digest = library.get("sha256") or hashlib.sha256(name.encode()).hexdigest()
                if library.get("size") is not None:
                    libraries[json.dumps(library)] = {**library, "sha256": digest}
            elif record["record"] == "context" and own_tests and "nodeid" in record["context"]:
                nodeid = f"{record['context']['nodeid']}-{number}"
                record = {**record, "context": {**record["context"], "nodeid": nodeid}}
            lines.append(json.dumps(record, separators=(",", ":")))
        name = f"20260101T000000Z-{number:06x}.{1000 + index}.{index:08x}.jsonl"
        (traces / name).write_text("\n".join(lines) + "\n")
    save_digests(
        traces, (msgspec.convert(library, TracedLibrary) for library in libraries.values())
    )
    return sum(map(len, recorded))


def main() -> None:
    """Make the shards, combine them in a process of its own, and print time and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--own-tests", action="store_true")
    parser.add_argument("--launches", type=int, default=0, help="of a trace, at most")
    arguments = parser.parse_args()
    recorded = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(arguments.recording.glob("*.jsonl"))
    ]
    for records in recorded:
        add_launches(records, arguments.launches)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shards = [folder / f"shard-{number}" for number in range(arguments.shards)]
        lines = sum(
            write_shard(shard, recorded, n, own_tests=arguments.own_tests)
            for n, shard in enumerate(shards)
        )
        command = [sys.executable, "-m", "pytest_negativa", "--dir", str(folder / "out"), "combine"]
        start = time.perf_counter()
        subprocess.run([*command, *map(str, shards)], check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        [usage] = folder.glob("out/2*/usage.json")
        size = usage.stat().st_size / 1e6
    print(
        f"{arguments.shards:,} shards, {lines:,} lines: {seconds:.1f} s ({used.ru_utime:.1f} s of "
        f"CPU time, {used.ru_stime:.1f} s in the kernel), {used.ru_maxrss / 1024:.0f} MiB at most, "
        f"usage.json {size:.1f} MB"
    )


if __name__ == "__main__":
    main()
