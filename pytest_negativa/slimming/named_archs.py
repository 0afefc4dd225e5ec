"""Archs that a user names for a library whose CUDA can't compile for them: a mistake, usually."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_negativa.arch import OLDEST_DEVICES, ComputeCapability, SmArch
from pytest_negativa.errors import FormatError, OptionError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.gpucode.toolkit import cuda_major
from pytest_negativa.models.library import Scope
from pytest_negativa.reporting.units import format_items
from pytest_negativa.slimming.recipes import Kind
from pytest_negativa.slimming.worklist import Task

_LATEST = max(OLDEST_DEVICES.values())


def names_of(devices: Iterable[ComputeCapability]) -> str:
    """The archs of devices in words: ``sm_80, sm_90``."""
    return ", ".join(str(SmArch(device.major, device.minor)) for device in devices)


def refuse_impossible(tasks: Iterable[Task], devices: Sequence[ComputeCapability]) -> None:
    """Refuse devices that are too old for the CUDA of a library, which has no code for them.

    Later devices are no mistake: they may compile the library's PTX.

    Args:
        tasks: the libraries to slim.
        devices: what the user named.

    Raises:
        OptionError: a library can't have code for one of the devices; nothing was done.
    """
    old = [device for device in devices if device < _LATEST]
    found = [
        text
        for task in tasks
        if old and task.recipe.kind is Kind.ARCHS and (text := _why_impossible(task, old))
    ]
    if found:
        count = format_items(len(found) - 1, "more library", "more libraries")
        more = f" (and {count})" if len(found) > 1 else ""
        raise OptionError(
            f"--arch: {found[0]}{more}; check the name of the arch, or pass --force-arch to slim "
            "all the same"
        )


def _why_impossible(task: Task, old: Sequence[ComputeCapability]) -> str | None:
    try:
        library_map = read_library(task.source, Scope(headers_only=True))
        with ByteSource(task.source) as source:
            major = cuda_major(source, library_map)
    except FormatError:
        return None  # Slimming leaves it alone, and says why.
    oldest = OLDEST_DEVICES.get(major or 0)
    if oldest is None:
        return None
    bad = [d for d in old if d < oldest and not library_map.loaded_starts((d,))]
    if not bad:
        return None
    return (
        f"{task.source} was compiled by CUDA {major}, whose oldest GPUs are {names_of([oldest])}, "
        f"and has no code for {names_of(bad)}"
    )
