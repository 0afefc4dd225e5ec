"""The bar: on a terminal, and only when it takes longer than a second."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

SCRIPT = """
import sys, time
from pytest_negativa.cli.progress import ByteProgress
with ByteProgress("reading libraries") as progress:
    progress.update(0, 4_000_000)
    time.sleep(float(sys.argv[1]))
    progress.update(3_000_000, 4_000_000)
    time.sleep(float(sys.argv[1]) / 4)
print("rich" in sys.modules, "done")
"""


def run(seconds: float, terminal: bool) -> tuple[str, str]:
    """What the script shows: stdout, and stderr on a terminal or a pipe."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=writer,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:
        os.close(writer)
        shown = bytearray()
        # At the end a terminal reads as an error, a pipe as no data.
        try:
            while data := os.read(reader, 4096):
                shown += data
        except OSError:
            pass
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(reader)
    assert process.returncode == 0, shown
    return out.strip(), shown.decode()


def test_shown_on_a_terminal_after_a_second() -> None:
    start = time.monotonic()
    out, shown = run(1.6, terminal=True)
    assert time.monotonic() - start > 1.6
    assert out == "True done"
    # Before the first library is done, and with what came then.
    assert "reading libraries" in shown
    assert "0.0/4.0 MB" in shown
    assert "3.0/4.0 MB" in shown


def test_not_shown_when_quick() -> None:
    assert run(0.1, terminal=True) == ("False done", "")


def test_not_shown_on_a_pipe() -> None:
    assert run(1.3, terminal=False) == ("False done", "")
