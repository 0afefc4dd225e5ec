"""Child processes of a traced process that are not traced themselves."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator, Mapping

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

    Args:
        traceable: whether the native library is there. If not, every child is untraced.

    Attributes:
        name: the socket's address, for children.
    """

    def __init__(self, *, traceable: bool) -> None:
        self.name = f"negativa-{os.urandom(8).hex()}"
        self._socket = _Socket(socket.AF_UNIX, _KIND)
        self._socket.bind(f"\0{self.name}")
        self._faults = None if traceable else _faults_of_children()

    def untraced(self) -> Iterator[str]:
        """Reasons for untraced or partly traced children, each once."""
        try:
            while True:
                told = self._socket.recv(_LONGEST).decode("utf-8", "backslashreplace")
                yield f"a child is not traced, or not wholly: {told}"
        except OSError:
            # No more, or closed.
            pass
        if self._faults is not None and (_faults_of_children() != self._faults or _has_children()):
            yield (
                "it started child processes, which are not traced: the native library was not "
                "built; install a C compiler and reinstall pytest-negativa"
            )

    def disregard(self) -> None:
        """Note that the children until now are those of this package."""
        if self._faults is not None:
            self._faults = _faults_of_children()

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


def _faults_of_children() -> int:
    # Of those that have ended and were waited for (getrusage(2)); no process runs without faults.
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
