"""Programs that GPU tests start, with this process's environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def run(
    folder: Path, *command: str | Path, status: int = 0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder; it must end with ``status``."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done
