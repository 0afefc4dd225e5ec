"""``negativa slim`` on a copy of a whole site-packages folder: time, memory and sizes.

Takes a folder and a lock made for what is in it. The copy is made first, so that all is in the
page cache. Then: slimming by the lock, others stripped; the same again, which finds nothing to do;
what is left of the libraries. And the same without loading the results, without the code of
libraries that were never loaded, with archs for what the lock doesn't have, and by archs alone,
each on another copy.

Run: python benchmarks/slim_stack.py SITE_PACKAGES negativa.lock [--arch sm_90] [--to FOLDER]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import print_load, run, warm_up


def _libraries(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*.so*") if not path.is_symlink())
    return [path for path in found if path.is_file() and path.open("rb").read(4) == b"\x7fELF"]


def _size(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _measure(site: Path, to: Path | None, name: str, words: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=to) as scratch:
        copy = Path(scratch, "site-packages")
        subprocess.run(["cp", "-a", "--reflink=auto", site, copy], check=True)
        libraries = _libraries(copy)
        warm_up(libraries)
        before = _size(libraries)
        for title in (name, f"{name}, again"):
            code = "import sys; from pytest_negativa.cli.main import main; main(sys.argv[1:])"
            command = [sys.executable, "-c", code, "slim", *words, str(copy)]
            print(f"{title:16} {run(command)}")
        after = _size(libraries)
        print(
            f"{name:16} {len(libraries)} libraries, {before / 1e6:,.1f} -> {after / 1e6:,.1f} MB, "
            f"{100 * after / before:.1f}%"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("lock", type=Path)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--to", type=Path, help="folder on the file system to work on")
    arguments = parser.parse_args()
    print_load()
    lock = ["--lock", str(arguments.lock), "--strip-others"]
    _measure(arguments.site, arguments.to, "lock", lock)
    _measure(arguments.site, arguments.to, "never loaded", [*lock, "--never-loaded"])
    archs = ["--arch", arguments.arch, "--strip-others"]
    _measure(arguments.site, arguments.to, "lock and archs", [*lock[:2], *archs])
    _measure(arguments.site, arguments.to, "archs", archs)


if __name__ == "__main__":
    main()
