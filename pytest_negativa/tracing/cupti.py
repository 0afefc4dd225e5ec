"""The detector of the test process: cupti-python, its versions, and other tools that hold CUPTI.

No other module imports ``cupti``. It works with cupti-python 13.0 up to the newest, and enables
only single callback ids of the driver API. A whole domain makes a training loop ten times slower.
In the RESOURCE domain the driver holds a lock; a Python callback needs the GIL and hangs under it.
If another tool holds CUPTI, ``suspects`` says which, as far as this shows without asking CUPTI.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

from pytest_negativa.devices import driver_initialised
from pytest_negativa.models.settings import TraceLevel
from pytest_negativa.models.trace import Context, ImageForm, Phase
from pytest_negativa.storage.system import ProcessMemory
from pytest_negativa.tracing.children import injection_library
from pytest_negativa.tracing.detector import TraceError, TracerBusy, TracerUnavailable
from pytest_negativa.tracing.drivercalls import (
    DRIVER_CALLS,
    LINK_SIZE_SLOT,
    Action,
    DriverCall,
)
from pytest_negativa.tracing.images import (
    UNKNOWN_IMAGE,
    FoundImage,
    ImageResolver,
    identify_file_image,
)
from pytest_negativa.tracing.kineto import before_first_profile
from pytest_negativa.tracing.launches import LaunchCounter
from pytest_negativa.tracing.mappings import Mappings
from pytest_negativa.tracing.recorder import Recorder
from pytest_negativa.tracing.trace_files import TraceWriter

# CUpti_CallbackData in cupti_callbacks.h, 64-bit hosts: i32 callbackSite (padded),
# functionName, functionParams, functionReturnValue; at 64 the u32 correlationId.
_CALLBACK_DATA = struct.Struct("<i4xQQQ")
_CORRELATION_ID = 64
_DRIVER_GET_VERSION = 2  # CUPTI_DRIVER_TRACE_CBID_cuDriverGetVersion in cupti_driver_cbid.h
_API_EXIT = 1
_SUCCESS = b"\0\0\0\0"  # CUDA_SUCCESS in cuda.h
_DOMAIN_DRIVER_API = 1
_SLOT = 8
_SUBSCRIBER_NAME = "pytest-negativa"
# CUpti_SubscriberParams in cupti_callbacks.h: a size_t, two pointers, a size_t; from CUDA 13.3 on
# also a byte that asks to be one of several subscribers.
_SUBSCRIBER_PARAMS_SIZE = 32
_SHARING_PARAMS_SIZE = 33
_ERROR_INVALID_PARAMETER = 1
_ERROR_MULTIPLE_SUBSCRIBERS = 39

_CALLS = {call.cbid: call for call in DRIVER_CALLS}

_string_at = ctypes.string_at
_from_bytes = int.from_bytes

Handler = Callable[[bytes], None]


class CuptiDetector:
    """Traces this process by callbacks in Python. See ``Detector``."""

    def __init__(
        self,
        writer: TraceWriter,
        *,
        level: TraceLevel = TraceLevel.LOOKUP,
        environ: MutableMapping[str, str] = os.environ,
    ) -> None:
        self._writer = writer
        self._memory = ProcessMemory()
        self._mappings = Mappings()
        self._images = ImageResolver(self._memory, self._mappings)
        self._recorder = Recorder(writer, self._mappings)
        self._environ = environ
        self._level = level
        self._launches: LaunchCounter | None = None
        self._cupti: Any = None
        self._subscriber: int | None = None
        self._stopped = False
        self._pid = os.getpid()
        self._child_can_use_cuda = False
        self._profiler_known = False
        # By callback id: slots to read, what to do with them, and whether that is done before the
        # driver does it. Unloading is: afterwards the driver may give the handle to another thread.
        # Anything else once it is known whether it worked.
        self._handlers: dict[int, tuple[int, Handler, bool]] = {
            call.cbid: (
                _SLOT * _slots(call),
                partial(self._ACTIONS[call.action], self, call),
                call.action is Action.UNLOAD,
            )
            for call in DRIVER_CALLS
        }

    def start(self) -> None:
        try:
            from cupti import cupti
        except ImportError as e:
            raise TracerUnavailable(
                f"cupti-python can't be imported ({e}); install pytest-negativa[cu13]"
            ) from e
        self._cupti = cupti
        self._subscribe()
        os.register_at_fork(before=self._before_fork, after_in_child=self._forked)

    def set_context(self, context: Context) -> None:
        launches = self._launches
        if launches is not None and self._subscriber is not None:
            launches.begin(context)
            self._take_launches(launches, context)
        self._recorder.set_context(context)
        if not self._profiler_known:
            self._profiler_known = before_first_profile(self._step_aside)

    def _take_launches(self, launches: LaunchCounter, context: Context) -> None:
        # In a hook at the session's end, the process may end.
        last = context.phase is Phase.SESSION and context.detail is not None
        if last or launches.is_due:
            self._recorder.launches(launches.take(all_of_them=last))

    def drain(self) -> None:
        self._recorder.libraries(self._mappings.new_libraries())
        launches = self._launches
        if launches is not None and self._subscriber is not None:
            self._take_launches(launches, self._recorder.context)

    def pause(self, reason: str) -> None:
        if self._subscriber is not None:
            self._recorder.gap_begins(reason)
            self._unsubscribe()

    def resume(self) -> None:
        if self._subscriber is None and not self._stopped and self._take_again("a pause"):
            self._recorder.gap_ends()

    def _step_aside(self, act: Callable[[], None]) -> None:
        """Release CUPTI for ``act``, which uses no code of a library."""
        if self._subscriber is None:
            return
        self._unsubscribe()
        try:
            act()
        finally:
            if self._launches is not None:
                # Both receive the records of kernels by the one callback that CUPTI has for them.
                self._launches, self._level = None, TraceLevel.LOOKUP
                text = "torch.profiler receives the records of launches from its first use on"
                self._recorder.warn("launches-unavailable", text)
            self._take_again("torch.profiler began")

    def _take_again(self, after: str) -> bool:
        try:
            try:
                self._subscribe()
            except TracerBusy:
                # Kineto (torch.profiler) never gives CUPTI back. Detached, it still works.
                self._cupti.finalize()
                self._subscribe()
        except (TraceError, self._cupti.cuptiError) as e:
            self._recorder.warn("cupti-taken", f"after {after}: {e}", incomplete=True)
        return self._subscriber is not None

    def warn(self, code: str, text: str, *, incomplete: bool = False) -> None:
        self._recorder.warn(code, text, incomplete=incomplete)

    def stop(self) -> None:
        if self._stopped or os.getpid() != self._pid:
            return
        self._stopped = True
        self.drain()
        if self._subscriber is not None:
            self._unsubscribe()
        self._recorder.end()

    def _subscribe(self) -> None:
        cupti = self._cupti
        parameters = cupti.SubscriberParams()
        parameters.subscriber_name = _SUBSCRIBER_NAME
        try:
            subscriber = self._take(parameters)
        # cupti-python looks for libcuda and libcupti now. Its error is then a RuntimeError.
        except (cupti.cuptiError, RuntimeError) as e:
            if getattr(e, "status", None) == _ERROR_MULTIPLE_SUBSCRIBERS:
                self._mappings.refresh()
                raise TracerBusy(
                    busy_message(
                        parameters.old_subscriber_name or None,
                        self._mappings.libraries(),
                        self._environ,
                    )
                ) from e
            raise TracerUnavailable(f"CUPTI refuses to work here: {e}") from e
        self._subscriber = subscriber
        self._enable(1, subscriber)
        if self._level.counts_launches:
            self._start_counting()

    def _take(self, parameters: Any) -> int:
        """Subscribe beside others, or alone where CUPTI is older than 13.3."""
        if hasattr(parameters, "allow_multiple_subscribers"):
            # cupti-python 13.4 only reads this member.
            ctypes.memset(parameters.ptr + _SUBSCRIBER_PARAMS_SIZE, 1, 1)
            parameters.struct_size = _SHARING_PARAMS_SIZE
            try:
                return int(self._cupti.subscribe_v2(self._on_call, None, parameters.ptr))
            except self._cupti.cuptiError as e:
                # cupti-python knows the byte; the CUPTI that torch has loaded before may not.
                if e.status != _ERROR_INVALID_PARAMETER:
                    raise
        parameters.struct_size = _SUBSCRIBER_PARAMS_SIZE
        return int(self._cupti.subscribe_v2(self._on_call, None, parameters.ptr))

    def _start_counting(self) -> None:
        # CUPTI is loaded by now.
        in_ranges = self._level is TraceLevel.RANGE
        try:
            counter = self._launches or LaunchCounter(in_ranges=in_ranges, environ=self._environ)
            self._cupti.enable_callback(
                1, self._subscriber, _DOMAIN_DRIVER_API, _DRIVER_GET_VERSION
            )
            lacking = counter.start(self._recorder.context)
        except (TracerUnavailable, self._cupti.cuptiError) as e:
            self._launches, lacking = None, ("launches-unavailable", str(e))
        else:
            self._launches = counter
        if lacking is not None:
            self._recorder.warn(*lacking)

    def _unsubscribe(self) -> None:
        subscriber, self._subscriber = self._subscriber, None
        if self._launches is not None:
            self._recorder.launches(self._launches.take(all_of_them=True))
            self._launches.stop()
        # First no more callbacks, then none that still runs: a callback that comes when the
        # interpreter is gone is a segmentation fault.
        self._enable(0, subscriber)
        # If another tool has detached CUPTI, the warning says so.
        with contextlib.suppress(self._cupti.cuptiError):
            self._cupti.enable_callback(0, subscriber, _DOMAIN_DRIVER_API, _DRIVER_GET_VERSION)
        with contextlib.suppress(self._cupti.cuptiError):
            self._cupti.unsubscribe(subscriber)

    def _enable(self, on: int, subscriber: int | None) -> None:
        problem: str | None = None
        for call in DRIVER_CALLS:
            try:
                self._cupti.enable_callback(on, subscriber, _DOMAIN_DRIVER_API, call.cbid)
            except self._cupti.cuptiError as e:
                problem = problem or f"CUPTI does not show {call.name}, and perhaps others: {e}"
        if problem is not None:
            text = f"{problem}; is it too old, or has another tool detached it?"
            self._recorder.warn("cupti-unavailable", text, incomplete=True)

    def _before_fork(self) -> None:
        if not self._stopped:
            self._child_can_use_cuda = not driver_initialised()

    def _forked(self) -> None:
        """In a forked child: don't write the parent's trace, now or at exit.

        If the parent had not yet called ``cuInit``, the child may call it, and CUDA loads the
        native library into the child. That library needs CUPTI, which the copy of the parent's
        subscriber holds until it is released here. If the parent had called ``cuInit``, CUDA
        doesn't work in the child. CUPTI is then left alone: another thread of the parent may have
        held its locks.
        """
        if self._stopped:
            return
        self._stopped = True
        # To count, CUPTI would wait for its threads, which are the parent's.
        self._launches = None
        self._writer.abandon()
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None and self._child_can_use_cuda:
            self._cupti.unsubscribe(subscriber)

    # Callbacks. None of them may raise: no caller could catch it.

    def _on_call(self, _user: object, _domain: int, cbid: int, data: Any) -> None:
        # Inside a driver call, no collection: it would run finalizers, which call the driver.
        collects = gc.isenabled()
        gc.disable()
        try:
            if cbid == _DRIVER_GET_VERSION:
                if self._launches is not None:
                    number = _string_at(data.ptr + _CORRELATION_ID, 4)
                    self._launches.called(_from_bytes(number, "little"))
                return
            site, _name, parameters, result = _CALLBACK_DATA.unpack(_string_at(data.ptr, 32))
            size, handler, at_entry = self._handlers[cbid]
            if at_entry is (site == _API_EXIT):
                return
            code = _SUCCESS if at_entry else _string_at(result, 4)
            if code == _SUCCESS:
                handler(_string_at(parameters, size))
            else:
                self._refuse(cbid, _from_bytes(code, "little"), _string_at(parameters, size))
        except Exception as e:
            self._recorder.warn(
                "callback-failed", f"driver call {cbid}: {type(e).__name__}: {e}", incomplete=True
            )
        except BaseException as e:
            # A signal's handler (Ctrl-C, a time limit) raised in here, of all places.
            self._recorder.warn(
                "callback-interrupted",
                f"driver call {cbid}: {type(e).__name__}",
                incomplete=True,
            )
            _raise_later(e)
        finally:
            if collects:
                gc.enable()

    def _refuse(self, cbid: int, code: int, slots: bytes) -> None:
        call = _CALLS[cbid]
        subject, handle = _slot(slots, call.subject), _slot(slots, call.handle)
        if call.action in (Action.KERNEL, Action.DATA):
            name = self._memory.read_string(subject)
            self._recorder.refused(call.name, code, handle=handle, name=name)
        elif call.action in (Action.LOAD, Action.LINK_DATA):
            self._recorder.refused(call.name, code, place=self._images.locate(subject))
        elif call.action is Action.ENUMERATE:
            self._recorder.refused(call.name, code, handle=handle)
        elif call.action is Action.MODULE_OF_LIBRARY:
            self._recorder.refused(call.name, code, handle=subject)

    def _load(self, call: DriverCall, slots: bytes) -> None:
        handle = self._pointee(_slot(slots, call.handle))
        self._recorder.loaded(call.name, handle, self._image(call, slots))

    def _unload(self, call: DriverCall, slots: bytes) -> None:
        self._recorder.unloaded(_slot(slots, call.handle))

    def _kernel(self, call: DriverCall, slots: bytes) -> None:
        # The driver has just read this name; it is there. It is compared by its letters, not
        # by its address, where another name may lie tomorrow.
        name = _string_at(_slot(slots, call.subject))
        self._recorder.kernel(call.name, _slot(slots, call.handle), name)

    def _data(self, call: DriverCall, slots: bytes) -> None:
        address = _slot(slots, call.subject)
        if call.kind is not None and address:
            name = _string_at(address)
            self._recorder.data(call.name, _slot(slots, call.handle), name, call.kind)

    def _enumerate(self, call: DriverCall, slots: bytes) -> None:
        self._recorder.enumerated(call.name, _slot(slots, call.handle))

    def _module_of_library(self, call: DriverCall, slots: bytes) -> None:
        library = _slot(slots, call.subject)
        module = self._pointee(_slot(slots, call.handle))
        self._recorder.enumerated(call.name, library)
        if module is not None:
            self._recorder.alias(call.name, module, library)

    def _link(self, call: DriverCall, slots: bytes) -> None:
        image = self._recorder.loaded(call.name, None, self._image(call, slots))
        # The linker takes what it wants of it.
        self._recorder.whole_image_used(call.name, image)

    def _link_complete(self, call: DriverCall, slots: bytes) -> None:
        output = self._pointee(_slot(slots, call.subject))
        size = self._pointee(_slot(slots, call.handle))
        if output and size:
            image = self._images.hashed(ImageForm.LINKED, output, size)
            self._recorder.loaded(call.name, None, image)

    _ACTIONS = {  # noqa: RUF012
        Action.LOAD: _load,
        Action.LOAD_FILE: _load,
        Action.UNLOAD: _unload,
        Action.KERNEL: _kernel,
        Action.DATA: _data,
        Action.ENUMERATE: _enumerate,
        Action.MODULE_OF_LIBRARY: _module_of_library,
        Action.LINK_DATA: _link,
        Action.LINK_FILE: _link,
        Action.LINK_COMPLETE: _link_complete,
    }

    def _image(self, call: DriverCall, slots: bytes) -> FoundImage:
        """The image that a call hands over: at an address, or in a file."""
        address = _slot(slots, call.subject)
        if call.action is Action.LOAD:
            return self._images.resolve(address)
        if call.action is Action.LINK_DATA:
            return self._images.resolve_bare(address, _slot(slots, LINK_SIZE_SLOT))
        name = self._memory.read_string(address)
        return UNKNOWN_IMAGE if name is None else identify_file_image(os.fsdecode(name))

    def _pointee(self, address: int) -> int | None:
        data = self._memory.read_exactly(address, 8)
        return None if data is None else _from_bytes(data, "little")


def _slot(slots: bytes, index: int) -> int:
    return _from_bytes(slots[_SLOT * index : _SLOT * index + _SLOT], "little")


def _slots(call: DriverCall) -> int:
    """Number of a call's parameters to read; never more than it has."""
    last = max(call.handle, call.subject)
    return 1 + (max(last, LINK_SIZE_SLOT) if call.action is Action.LINK_DATA else last)


