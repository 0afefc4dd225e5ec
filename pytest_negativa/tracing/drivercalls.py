"""The driver calls that can bring an image, a kernel or a variable in: ids and parameters.

The table is ``driver_calls.h``, which ``injection.c`` has, too. ``tracing.cupti`` handles the calls
and ``tracing.recorder`` writes the records.

Callback ids: ``CUpti_driver_api_trace_cbid`` in CUPTI's cupti_driver_cbid.h; they never change
once given. Parameters: ``<function>_params_st`` in generated_cuda_meta.h of CUDA 13.0. On
64-bit hosts each member of these structures takes a slot of 8 bytes: an ``unsigned int`` is
padded, for a pointer follows. So the numbers of its slots describe a call.

Not here, because they tell nothing new: ``cuKernelGetFunction`` (the kernel was looked up
before; a suite of 1,422 tests called it 63,939 times), ``cuKernelGetLibrary`` and launches.
"""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.models.trace import DataKind


class Action(enum.Enum):
    """Effect of a call."""

    LOAD = enum.auto()
    LOAD_FILE = enum.auto()
    UNLOAD = enum.auto()
    KERNEL = enum.auto()
    DATA = enum.auto()
    ENUMERATE = enum.auto()
    MODULE_OF_LIBRARY = enum.auto()
    LINK_DATA = enum.auto()
    LINK_FILE = enum.auto()
    LINK_COMPLETE = enum.auto()


class DriverCall(NamedTuple):
    """A driver call.

    Attributes:
        handle: slot of the library or module, or of the pointer to it where it is an output.
        subject: slot of the image, file name or symbol name.
        kind: of data symbols.
    """

    cbid: int
    name: str
    action: Action
    handle: int
    subject: int
    kind: DataKind | None = None


LINK_SIZE_SLOT = 3
"""``size`` of cuLinkAddData: the bytes at ``data``."""

_ROW = re.compile(r'^CALL\((\d+), (\w+), (\w+), (\d), (\d), (?:NULL|"([\w-]+)")\)$', re.MULTILINE)


DRIVER_CALLS = tuple(
    DriverCall(
        int(cbid),
        name,
        Action[action],
        int(handle),
        int(subject),
        DataKind(kind) if kind else None,
    )
    for cbid, name, action, handle, subject, kind in _ROW.findall(
        Path(__file__).with_name("driver_calls.h").read_text("ascii")
    )
)
