"""Options and settings that all tests share."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import site
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Without the extra "test", pytest --help works, and tests without hypothesis do.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # Hypothesis: a few examples for developers; HYPOTHESIS_PROFILE=thorough (.ci/nightly) tries
    # many. The examples are the same in every run, so that a pull request is not failed by
    # another's bug: tests/fuzz/fuzz_readers.py is what searches. Nothing depends on the machine's
    # load, and one folder for all examples of a test is wanted.
    _PROFILE = settings(
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.register_profile("quick", _PROFILE, max_examples=25)
    settings.register_profile("thorough", _PROFILE, max_examples=300)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# A project with tests of its own, which sessions of the tests run.
collect_ignore = ["fixtures/quickstart"]

_UMASK = 0o022
_NUMBERS = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="a GPU test that can't run is a failure, not a skip",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A nightly test is a slow one, too."""
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            item.add_marker("slow")


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Processes that tests start can be interrupted.

    A shell that starts a job in the background has it ignore SIGINT, nohup has it ignore SIGHUP,
    and children inherit that.
    """
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The parent of all tests' home folders; home itself for fixtures of the whole session."""
    folder = tmp_path_factory.mktemp("homes")
    before = os.umask(_UMASK)
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            # readline writes the terminal's size there, in a worker without a terminal too.
            if name.startswith("XDG_") or name in ("COLUMNS", "LINES"):
                patch.delenv(name)
        # What the user has installed stays importable.
        patch.setenv("PYTHONUSERBASE", site.getuserbase())
        patch.setenv("HOME", str(folder))
        if sys.dont_write_bytecode:
            # Hundreds of sessions would each compile all that they import, a third of their time.
            patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
            run = tmp_path_factory.getbasetemp()
            run = run.parent if "PYTEST_XDIST_WORKER" in os.environ else run
            patch.setenv("PYTHONPYCACHEPREFIX", str(run / "bytecode"))
        yield folder
    os.umask(before)


@pytest.fixture(autouse=True)
def home(homes: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The test's own home folder, for its subprocesses too; the umask is the usual one."""
    folder = homes / str(next(_NUMBERS))
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    before = os.umask(_UMASK)
    yield folder
    os.umask(before)
