"""The bar: on a terminal, and only when it takes longer than two seconds."""

from __future__ import annotations

import contextlib
import os
import pty
import queue
import re
import subprocess
import sys

from pytest_negativa.reporting.progress import Progress

SCRIPT = """
import sys
from pytest_negativa.reporting.progress import Progress
with Progress("reading libraries", bar_after_s=float(sys.argv[1])) as progress:
    progress.update(0, 4_000_000)
    sys.stdin.readline()
    progress.update(3_000_000, 4_000_000)
    sys.stdin.readline()
print("rich" in sys.modules, "done")
"""


def run(delay_s: float, terminal: bool, *awaited: bytes) -> tuple[str, str]:
    """What the script shows: stdout, and stderr on a terminal or a pipe.

    It goes on as soon as each of ``awaited`` was seen, and at once after that.
    """
    reader, writer = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(delay_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=writer,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        os.close(writer)
        shown = bytearray()
        for text in awaited:
            while text not in shown:
                shown += os.read(reader, 4096)
            process.stdin.write(b"\n")
            process.stdin.flush()
        process.stdin.close()
        # At the end a terminal reads as an error, a pipe as no data.
        with contextlib.suppress(OSError):
            while data := os.read(reader, 4096):
                shown += data
        out = process.stdout.read()
    os.close(reader)
    assert process.returncode == 0, shown
    return out.decode().strip(), shown.decode()


def test_shown_on_a_terminal_after_a_while() -> None:
    # Before the first library is done, and with what came then.
    out, shown = run(0.1, True, b"reading libraries: ", b"3.0 MB of 4.0 MB")
    assert out == "True done"
    assert "reading libraries" in shown


def test_not_shown_when_quick() -> None:
    assert run(3600, True) == ("False done", "")


def test_not_shown_on_a_pipe() -> None:
    assert run(0, False) == ("False done", "")


def test_lines_with_an_estimate() -> None:
    said: queue.Queue[str] = queue.Queue()
    with Progress("reading libraries", said.put, every_s=0.01) as progress:
        assert re.fullmatch(r"reading libraries: \d+ s", said.get())
        progress.update(0, 5_000_000)
        while "of" not in (line := said.get()):
            pass
        assert re.fullmatch(r"reading libraries: 0 B of 5\.0 MB, \d+ s", line)
        progress.update(2000, 5_000_000)
        while "2.0" not in (line := said.get()):
            pass
        assert re.fullmatch(r"reading libraries: 2\.0 kB of 5\.0 MB, \d+ s left", line)
