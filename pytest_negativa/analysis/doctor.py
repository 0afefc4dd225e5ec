"""Facts on this machine, its driver and this environment, for ``negativa doctor``.

Each probe does what a session does, so that a fault shows here as it would show there.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pytest_negativa.devices import start_driver
from pytest_negativa.errors import NegativaError
from pytest_negativa.models.listing import MachineFact
from pytest_negativa.models.trace import Role
from pytest_negativa.processes import redirect
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.command import find_cupti
from pytest_negativa.tracing.start import start_tracing

_PACKAGES = (
    *("pytest-negativa", "pytest", "pytest-xdist", "cupti-python", "nvidia-ml-py"),
    *("torch", "jax", "cupy", "cupy-cuda12x", "cupy-cuda13x", "numba-cuda", "triton"),
)
# Each changes what is traced.
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "CUDA_INJECTION64_PATH", "LD_AUDIT"),
    *("LD_PRELOAD", "PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"),
)


def machine_facts(runs: Path) -> Iterator[MachineFact]:
    """Look at everything that tracing and proofs need.

    Args:
        runs: the folder of all runs.
    """
    yield MachineFact("Python", f"{platform.python_version()}, {sys.executable}")
    yield MachineFact("system", platform.platform())
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            yield MachineFact(name, version(name))
    yield from (MachineFact(name, os.environ[name]) for name in _VARIABLES if name in os.environ)
    with tempfile.TemporaryDirectory() as folder:
        # Before the driver starts, as in a session.
        yield _cupti(Path(folder))
        yield from _driver()
        problem = _why_no_proofs(Path(folder))
    yield MachineFact("proofs", f"do not work: {problem}" if problem else "work (LD_AUDIT)")
    yield from (
        MachineFact(name, ", ".join((str(path), *_traits(path))))
        for name, path in (
            ("runs", runs.absolute()),
            ("temporary files", Path(tempfile.gettempdir())),
            ("environment", Path(sys.prefix)),
        )
    )


def _cupti(folder: Path) -> MachineFact:
    """Trace this process for a moment. The error names the tool that holds CUPTI."""
    try:
        start_tracing(Run(folder / "run"), Role.SOLO, root=folder, children=False).stop()
        problem = None
    except NegativaError as e:
        problem = str(e)
    place = find_cupti(sys.path) or "neither in this environment nor in a toolkit"
    return MachineFact("CUPTI", f"{'does not work' if problem else 'works'}, {place}", problem)


def _driver() -> Iterator[MachineFact]:
    try:
        driver = start_driver()
        gpus, is_eager = driver.devices(), driver.loads_eagerly()
    except (OSError, AttributeError) as e:
        remedy = "run where nvidia-smi lists one; containers need --gpus all"
        yield MachineFact("GPU", "none", f"no GPU works here ({e}): {remedy}")
        return
    for gpu in gpus:
        yield MachineFact("GPU", f"{gpu.name}, compute capability {gpu.compute_capability}")
    yield MachineFact("driver", f"{gpu.driver_version or 'unknown version'}, {gpu.cuda}")
    problem = "so all code would count as used: unset CUDA_MODULE_LOADING" if is_eager else None
    yield MachineFact("loading", "eager" if is_eager else "lazy", problem)


def _why_no_proofs(folder: Path) -> str | None:
    """Start a process as a proof does, with a table of no libraries."""
    if problem := redirect.why_unsupported():
        return problem
    redirect.write_table(folder / "table", folder, ())
    added = redirect.redirect_environment(os.environ, folder / "table", folder)
    subprocess.run([sys.executable, "-c", ""], env={**os.environ, **added}, check=False)
    logs = redirect.read_logs(folder)
    return "; ".join(text for log in logs for text in log.problems) or (
        None if logs else "ld.so loaded no auditor"
    )


def _traits(path: Path) -> Iterator[str]:
    """Traits of a folder's file system that matter to copies and to slimming.

    Args:
        path: of the folder; if it doesn't exist, the folder that it would be in counts.
    """
    folder = next(filter(Path.is_dir, (path, *path.parents)))
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        yield "noexec: no library can be loaded from here"
    yield "writable" if os.access(folder, os.W_OK) else "not writable"
