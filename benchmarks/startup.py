"""What the package costs before it does anything: imports, and a library without GPU code."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from measuring import print_load

NEGATIVA = Path(sysconfig.get_path("scripts")) / "negativa"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "library", type=Path, nargs="?", help="one without GPU code; default: Python's _ssl module"
    )
    parser.add_argument("--repeat", type=int, default=30)
    arguments = parser.parse_args()
    library = arguments.library or default_library()
    print_load()
    python = [sys.executable, "-c"]
    contenders = {
        "python -c pass": [*python, "pass"],
        "import pytest_negativa": [*python, "import pytest_negativa"],
        "negativa --help": [str(NEGATIVA), "--help"],
        f"negativa inspect {library.name}": [str(NEGATIVA), "inspect", "--no-cache", str(library)],
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.repeat + 1):
            for name, command in contenders.items():
                start = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
                # The first turn warms up the files' cache.
                if turn:
                    times[name].append((time.perf_counter() - start) * 1000)
    bare = statistics.median(times["python -c pass"])
    print(f"medians of {arguments.repeat}, in ms; the last column is beyond a bare interpreter")
    for name, figures in times.items():
        median = statistics.median(figures)
        print(f"{name:40} {median:7.1f}  (best {min(figures):.1f})  +{median - bare:.1f}")


def default_library() -> Path:
    import _ssl

    return Path(_ssl.__file__)


if __name__ == "__main__":
    main()
