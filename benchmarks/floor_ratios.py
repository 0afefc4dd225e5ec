"""CPU time of ``inspect --kernels`` and ``slim`` in one table: beside the floor, an earlier commit,
and the published procedure.

All have one thread. The floor is an interpreter that reads every container once, and unpacks what
must be unpacked. For slim, it hashes the originals, writes the results and hashes them. The
published procedure is that of ``inspect_cublas.py``, with its text sent to /dev/null; it runs once.
All others take turns.

Run: python benchmarks/floor_ratios.py libcublas.so.13 SITE_PACKAGES --before FOLDER, with FOLDER
from: git worktree add FOLDER 1754411
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from inspect_cublas import published_procedure
from inspect_stack import do_all, work_of
from measuring import measure, print_load, warm_up
from tabulate import tabulate

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.installed.libraries import find_libraries

_HERE = Path(__file__).resolve().parent.parent
_STEP = 256 << 10


def cpu_of(code: str, *words: object, tree: Path = _HERE) -> float:
    """CPU seconds of Python code with all its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # In place of the working directory, which may be a tree, too.
    first = f"import sys; sys.path[0] = {str(tree)!r}\n"
    command = [sys.executable, "-c", first + code, *map(str, words)]
    # Libraries that can't be read make the status 1.
    subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_tree(words: Sequence[object], tree: Path) -> float:
    """CPU seconds of ``negativa`` in a tree."""
    main = "__main__" if (tree / "pytest_negativa" / "__main__.py").exists() else "cli"
    return cpu_of(f"from pytest_negativa.{main} import main\nmain()", *words, tree=tree)


def inspect_costs(target: str, device: ComputeCapability | None, before: Path) -> list[float]:
    """CPU seconds of the floor, of this tree and of the earlier one."""
    paths = find_libraries(target).paths
    warm_up(paths)
    works = [work_of(path, device) for path in paths]
    words = ["inspect", "--no-cache", "--jobs=1", "--kernels", target]
    words += [f"--arch={device}"] if device else []
    floor = cpu_of("import lz4.block, zstandard") + measure(lambda: do_all(works))[1]
    return [floor, run_tree(words, _HERE), run_tree(words, before)]


def slim_costs(site: str, device: ComputeCapability, before: Path, to: Path) -> list[float]:
    """As ``inspect_costs``, of slim by arch; each works on links of its own."""
    costs = []
    for tree, option in ((_HERE, "--arch"), (before, "--archs")):
        with tempfile.TemporaryDirectory(dir=to) as folder:
            copy = Path(folder, "site-packages")
            # Slim gives new files the names of old ones, so links are as good as copies.
            subprocess.run(["cp", "-al", site, copy], check=True)
            # One thread, as the floor.
            words = ["slim", option, f"sm_{device.major}{device.minor}", "--jobs=1"]
            costs.append(run_tree([*words, copy], tree))
            if tree == _HERE:
                pairs = [(p, copy / p.relative_to(site)) for p in find_libraries(site).paths]
                slimmed = [p for p in pairs if p[0].stat().st_size != p[1].stat().st_size]
                _wall, cpu = measure(partial(slim_floor, slimmed))
                costs.insert(0, cpu_of("import hashlib") + cpu)
    return costs


def slim_floor(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Hash each original, write its result, and hash that."""
    for original, result in pairs:
        with original.open("rb") as source, result.open("rb") as made:
            hash_all(source.fileno())
            with tempfile.TemporaryFile(dir=result.parent) as copy:
                while os.sendfile(copy.fileno(), made.fileno(), None, _STEP):
                    pass
                os.lseek(copy.fileno(), 0, os.SEEK_SET)
                hash_all(copy.fileno())


def hash_all(fd: int) -> str:
    digest = hashlib.sha256()
    while data := os.read(fd, _STEP):
        digest.update(data)
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("library", help="one library, e.g. libcublas.so.13; all of its code")
    parser.add_argument("site", help="a folder with many libraries; what one arch loads")
    parser.add_argument("--before", type=Path, required=True, help="the tree of an earlier commit")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument(
        "--to", type=Path, help="folder for links and results; default: that of SITE"
    )
    parser.add_argument("--cuobjdump", default="cuobjdump", help="default: the one on the PATH")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="let it dump N cubins alone, and extrapolate"
    )
    parser.add_argument("--repeat", type=int, default=3, help="the best of N is shown")
    arguments = parser.parse_args()
    device = ComputeCapability.parse(arguments.arch)
    before, site = arguments.before, str(Path(arguments.site).resolve())
    to = arguments.to or Path(site).parent
    # As if installed: an environment may forbid to write bytecode, and compiling takes 0.2 s.
    for tree in (_HERE, before):
        compileall.compile_dir(tree / "pytest_negativa", quiet=2)
    print_load()
    cases: dict[str, Callable[[], list[float]]] = {
        "inspect --kernels, one library": lambda: inspect_costs(arguments.library, None, before),
        f"inspect --kernels --arch {device}": lambda: inspect_costs(site, device, before),
        f"slim --arch {device}": lambda: slim_costs(site, device, before, to),
    }
    rows = []
    for name, case in cases.items():
        turns = [case() for _ in range(arguments.repeat)]
        floor, now, then = (min(column) for column in zip(*turns, strict=True))
        rows.append([name, now, floor, now / floor, then, now / then, None, None])
    published = published_procedure(
        arguments.cuobjdump, Path(arguments.library), sample=arguments.sample
    )
    rows[0][-2:] = [published.cpu_s, published.cpu_s / rows[0][1]]
    headers = ["CPU time in s", "now", "floor", "now/floor", "earlier", "now/earlier"]
    headers += ["published", "published/now"]
    print(tabulate(rows, headers, tablefmt="github", floatfmt=".2f"))
    print_load()


if __name__ == "__main__":
    main()