def _raise_later(error: BaseException) -> None:
    """Raise in this thread, once it is back in Python code, what a signal's handler raised."""
    kind = type(error)
    arguments = error.args

    def again(self: BaseException) -> None:
        kind.__init__(self, *arguments)

    # The interpreter takes a class only, and calls it without arguments.
    same = type(kind.__name__, (kind,), {"__init__": again, "__module__": kind.__module__})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(threading.get_ident()), ctypes.py_object(same)
    )


def cupti_version() -> str:
    """The detector's name for trace files."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"cupti-python {version('cupti-python')}"
    except PackageNotFoundError:
        return "cupti-python"


# (part of a file name among the mapped libraries, the tool it belongs to)
_LIBRARIES = (
    ("libToolsInjection", "NVIDIA Nsight Systems (nsys)"),
    ("libnvda-injection", "NVIDIA Nsight Systems (nsys)"),
    ("nvperf-target-injection", "NVIDIA Nsight Compute (ncu)"),
    ("libcuda-injection", "NVIDIA Nsight Compute (ncu)"),
    ("libsanitizer-collection", "compute-sanitizer"),
    ("libTreeLauncherTargetInjection", "an NVIDIA Nsight launcher"),
    ("libcudadebugger", "cuda-gdb"),
    ("libproton", "Triton's Proton profiler"),
    ("libnvbit", "NVBit"),
    ("libscorep", "Score-P"),
)
# CUDA_INJECTION64_PATH is not among them: in a traced process it is ours, and what the user had
# set there stands in the other one.
_VARIABLES = (
    ("NEGATIVA_CHAINED_INJECTION", "the library in CUDA_INJECTION64_PATH"),
    ("NVTX_INJECTION64_PATH", "the library in NVTX_INJECTION64_PATH"),
    ("NSYS_PROFILING_SESSION_ID", "NVIDIA Nsight Systems (nsys)"),
    ("NV_NSIGHT_INJECTION_TRANSPORT_TYPE", "an NVIDIA Nsight tool"),
    ("NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT", "NVIDIA Nsight Compute (ncu)"),
)


def suspects(libraries: Iterable[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Tools that leave traces in this process, likeliest first."""
    found = dict.fromkeys(
        tool for library in libraries for part, tool in _LIBRARIES if part in library
    )
    for variable, tool in _VARIABLES:
        value = environ.get(variable)
        # At level range, NVTX's variable names the native library.
        if value and value != str(injection_library()):
            found[f"{tool} ({value})" if "library in" in tool else tool] = None
    if not found and any("libkineto" in x or "libtorch_cpu" in x for x in libraries):
        found["torch.profiler, if it is running in this process"] = None
    return tuple(found)


def busy_message(
    subscriber: str | None, libraries: Iterable[str], environ: Mapping[str, str]
) -> str:
    """Name the tools that may hold CUPTI."""
    # CUPTI 13.0 puts it so for a tool that gave no name, as Kineto (torch.profiler) does.
    who = [f'"{subscriber}"'] if subscriber and "<not provided>" not in subscriber else []
    who += suspects(libraries, environ)
    return (
        "CUPTI serves one tool at a time and is taken by "
        f"{' or '.join(who) or 'a tool that leaves no other trace'}; run without it to trace"
    )
