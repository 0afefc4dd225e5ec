"""How a pytest session, or another program, comes under proof.

``pytest --negativa-verify`` must outlive crashes of the tests it runs. So before any conftest
is imported the process is replaced (``execve``) by a supervisor: same process id, terminal and
exit code for whoever waits for it, but no plugin, no project code and no CUDA in it. It starts
the same pytest command as its child. Where pytest was called from a program (``pytest.main``)
the process can't be replaced, and supervises by itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pytest_negativa.errors import NegativaError

if TYPE_CHECKING:
    import pytest

    from pytest_negativa.models.settings import Settings
    from pytest_negativa.models.verdict import Verdict
    from pytest_negativa.verifying.rounds import Program
    from pytest_negativa.verifying.verification import Prepare

_REQUEST = "NEGATIVA_SUPERVISE"
# Options that make a session a supervisor: its program must not become one, nor what that starts.
_OWN_VARIABLES = (
    _REQUEST,
    "NEGATIVA_VERIFY",
    "NEGATIVA_HEAL",
    "NEGATIVA_MEASURE",
    "NEGATIVA_RUN",
)

# Make a session one that the plugin has nothing to do with, whatever its own words say.
_UNTRACED = (
    "--no-negativa",
    "--no-negativa-verify",
    "--no-negativa-heal",
    "--no-negativa-measure",
)

# Appended to the command of rounds after the first, in which only some tests run.
_AGAIN = ("--maxfail=0",)


@dataclass(frozen=True, slots=True)
class Request:
    """What a supervisor is to do.

    Attributes:
        settings: of the session.
        root: pytest's rootdir.
        program: what is run.
        trace_first: trace the program before anything is verified.
    """

    settings: Settings
    root: Path
    program: Program
    trace_first: bool


def request_of(config: pytest.Config, settings: Settings) -> Request:
    """The request that a session's own command line makes."""
    from pytest_negativa.verifying.rounds import Program

    namespace = config.known_args_namespace
    debugged = any(getattr(namespace, name, False) for name in ("usepdb", "trace"))
    command = _command(config)
    program = Program(
        command=command,
        again=_command_again(config, command, Path(settings.directory)),
        cwd=config.invocation_params.dir,
        is_pytest=True,
        interactive=debugged or (namespace.capture == "no" and sys.stdin.isatty()),
    )
    return Request(
        settings=settings,
        root=config.rootpath,
        program=program,
        trace_first=settings.enabled,
    )


def is_replaceable(config: pytest.Config) -> bool:
    """Whether this process is nothing but the pytest command, as it was typed."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    is_pytest = (spec is not None and spec.name in ("pytest.__main__", "pytest")) or Path(
        sys.argv[0]
    ).name in ("pytest", "py.test")
    return is_pytest and tuple(config.invocation_params.args) == tuple(sys.argv[1:])


def _command(config: pytest.Config) -> tuple[str, ...]:
    if is_replaceable(config):
        # With the interpreter's own options (-X, -W, -m).
        return (sys.executable, *sys.orig_argv[1:])
    return (sys.executable, "-m", "pytest", *map(str, config.invocation_params.args))


def _command_again(
    config: pytest.Config, command: Sequence[str], directory: Path
) -> tuple[str, ...]:
    """The command for rounds that run some tests again. Reports: see ``round_reports``."""
    added = [*_AGAIN]
    if config.pluginmanager.has_plugin("cacheprovider"):
        added += ["-o", f"cache_dir={directory / 'cache'}"]
    words = list(command)
    at = words.index("--") if "--" in words else len(words)
    return (*words[:at], *added, *words[at:])


def _untraced(command: Sequence[str]) -> tuple[str, ...]:
    words = list(command)
    at = words.index("--") if "--" in words else len(words)
    return (*words[:at], *_UNTRACED, *words[at:])


def replace_process(request: Request) -> NoReturn:
    """Become the supervisor. Never returns.

    Raises:
        NegativaError: the interpreter can't be started.
    """
    import msgspec

    plain = {
        "settings": request.settings.to_plain(),
        "root": str(request.root),
        "again": request.program.again,
        "interactive": request.program.interactive,
        "trace_first": request.trace_first,
    }
    # A -c program has the current folder at the head of its path, where any file may shadow
    # a module; and this package may lie where only pytest was told to look.
    start = (
        f"import sys; sys.path[:] = [*filter(None, sys.path), {str(Path(__file__).parents[2])!r}]; "
        "from pytest_negativa.verifying.supervisor import main; sys.exit(main())"
    )
    environ = {**os.environ, _REQUEST: msgspec.json.encode(plain).decode()}
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = [sys.executable, "-c", start, *request.program.command]
    try:
        os.chdir(request.program.cwd)
        os.execve(sys.executable, arguments, environ)  # noqa: S606 (as the shell did)
    except OSError as e:
        raise NegativaError(f"{sys.executable}: cannot be started: {e.strerror}") from e


def main() -> int:
    """The supervisor's program; what ``replace_process`` starts."""
    from pytest_negativa.models.settings import Settings
    from pytest_negativa.verifying.rounds import Program

    plain = json.loads(os.environ.pop(_REQUEST))
    program = Program(
        command=tuple(sys.argv[1:]),
        again=tuple(plain["again"]),
        cwd=Path.cwd(),
        is_pytest=True,
        interactive=plain["interactive"],
    )
    request = Request(
        settings=Settings.from_plain(plain["settings"]),
        root=Path(plain["root"]),
        program=program,
        trace_first=plain["trace_first"],
    )
    return supervise(request)


