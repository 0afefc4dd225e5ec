"""A session becomes a supervisor by ``execve``, or supervises by itself; the words it starts.

``pytest --negativa-verify`` must survive crashes of the tests that it runs. So before any conftest
is imported, ``execve`` replaces the process by a supervisor. It has the same process id, terminal
and exit status, but no plugin, no project code and no CUDA in it. It starts the same pytest command
as its child. If a program called pytest (``pytest.main``), the process can't be replaced and
supervises by itself.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pytest_negativa.errors import NegativaError
from pytest_negativa.storage.runs import RunsFolder, run_at

if TYPE_CHECKING:
    import pytest

    from pytest_negativa.models.settings import Settings
    from pytest_negativa.verifying.rounds import Program

_REQUEST = "NEGATIVA_SUPERVISE"

# What a supervisor handles.
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def program_of(config: pytest.Config, settings: Settings) -> Program:
    """The program that a session's own command line starts."""
    from pytest_negativa.verifying.rounds import Program

    namespace = config.known_args_namespace
    debugged = any(getattr(namespace, name, False) for name in ("usepdb", "trace"))
    captures = namespace.capture
    command = _command(config)
    end = command.index("--") if "--" in command else len(command)
    # For rounds that run some tests again. Reports: see ``round_reports``.
    added = ["--maxfail=0"]
    if config.pluginmanager.has_plugin("cacheprovider"):
        added += ["-o", f"cache_dir={RunsFolder(Path(settings.directory)).pytest_cache}"]
    # Workers of pytest-xdist would each start, and collect all, for a few tests.
    is_spread = getattr(namespace, "numprocesses", None) or getattr(namespace, "tx", None)
    alone = ["-n0"] if is_spread else []
    return Program(
        command=command,
        again=(*command[:end], *added, *command[end:]),
        alone=(*command[:end], *added, *alone, *command[end:]),
        cwd=config.invocation_params.dir,
        root=config.rootpath,
        environ=os.environ,
        is_pytest=True,
        interactive=debugged or (captures == "no" and sys.stdin.isatty()),
        # With -s and the like, tests could see where their output goes, and users want to.
        folds=captures == "fd" and not debugged,
    )


def is_replaceable(config: pytest.Config) -> bool:
    """Whether this process is nothing but the pytest command, as it was typed."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    is_pytest = (spec is not None and spec.name in ("pytest.__main__", "pytest")) or Path(
        sys.argv[0]
    ).name in ("pytest", "py.test")
    return is_pytest and tuple(config.invocation_params.args) == tuple(sys.argv[1:])


def _command(config: pytest.Config) -> tuple[str, ...]:
    if is_replaceable(config):
        # With the interpreter's own options (-X, -W, -m).
        return (sys.executable, *sys.orig_argv[1:])
    return (sys.executable, "-m", "pytest", *map(str, config.invocation_params.args))


def replace_process(settings: Settings, program: Program) -> NoReturn:
    """Become the supervisor. Never returns.

    Raises:
        NegativaError: the interpreter can't be started.
    """
    import msgspec

    plain = {
        "settings": msgspec.to_builtins(settings),
        "root": str(program.root),
        "again": program.again,
        "alone": program.alone,
        "interactive": program.interactive,
        "folds": program.folds,
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
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.chdir(program.cwd)
        os.execve(  # noqa: S606 (as the shell did)
            sys.executable, [sys.executable, "-c", start, *program.command], environ
        )
    except OSError as e:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise NegativaError(f"{sys.executable}: cannot be started: {e.strerror}") from e


def main() -> int:
    """The supervisor's program, which ``replace_process`` starts."""
    import msgspec

    from pytest_negativa.models.settings import Settings
    from pytest_negativa.verifying.rounds import Program

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
    return supervise(msgspec.convert(plain["settings"], Settings), program, plain["unblock"])


def supervise(settings: Settings, program: Program, unblock: Collection[int] = ()) -> int:
    """Verify, after tracing (``settings.enabled``); the exit status.

    Args:
        unblock: signals that were blocked until they can be handled.
    """
    from pytest_negativa.analysis.report import report_verified
    from pytest_negativa.errors import ExitStatus
    from pytest_negativa.verifying.supervisor import run_supervisor, verify_program

    def work() -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, unblock)
        run = None
        # A session that traces verifies its own run, whatever the environment names.
        if not settings.enabled:
            run = run_at(RunsFolder(Path(settings.directory)).find(settings.run).folder)
        return verify_program(program, settings, run, lambda run: report_verified(run, settings))

    return run_supervisor(work, ExitStatus.PYTEST_USAGE)
