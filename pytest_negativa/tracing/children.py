"""Children of a traced process: their tracer; untraced ones; what an outer session is told.

CUDA loads the native library into the child processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

LACKS = "NEGATIVA_LACKS"
"""The variable with the name of the session's socket, see ``Children.name``."""

OUTER_LACKS = "NEGATIVA_OUTER_LACKS"
"""The same of the sessions around it, parted by commas: a test of theirs started it."""

_LONGEST = 4096
_KIND = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
# A test may replace it to forbid sockets, and callbacks of the driver must not fail then.
_Socket = socket.socket


class Children:
    """Learns of children that may use the GPU and are not traced.

    A child writes to an abstract socket (unix(7)) why it can't write its trace. Another user's
    child, for example, may not open the run's folder. The socket needs no right and no disk.

    Attributes:
        name: the socket's address, for children.
    """

    def __init__(self) -> None:
        self.name = f"negativa-{os.urandom(8).hex()}"
        self._socket = _Socket(socket.AF_UNIX, _KIND)
        self._socket.bind(f"\0{self.name}")

    def untraced(self) -> Iterator[str]:
        """Reasons for untraced or partly traced children, each once."""
        # Until there are no more, or it is closed.
        with contextlib.suppress(OSError):
            while True:
                told = self._socket.recv(_LONGEST).decode("utf-8", "backslashreplace")
                yield f"a child is not traced, or not wholly: {told}"

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


def outer_sockets(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable to set for a session that begins in an environment: who doesn't see its use."""
    names = (environ.get(OUTER_LACKS), environ.get(LACKS))
    return {OUTER_LACKS: ",".join(dict.fromkeys(filter(None, names)))} if any(names) else {}


def tell_lack(name: str, text: str) -> None:
    """Tell another session what its trace lacks.

    Args:
        name: ``Children.name`` of that session.
    """
    # The session may have ended.
    with contextlib.suppress(OSError), _Socket(socket.AF_UNIX, _KIND) as sender:
        sender.sendto(text.encode("utf-8", "backslashreplace")[:_LONGEST], f"\0{name}")


def injection_library() -> Path | None:
    """The library that CUDA loads into child processes; None: it was not built."""
    path = Path(__file__).with_name("_injection.so")
    return path if path.is_file() else None


def leave_to_python(injection: Path) -> None:
    """Have the library leave this process alone: CUDA would load it here, too.

    Its forked children are traced by the library all the same.
    """
    ctypes.CDLL(str(injection)).negativa_leave_to_python()
