"""Driver calls to records: each image and kernel once, in the context of its first use.

Called from the driver's callbacks, from any thread and possibly one within another (garbage
collection may unload a module while a callback runs). Hence no locks: ``dict.setdefault`` and
``next`` are single steps under the GIL, and a record written twice does no harm.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from pytest_negativa.devices import DriverFacts
from pytest_negativa.models.base import Line
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.trace import (
    EAGER_LOADING,
    Context,
    ContextRecord,
    DataKind,
    DataRecord,
    DeviceRecord,
    EndRecord,
    EnumerationRecord,
    GapEndRecord,
    GapRecord,
    ImageForm,
    ImageRecord,
    KernelRecord,
    LaunchRecord,
    LibraryRecord,
    Phase,
    RefusalRecord,
    TracedLibrary,
    WarningRecord,
)
from pytest_negativa.storage.system import System
from pytest_negativa.tracing.children import OUTER_LACKS, tell_lack
from pytest_negativa.tracing.images import UNKNOWN_IMAGE, FoundImage
from pytest_negativa.tracing.libraries import identify_library, split_deleted, state_of
from pytest_negativa.tracing.mappings import MappedFile, MappedPlace, Mappings
from pytest_negativa.tracing.trace_files import TraceWriter


class Recorder:
    """Writes the records of one process."""

    def __init__(self, writer: TraceWriter, mappings: Mappings) -> None:
        self._writer = writer
        self._mappings = mappings
        self._ids = itertools.count(1)
        self._context = Context(phase=Phase.IMPORT)
        self._contexts: dict[Context, int] = {}
        # By path and state: a file that changes is another library.
        self._libraries: dict[tuple[str, FileState | None], int] = {}
        # What the loader has mapped, as of the last look at all of it.
        self._loaded: dict[MappedFile, int] = {}
        # By path and the inode of the mapping.
        self._seen_files: dict[tuple[str, int], int] = {}
        self._images: dict[object, int] = {}
        self._image_of_handle: dict[int, int] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._devices_known = False
        self._gap = 0
        # Sessions of which a test started this one don't see what this one uses.
        self._outer = tuple(filter(None, os.environ.get(OUTER_LACKS, "").split(",")))

    @property
    def context(self) -> Context:
        """The test and phase that records belong to now."""
        return self._context

    def set_context(self, context: Context) -> None:
        """Note which test and phase the following records belong to."""
        self._context = context
        if context.phase is Phase.SESSION and context.detail is not None:
            # A hook at the session's end. If the process ends in it, its trace says so: such a
            # context is written each time, and before anything is used in it.
            self._contexts.pop(context, None)
            self._context_id()

    def _context_id(self, context: Context | None = None) -> int:
        context = context or self._context
        known = self._contexts.get(context)
        if known is not None:
            return known
        new = next(self._ids)
        # Written before it is known: else a record that another thread writes now could be the
        # last one before a SIGKILL, and lack its context.
        self._writer.write(ContextRecord(id=new, context=context, time_ns=System.time_ns()))
        return self._contexts.setdefault(context, new)

    def library(self, file: MappedFile) -> int:
        """The id of a mapped file; its first mention writes its record."""
        return self._loaded.get(file) or self._identify(file)

    def libraries(self, files: Iterable[MappedFile]) -> None:
        """Note mapped libraries, and whether files changed that are known."""
        for file in sorted(files):
            self._loaded[file] = self._identify(file)

    def _identify(self, file: MappedFile) -> int:
        path, gone = split_deleted(file)
        state = None if gone else state_of(path)
        seen = (path, file.inode)
        if state is None and seen in self._seen_files:
            # The process still has the file that it saw before.
            return self._seen_files[seen]
        known = self._libraries.get((path, state))
        if known is None:
            new = next(self._ids)
            # Without a state it is gone, and another file may lie at its path.
            library = TracedLibrary(path=path) if state is None else identify_library(path)
            self._writer.write(LibraryRecord(id=new, library=library))
            # It may have changed since its state was read.
            state = library.state
            known = self._libraries.setdefault((path, state), new)
        self._seen_files[seen] = known
        return known

    def loaded(self, call: str, handle: int | None, image: FoundImage) -> int:
        """An image was loaded, and the driver gave it a handle (None: the linker has none)."""
        if not self._devices_known:
            self._record_devices()
        # Now, since a file may be replaced before the test ends.
        self.libraries(self._mappings.new_libraries())
        library = None if image.place is None else self.library(image.place.file)
        if image.place is not None:
            key: object = (library, image.place.offset, call)
        elif image.sha256 is not None:
            key = (image.sha256, call)
        else:
            key = (handle, call, next(self._ids))
        known = self._images.get(key)
        if known is None:
            known = self._write_image(key, call, image, library)
        if handle is not None:
            self._image_of_handle[handle] = known
        return known

    def _write_image(self, key: object, call: str, image: FoundImage, library: int | None) -> int:
        new = next(self._ids)
        place = image.place
        if image.form is ImageForm.UNKNOWN:
            self.warn("image-unknown", f"{call} was given something that is no known image")
        self._writer.write(
            ImageRecord(
                id=new,
                form=image.form,
                call=call,
                context=self._context_id(),
                library=library,
                offset=None if place is None else place.offset,
                size=image.size,
                sha256=image.sha256,
                prelinked=image.prelinked,
            )
        )
        return self._images.setdefault(key, new)

    def alias(self, call: str, handle: int, of_handle: int) -> None:
        """``handle`` is another handle for the image of ``of_handle``."""
        self._image_of_handle[handle] = self._image(call, of_handle)

    def unloaded(self, handle: int) -> None:
        """The driver may give the handle to another image from now on."""
        self._image_of_handle.pop(handle, None)

    def _image(self, call: str, handle: int) -> int:
        known = self._image_of_handle.get(handle)
        if known is None:
            # Loaded before tracing began, or in a gap.
            known = self.loaded(f"before {call}", handle, UNKNOWN_IMAGE)
        return known

    def kernel(self, call: str, handle: int, name: bytes) -> None:
        """A kernel was looked up by its mangled name."""
        image = self._image(call, handle)
        self._write_once(
            (image, name),
            lambda: KernelRecord(image=image, name=_text(name), context=self._context_id()),
        )

    def data(self, call: str, handle: int, name: bytes, kind: DataKind) -> None:
        """A variable, texture or surface was looked up by its name."""
        image = self._image(call, handle)
        self._write_once(
            (image, name, kind),
            lambda: DataRecord(
                image=image, name=_text(name), kind=kind, context=self._context_id()
            ),
        )

    def enumerated(self, call: str, handle: int) -> None:
        """The program enumerated the kernels of an image."""
        self.whole_image_used(call, self._image(call, handle))

    def whole_image_used(self, call: str, image: int) -> None:
        """Any kernel of an image may be used."""
        self._write_once(
            (image, call, "enumeration"),
            lambda: EnumerationRecord(image=image, call=call, context=self._context_id()),
        )

    def refused(
        self,
        call: str,
        code: int,
        *,
        handle: int | None = None,
        place: MappedPlace | None = None,
        name: bytes | None = None,
    ) -> None:
        """The driver refused a call.

        Args:
            handle: of the image that the call was about.
            place: of the image that it was to load.
            name: of the symbol that it was to look up.
        """
        image = None if handle is None else self._image_of_handle.get(handle)
        self._write_once(
            (image, call, place, name),
            lambda: RefusalRecord(
                call=call,
                code=code,
                context=self._context_id(),
                image=image,
                library=None if place is None else self.library(place.file),
                offset=None if place is None else place.offset,
                name=None if name is None else _text(name),
            ),
        )

    def _write_once(self, key: tuple[object, ...], record: Callable[[], Line]) -> None:
        # Known once it is written: see ``_context_id``.
        if key not in self._seen:
            self._writer.write(record())
            self._seen.add(key)

    def launches(self, counted: Iterable[tuple[Context, LaunchRecord]]) -> None:
        """Note how often each kernel was launched, and how long the GPU ran it."""
        known = len(self._contexts)
        for context, record in counted:
            self._writer.write(replace(record, context=self._context_id(context)))
        new = len(self._contexts) > known
        if new and self._contexts.pop(self._context, None) is not None:
            # If the process ends now, the last context of its trace is where it was.
            self._context_id()

    def gap_begins(self, reason: str) -> None:
        """Tracing pauses; what the program uses now is not recorded."""
        self._gap = next(self._ids)
        self._writer.write(
            GapRecord(
                id=self._gap, reason=reason, context=self._context_id(), time_ns=System.time_ns()
            )
        )

    def gap_ends(self) -> None:
        """Tracing goes on."""
        if self._gap:
            self._writer.write(GapEndRecord(id=self._gap, time_ns=System.time_ns()))
            self._gap = 0

    def warn(self, code: str, text: str, *, incomplete: bool = False) -> None:
        """Note a warning, once; ``incomplete`` if the trace lacks something."""
        self._write_once(
            (code, text), lambda: WarningRecord(code=code, text=text, incomplete=incomplete)
        )

    def end(self) -> None:
        """Write the last record and close the file."""
        self._writer.write(EndRecord(time_ns=System.time_ns()))
        self._writer.close()

    def _record_devices(self) -> None:
        self._devices_known = True
        for outer in self._outer:
            pid, path = System.getpid(), self._writer.path
            tell_lack(outer, f"process {pid} is traced into another run: {path}")
        try:
            driver = DriverFacts()
            devices = driver.devices()
            eager = driver.loads_eagerly()
        except (OSError, AttributeError) as e:
            self.warn("devices-unknown", f"the driver doesn't tell its devices: {e}")
            return
        for device in devices:
            self._writer.write(DeviceRecord(device=device))
        if eager:
            self.warn(
                EAGER_LOADING,
                "CUDA_MODULE_LOADING=EAGER: every image of every library was loaded, used or "
                "not, and counts as used; trace with lazy loading (the default)",
            )


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
