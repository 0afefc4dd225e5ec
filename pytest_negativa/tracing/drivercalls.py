"""The driver calls that can bring an image, a kernel or a variable in.

A table; ``tracing.cupti`` handles the calls and ``tracing.recorder`` writes the records.

Callback ids: ``CUpti_driver_api_trace_cbid`` in CUPTI's cupti_driver_cbid.h; they never change
once given. Parameters: ``<function>_params_st`` in generated_cuda_meta.h of CUDA 13.0. On
64-bit hosts each member of these structures takes a slot of 8 bytes: an ``unsigned int`` is
padded, for a pointer follows. So the numbers of its slots describe a call.

Not here, because they tell nothing new: ``cuKernelGetFunction`` (the kernel was looked up
before; a suite of 1,422 tests called it 63,939 times), ``cuKernelGetLibrary`` and launches.
"""

from __future__ import annotations

import enum
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

DRIVER_CALLS = (
    DriverCall(18, "cuModuleLoad", Action.LOAD_FILE, 0, 1),
    DriverCall(19, "cuModuleLoadData", Action.LOAD, 0, 1),
    DriverCall(20, "cuModuleLoadDataEx", Action.LOAD, 0, 1),
    DriverCall(21, "cuModuleLoadFatBinary", Action.LOAD, 0, 1),
    DriverCall(22, "cuModuleUnload", Action.UNLOAD, 0, 0),
    DriverCall(23, "cuModuleGetFunction", Action.KERNEL, 1, 2),
    DriverCall(24, "cuModuleGetGlobal", Action.DATA, 2, 3, DataKind.GLOBAL),
    DriverCall(26, "cuModuleGetTexRef", Action.DATA, 1, 2, DataKind.TEXTURE),
    DriverCall(190, "cuModuleGetSurfRef", Action.DATA, 1, 2, DataKind.SURFACE),
    DriverCall(241, "cuModuleGetGlobal_v2", Action.DATA, 2, 3, DataKind.GLOBAL),
    DriverCall(363, "cuLinkAddData", Action.LINK_DATA, 0, 2),
    DriverCall(364, "cuLinkAddFile", Action.LINK_FILE, 0, 2),
    DriverCall(365, "cuLinkComplete", Action.LINK_COMPLETE, 2, 1),
    DriverCall(382, "cuLinkAddData_v2", Action.LINK_DATA, 0, 2),
    DriverCall(383, "cuLinkAddFile_v2", Action.LINK_FILE, 0, 2),
    DriverCall(678, "cuLibraryLoadData", Action.LOAD, 0, 1),
    DriverCall(679, "cuLibraryLoadFromFile", Action.LOAD_FILE, 0, 1),
    DriverCall(680, "cuLibraryUnload", Action.UNLOAD, 0, 0),
    DriverCall(681, "cuLibraryGetKernel", Action.KERNEL, 1, 2),
    DriverCall(682, "cuLibraryGetModule", Action.MODULE_OF_LIBRARY, 0, 1),
    DriverCall(684, "cuLibraryGetGlobal", Action.DATA, 2, 3, DataKind.GLOBAL),
    DriverCall(685, "cuLibraryGetManaged", Action.DATA, 2, 3, DataKind.MANAGED),
    DriverCall(700, "cuLibraryGetUnifiedFunction", Action.DATA, 1, 2, DataKind.UNIFIED_FUNCTION),
    DriverCall(738, "cuModuleEnumerateFunctions", Action.ENUMERATE, 2, 2),
    DriverCall(740, "cuLibraryEnumerateKernels", Action.ENUMERATE, 2, 2),
)
