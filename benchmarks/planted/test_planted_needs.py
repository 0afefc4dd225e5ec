"""One test for each planted need: what it does, it does on copies alone, and swallows the error.

``benchmarks/planted_needs.py`` puts this file and ``planted_driver.py`` beside a suite, with
``planted_needs.json``: how many needs there are, and, once the suite was traced, which.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import planted_driver  # type: ignore[import-not-found, unused-ignore]
import pytest

PLANTED: dict[str, Any] = json.loads(Path(__file__).with_name("planted_needs.json").read_text())


@pytest.mark.parametrize("number", range(PLANTED["count"]))
def test_need(number: int) -> None:
    """Does nothing when traced, for nothing is planted then, nor on an original."""
    if number >= len(PLANTED["needs"]):
        return
    need = PLANTED["needs"][number]
    result = "begun"
    begin = time.monotonic()
    try:
        result = meet(need)
    except Exception as e:
        result = f"{type(e).__name__}: {e}"
    finally:
        log(number, need, f"{result}, {time.monotonic() - begin:.2f} s")


def meet(need: dict[str, Any]) -> str:
    """Do what the need is; returns what came of it, in words."""
    # The address of the library comes first in struct link_map, see <link.h>.
    base = ctypes.c_size_t.from_address(ctypes.CDLL(need["library"])._handle).value
    mapped = mapped_file(base + need["address"])
    if not mapped.startswith(f"{PLANTED['copies']}/"):
        return f"nothing done, not on a copy but on {mapped or 'no file'}"
    log(need["number"], need, "begins")
    address, size, kind = base + need["address"], need["size"], need["kind"]
    if kind == "mapping":
        return f"read, {len(set(ctypes.string_at(address, size)))} different bytes"
    if kind == "ordinary":
        return str(planted_driver.look_up(base + need["region_address"], need["kernel"]))
    if kind == "memory":
        return str(planted_driver.load_module(copied(address, size, need["header_size"])))
    image = copied(address, size, need["header_size"]) if need["packed"] else None
    return str(planted_driver.link(address, size, image, need["arch"]))


def copied(address: int, size: int, header_size: int) -> bytes:
    """A copy of an element as a fatbin of its own, or of what lies in no region."""
    if not header_size:
        return ctypes.string_at(address, size)
    element = ctypes.string_at(address - header_size, header_size + size)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(element)) + element


def mapped_file(address: int) -> str:
    """The file that is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        start, end = (int(word, 16) for word in span.split("-"))
        if start <= address < end:
            return path if path.startswith("/") else ""
    return ""


def log(number: int, need: dict[str, Any], result: str) -> None:
    """Add a line to the log, which outlives this process."""
    where = f"{Path(need['library']).name} {need['offset']:#x} +{need['size']}"
    name = Path(os.environ.get("NEGATIVA_ROUND", "no round")).parent.name
    line = f"{name} need {number} {need['kind']} {where}: {result}\n"
    file = os.open(PLANTED["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)
