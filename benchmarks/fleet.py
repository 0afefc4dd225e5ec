"""Reads a fleet of images by Dask clusters of 1, 2 and 4 workers, and again from the cache.

    python benchmarks/fleet.py --images 1000

The images are folders with ten libraries each, a scale model: five are an image's own, four are
hard links to those of other images (a shared layer), and every tenth link is a copy instead. A
library has 100 regions with code for three archs, which unpacks to 7 MB, and one region that no
other library has. All of them are listed, mapped with kernel names, and printed as JSON.

Wall time counts on a quiet machine alone. CPU time hardly depends on the load, and the longest
chain of it (the command, then the busiest worker) bounds what more workers can bring.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped,import-not-found,unused-ignore]
from measuring import print_load

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.builders import (
    ZSTD,
    CubinSpec,
    ElementSpec,
    build_cubin,
    build_host,
    build_id_note,
    build_region,
    fatbin_section,
)
from tests.support.clusters import cluster_of

NEGATIVA = Path(sysconfig.get_path("scripts")) / "negativa"
OWN, SHARED = 5, 5
REGIONS, KERNELS, KERNEL_BYTES = 100, 20, 1024
# Above the size from which the cache takes a library.
SIZE = 1_100_000


def region(number: int, chance: random.Random) -> bytes:
    """A region with the same kernels for three archs; its code compresses by half, about."""
    code = chance.randbytes(KERNEL_BYTES // 2) + bytes(KERNEL_BYTES // 2)
    kernels = {f"_Z{number}kernel{k:02}PKfPfi": code for k in range(KERNELS)}
    elements = [
        ElementSpec(
            content=build_cubin(CubinSpec(arch=arch, kernels=kernels)).data,
            arch=arch,
            flags=0x11 | ZSTD,
        )
        for arch in (80, 90, 120)
    ]
    return build_region(elements)


def build_libraries(folder: Path, count: int) -> list[Path]:
    """Write libraries that differ in build id, size, and the code of one region."""
    chance = random.Random(count)
    common = [region(number, chance) for number in range(REGIONS)]
    paths = []
    for number in range(count):
        own = build_region([ElementSpec(content=chance.randbytes(4096), kind=1, flags=0x11)])
        note = build_id_note(hashlib.sha1(b"%d" % number).digest())
        data = build_host([note, fatbin_section(*common, own)]).data
        path = folder / f"lib{number}.so"
        path.write_bytes(data)
        # What is no GPU code: a hole, which takes no disk.
        os.truncate(path, SIZE + 16 * number)
        paths.append(path)
    return paths


def build_images(folder: Path, count: int) -> list[Path]:
    """Make the images; returns their folders."""
    (libraries := folder / "libraries").mkdir()
    made = build_libraries(libraries, OWN * count)
    chance = random.Random(count)
    images = []
    for number in range(count):
        (image := folder / f"image{number:04}" / "usr" / "lib").mkdir(parents=True)
        for path in made[OWN * number : OWN * (number + 1)]:
            path.rename(image / path.name)
        images.append(image.parents[1])
    for number, image in enumerate(images):
        for index in range(SHARED):
            other = chance.choice(
                sorted((images[chance.randrange(count)] / "usr/lib").glob("lib*"))
            )
            target = image / "usr" / "lib" / f"shared{index}.so"
            if index == 0 and number % 2 == 0:
                subprocess.run(["cp", "--sparse=always", other, target], check=True)
            else:
                target.hardlink_to(other)
    return images


@dataclass(frozen=True)
class Read:
    """What a run of the command took; seconds."""

    wall: float
    command: float
    workers: tuple[float, ...]
    files: int
    libraries: int

    @property
    def chain(self) -> float:
        return self.command + max(self.workers, default=0)

    def __str__(self) -> str:
        each = " ".join(f"{s:.1f}" for s in self.workers)
        return (
            f"{self.wall:7.1f} s wall, {self.command + sum(self.workers):7.1f} s CPU "
            f"(command {self.command:.1f}, workers {each or '-'}); longest chain {self.chain:.1f} s"
        )


def read(images: list[Path], cache: Path, url: str | None, workers: list[int]) -> Read:
    """Run ``negativa inspect`` on all images."""
    command = [str(NEGATIVA), "inspect", "--json", *map(str, images)]
    command += ["--executor", url] if url else ["--jobs", "1"]
    before = [cpu(pid) for pid in workers]
    own = os.times()
    start = time.perf_counter()
    done = subprocess.run(
        command,
        env={**os.environ, "NEGATIVA_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        check=True,
    )
    wall = time.perf_counter() - start
    after = os.times()
    used = after.children_user + after.children_system - own.children_user - own.children_system
    found = json.loads(done.stdout)
    assert not found["errors"]
    spent = tuple(cpu(pid) - b for pid, b in zip(workers, before, strict=True))
    ids = [library["summary"]["build_id"] for library in found["libraries"]]
    return Read(wall, used, spent, len(ids), len(set(ids)))


def cpu(pid: int) -> float:
    """CPU time of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Make the images, read them by clusters of several sizes, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where the images are made (6 GB of holes)")
    arguments = parser.parse_args()
    print_load()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        start = time.perf_counter()
        images = build_images(folder, arguments.images)
        print(f"{len(images):,} images in {time.perf_counter() - start:.0f} s", flush=True)
        results: dict[str, Read] = {}

        def report(what: str, result: Read) -> None:
            results[what] = result
            print(f"{what:28}: {result}", flush=True)

        for count in (1, 2, 4):
            (own := folder / f"cluster{count}").mkdir()
            cache = own / "cache"
            with cluster_of(own, count) as cluster:
                pids = [process.pid for process in cluster.processes[1:]]
                # Each worker has imported what it needs.
                read(images[:8], own / "warm", cluster.url, pids)
                report(f"{count} workers", read(images, cache, cluster.url, pids))
                if count == 2:
                    report("2 workers, again", read(images, cache, cluster.url, pids))
                    some = images[: len(images) // 4]
                    report("2 workers, a quarter", read(some, own / "part", cluster.url, pids))
            shutil.rmtree(own)
        one, two, four = (results[f"{n} workers"] for n in (1, 2, 4))
        again = results["2 workers, again"]
        print(f"{one.files:,} files, {one.libraries:,} libraries")
        for what, left, right in (
            ("2 workers over 1", one, two),
            ("4 workers over 2", two, four),
            ("again, over 1 worker before", one, again),
            ("again, over 2 before", two, again),
        ):
            by_wall, by_chain = left.wall / right.wall, left.chain / right.chain
            print(f"{what:28}: {by_wall:.2f} by wall, {by_chain:.2f} by chain")
        for what, row in (("a quarter", results["2 workers, a quarter"]), ("all", two)):
            seconds = row.command + sum(row.workers)
            print(f"CPU time a library, {what:9}: {seconds / row.libraries * 1e3:.1f} ms")
    print_load()


if __name__ == "__main__":
    main()
