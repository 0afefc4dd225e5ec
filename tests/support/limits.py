"""Limits that a program or a suite on the stand-in for a GPU just keeps, and just crosses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pytest_negativa.settings.options import BY_NAME

# Of libquickstart.so, kernels of two regions are used.
REGIONS = (0, 1)
_FIGURES = [
    ("max-gpu-code", "67200", "67199", "max_gpu_code: there are 67,200 bytes of GPU code, the"),
    ("max-gpu-code", "*=67200", "*=67199", "lib.so: max_gpu_code: there are 67,200"),
    ("max-unused-percent", "93.87", "93.86", "max_unused_percent: 93.9% of the GPU code is"),
    ("max-unused-percent", "*=93.87", "*=93.86", "lib.so: max_unused_percent: 93.9% of"),
    ("min-used-kernels", "2", "3", "min_used_kernels: 2 kernels are used, the limit is 3"),
    ("min-used-kernels", "*=2", "*=3", "lib.so: min_used_kernels: 2 kernels are used, the"),
    ("fail-under", "15.38", "15.39", "fail_under: 15.38% (2 of 13) of the project's kernels"),
    ("fail-under", "*=15.38", "*=15.39", "fail_under: 15.38% (2 of 13) of lib.so"),
]
_GROWTH = {
    "size": ("10.93%", "10.92%", "size grew: 80.0 kB -> 88.7 kB (+8.7 kB, +10.9%)"),
    "code": ("200", "199", "code grew: 67.0 kB -> 67.2 kB (+200 B, +0.3%)"),
    "unused": ("100", "99", "unused grew: 63.0 kB -> 63.1 kB (+100 B, +0.2%)"),
    "new-kernels-untested": ("1", "0", "1 new kernel is untested (image_blur), the limit is 0"),
}
_BASELINE = "earlier.json"


def write_baseline(folder: Path, written: dict[str, Any]) -> None:
    """Write a baseline from which the run that one was written of grew a little."""
    (library,) = written["libraries"]
    library["size"] = 80_000
    library["code_bytes"] -= 200
    library["unused"][0]["bytes"] -= 100
    [covered] = written["coverage"]
    covered["kernels"] = [one for one in covered["kernels"] if one["name"] != "image_blur"]
    (folder / _BASELINE).write_text(json.dumps(written))


def kept_limits(prefix: str = "") -> list[str]:
    """A flag for each limit, which is just kept."""
    return _flags(prefix, 0)


def crossed_limits(prefix: str = "") -> list[str]:
    """A flag for each limit, which is just crossed."""
    return _flags(prefix, 1)


def limits_in_file(flags: Iterable[str]) -> str:
    """The text of ``negativa.yaml`` that sets what the flags set."""
    settings: dict[str, dict[str, Any]] = {}
    names = {option.cli_flag: name for name, option in BY_NAME.items()}
    for flag in flags:
        name, _, value = flag.partition("=")
        section, _, key = names[name].partition(".")
        if key == "baseline":
            settings.setdefault(section, {})[key] = value
        else:
            glob, equals, limits = value.rpartition("=")
            each = [f"{glob}{equals}{limit}" for limit in limits.split(",")]
            settings.setdefault(section, {}).setdefault(key, []).extend(each)
    return json.dumps(settings)


def told_limits() -> list[str]:
    """What is told of each limit that is crossed."""
    growth = [text for *_, text in _GROWTH.values()]
    return [
        *(text for *_, text in _FIGURES),
        *(f"negativa: compare.fail: {text}" for text in growth),
        *(f"lib.so: compare.fail: {text}" for text in growth),
    ]


def _flags(prefix: str, side: int) -> list[str]:
    growth = ",".join(f"{name}:{found[side]}" for name, found in _GROWTH.items())
    return [
        *(f"--{prefix}{name}={found[side]}" for name, *found in _FIGURES),
        f"--{prefix}compare={_BASELINE}",
        f"--{prefix}compare-fail={growth}",
        f"--{prefix}compare-fail=*={growth}",
    ]
