"""The CPU that this process runs on."""

from __future__ import annotations

from pathlib import Path

from pytest_negativa.models.hostcode import Processor


def read_processor(path: Path = Path("/proc/cpuinfo")) -> Processor:
    """The first processor of ``/proc/cpuinfo``, see proc(5); an unknown one if it can't be read."""
    fields: dict[str, str] = {}
    try:
        text = path.read_text("utf-8", "replace")
    except OSError:
        text = ""
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    return Processor(
        model=fields.get("model name", "unknown"),
        flags=tuple(sorted(fields.get("flags", "").split())),
    )
