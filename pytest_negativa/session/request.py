"""A session becomes a supervisor by ``execve``; the words that it starts.

``pytest --negativa-verify`` must survive crashes of the tests that it runs. So before any conftest
is imported, ``execve`` replaces the process by a supervisor. It has the same process id, terminal
and exit status, but no plugin, no project code and no CUDA in it. It starts the same pytest command
as its child.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_negativa.errors import ExitStatus, NegativaError, OptionError, refusing
from pytest_negativa.settings.resolve import load_settings
from pytest_negativa.storage.runs import RunsFolder, run_at

if TYPE_CHECKING:
    import pytest

_REQUEST = "NEGATIVA_SUPERVISE"

# What a supervisor handles.
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_replaceable(config: pytest.Config) -> bool:
    """Whether this process is nothing but the pytest command, as it was typed."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    is_pytest = (spec is not None and spec.name in ("pytest.__main__", "pytest")) or Path(
        sys.argv[0]
    ).name in ("pytest", "py.test")
    return is_pytest and tuple(config.invocation_params.args) == tuple(sys.argv[1:])


def start_supervisor(config: pytest.Config, flags: Mapping[str, Any]) -> NoReturn:
    """Become the supervisor, which runs the session's tests in a process of their own.

    Raises:
        OptionError: an option or ``negativa.yaml`` can't be used, or a program called pytest.
        NegativaError: the interpreter can't be started.
    """
    settings = load_settings(
        flags, os.environ, root=config.rootpath, cwd=config.invocation_params.dir
    )
    if not is_replaceable(config):
        raise OptionError(
            "a program called pytest.main, and a proof starts the tests again, without what the "
            "program set up: start pytest itself, or trace without a proof"
        )
    import msgspec

    namespace = config.known_args_namespace
    debugged = any(getattr(namespace, name, False) for name in ("usepdb", "trace"))
    # With the interpreter's own options (-X, -W, -m).
    command = (sys.executable, *sys.orig_argv[1:])
    end = command.index("--") if "--" in command else len(command)
    # For rounds that run some tests again. Reports: see ``round_hooks``.
    added = ["--maxfail=0"]
    if config.pluginmanager.has_plugin("cacheprovider"):
        added += ["-o", f"cache_dir={RunsFolder(Path(settings.directory)).pytest_cache}"]
    # Workers of pytest-xdist would each start, and collect all, for a few tests.
    is_spread = getattr(namespace, "numprocesses", None) or getattr(namespace, "tx", None)
    alone = ["-n0"] if is_spread else []
    plain = {
        "settings": msgspec.to_builtins(settings),
        "root": str(config.rootpath),
        "again": (*command[:end], *added, *command[end:]),
        "alone": (*command[:end], *added, *alone, *command[end:]),
        "interactive": debugged or (namespace.capture == "no" and sys.stdin.isatty()),
        # With -s and the like, tests could see where their output goes, and users want to.
        "folds": namespace.capture == "fd" and not debugged,
    }
    # A -c program has the current folder at the head of its path: any file there may shadow a
    # module. And this package may lie where only pytest was told to look.
    start = (
        f"import sys; sys.path[:] = [*filter(None, sys.path), {str(Path(__file__).parents[2])!r}]; "
        "from pytest_negativa.session.request import main; sys.exit(main())"
    )
    # execve passes the mask on. A signal waits until the supervisor can handle it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    plain["unblock"] = [number for number in _HANDLED if number not in before]
    environ = {**os.environ, _REQUEST: json.dumps(plain)}
    try:
        become(["-c", start, *command], environ, config.invocation_params.dir)
    except NegativaError:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise


def become(words: Sequence[str], environ: Mapping[str, str], cwd: Path) -> NoReturn:
    """Replace this process by another Python.

    Raises:
        NegativaError: the interpreter can't be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with refusing(sys.executable, "started", NegativaError):
        os.chdir(cwd)
        os.execve(sys.executable, [sys.executable, *words], environ)  # noqa: S606 (as the shell did)


def main() -> int:
    """Verify, after tracing (``settings.enabled``); the supervisor's program and exit status."""
    import msgspec

    from pytest_negativa.analysis.report import report_verified
    from pytest_negativa.models.settings import Settings
    from pytest_negativa.verifying.rounds import Program
    from pytest_negativa.verifying.supervisor import run_supervisor, verify_program

    # Plans and maps are a million objects without cycles; their end is that of the process.
    gc.disable()
    atexit.register(gc.freeze)
    plain = json.loads(os.environ.pop(_REQUEST))
    program = Program(
        command=tuple(sys.argv[1:]),
        again=tuple(plain["again"]),
        alone=tuple(plain["alone"]),
        cwd=Path.cwd(),
        root=Path(plain["root"]),
        environ=os.environ,
        is_pytest=True,
        interactive=plain["interactive"],
        folds=plain["folds"],
    )
    settings = msgspec.convert(plain["settings"], Settings)

    def work() -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, plain["unblock"])
        run = None
        # A session that traces verifies its own run, whatever the environment names.
        if not settings.enabled:
            run = run_at(RunsFolder(Path(settings.directory)).find(settings.run).folder)
        return verify_program(program, settings, run, lambda run: report_verified(run, settings))

    return run_supervisor(work, ExitStatus.PYTEST_USAGE)