def supervise(request: Request, prepare: Prepare | None = None) -> int:
    """Do what is requested, show the verdict; the exit status.

    Args:
        prepare: adds what a program needs that doesn't trace itself.
    """
    from pytest_negativa.processes.watch import Interrupted, interruptible

    try:
        with interruptible():
            return _Supervisor(request, prepare or _unchanged).run()
    except NegativaError as e:
        from pytest_negativa.reporting.text import printable

        sys.stderr.write(f"negativa: error: {printable(str(e))}\n")
        return 1
    except Interrupted as e:
        sys.stderr.write(f"negativa: error: {e}\n")
        return 128 + e.number  # As shells have it.


def _unchanged(environ: Mapping[str, str], _folder: Path) -> Mapping[str, str]:
    return environ


class _Supervisor:
    def __init__(self, request: Request, prepare: Prepare) -> None:
        self._request = request
        self._settings = request.settings
        self._prepare = prepare
        self._environ = {k: v for k, v in os.environ.items() if k not in _OWN_VARIABLES}

    def run(self) -> int:
        if self._settings.measuring:
            from pytest_negativa.measuring.session import measure_session

            program = self._request.program
            command = _untraced(program.command)
            return measure_session(command, self._settings, self._environ, program.cwd)
        from pytest_negativa.verifying.verification import Verification, exit_code, load_traced_run

        status = 0
        folder = Path(self._settings.run or Path(self._settings.directory) / "latest")
        if self._request.trace_first:
            status, traced = self._trace()
            if traced is None:
                return status
            folder = traced
        verification = Verification(
            load_traced_run(folder, self._settings),
            self._request.program,
            self._settings,
            root=self._request.root,
            environ=self._environ,
            prepare=self._prepare,
            say=_say,
        )
        if self._settings.healing:
            from pytest_negativa.verifying.heal import verify_and_heal

            verdict = verify_and_heal(verification)
        else:
            traced_run = verification.traced
            attempt = verification.attempt(traced_run.planned)
            verdict = verification.judge(attempt, traced_run.plans)
        path = verification.write(verdict)
        self._show(verdict, path)
        return exit_code(verdict) or status

    def _trace(self) -> tuple[int, Path | None]:
        """Run the traced session; its status, and its folder where it can be verified."""
        from pytest_negativa.models.round import Round, RoundKind
        from pytest_negativa.storage.runs import is_failed
        from pytest_negativa.tracing.start import new_run_id
        from pytest_negativa.verifying.rounds import run_round

        settled = Round(
            kind=RoundKind.TRACE,
            supervisor=os.getpid(),
            base=self._settings.directory,
            run_id=new_run_id(),
            root=str(self._request.root),
            is_pytest=self._request.program.is_pytest,
        )
        result = run_round(
            self._request.program,
            settled,
            lambda folder: self._prepare(self._environ, folder),
            None,
        )
        status = result.status if result.status >= 0 else 128 - result.status
        planned = (result.folder / "plan").is_dir()
        if not planned or (is_failed(result.folder) and not self._settings.trace.accept_failed):
            _say("negativa: nothing to verify: nothing was planned from the traced run")
            return status or 1, None
        return status, result.folder

    def _show(self, verdict: Verdict, path: Path) -> None:
        from pytest_negativa.reporting.verdict import render_verdict

        for paragraph in render_verdict(verdict, path, self._settings.reports):
            _say(paragraph)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
