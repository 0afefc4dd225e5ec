"""What the workloads share: arguments, the seed, and comparing results with those of the first run.

The exit status of a workload is all that a verification sees. So the first run writes its results
down, and every later run compares its own with them and fails where they differ: a copy of a
library that computes something else does not pass for one that works.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEED = 20250512
# Sums by atomic additions have no fixed order on a GPU; wrong code gives other numbers altogether.
_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Arguments:
    """``steps`` is training steps, or batches or tokens of inference."""

    mode: str
    device: str
    steps: int
    batch: int
    result: Path | None

    @property
    def training(self) -> bool:
        return self.mode == "train"


def parse(description: str, modes: Sequence[str] = ("train", "inference")) -> Arguments:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("mode", choices=modes)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--result", type=Path, help="compare with this file; write it if not there")
    return Arguments(**vars(parser.parse_args()))


def finish(arguments: Arguments, values: Sequence[float]) -> None:
    """Print the results, and compare them with the first run's.

    Raises:
        SystemExit: a result is not a finite number, or not what it was.
    """
    print(" ".join(f"{value:.6g}" for value in values))
    if not values or not all(map(math.isfinite, values)):
        raise SystemExit(f"results are not finite: {values}")
    path = arguments.result
    if path is None:
        return
    if not path.exists():
        written = path.with_name(f".{path.name}.{os.getpid()}")
        written.write_text(json.dumps(list(values)))
        written.rename(path)
        return
    expected = json.loads(path.read_text())
    same = len(expected) == len(values) and all(
        math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        for a, b in zip(expected, values, strict=True)
    )
    if not same:
        raise SystemExit(f"results differ: expected {expected} from {path}, found {list(values)}")
