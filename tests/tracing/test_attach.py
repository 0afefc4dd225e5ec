"""Processes outside of any session that are traced for a while, and what their traces may say."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_negativa.models.trace import LibraryRecord, Role
from pytest_negativa.planning.locate import Contents
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.children import Children, injection_library
from pytest_negativa.tracing.command import attach_environment
from pytest_negativa.tracing.merge import merge_traces
from pytest_negativa.tracing.trace_files import TraceReader
from tests.support.compiling import needs_compiler
from tests.support.faults import PlantedFault
from tests.support.injected import Injected, kernels
from tests.support.libraries import IS_ROOT, MULTIARCH
from tests.support.traces import header, records, write

pytestmark = needs_compiler

USES = "start(); assert use('k') == 0\n"
FORKS = (
    "for _ in range(64):\n"
    "    if os.fork() == 0:\n"
    f"        {USES.strip()}\n"
    "        os._exit(0)\n"
    "    os.wait()\n"
)


class Attached(Injected):
    """As a service's processes are traced."""

    def sample(self, one_of: int = 1, seconds: int = 0, files: int = 1000) -> None:
        for name in [name for name in self.environ if name.startswith(("NEGATIVA_", "CUDA_"))]:
            if name != "NEGATIVA_CUPTI":
                del self.environ[name]
        self.environ |= attach_environment(self.run, one_of, seconds, files, {}) | {
            "NEGATIVA_CUPTI": self.environ["NEGATIVA_CUPTI"]
        }


@pytest.fixture
def attached(tmp_path: Path, driver: Path) -> Iterator[Attached]:
    injection = injection_library()
    assert injection is not None
    with contextlib.closing(Attached(tmp_path, driver, injection)) as started:
        yield started


def test_a_sample_names_gpu_code_and_nothing_else(attached: Attached, tmp_path: Path) -> None:
    attached.sample()
    attached.environ["SECRET"] = "in the environment"
    attached.environ["PYTEST_CURRENT_TEST"] = "test_secret.py::test_of_a_customer (call)"
    attached.play(f"secret = 'on the command line'\nos.chdir('/')\n{USES}")
    usage = attached.usage()
    assert kernels(usage) == {MULTIARCH.name: ["k"]} and not usage.incomplete
    [process] = usage.processes
    head = process.header
    assert head.role is Role.SAMPLE and process.ended
    assert (head.executable, head.argv, head.root, head.ppid, head.python) == ("", (), "", 0, None)
    assert [device.uuid for device in usage.devices] == ["GPU-"] * len(usage.devices)
    [trace] = attached.run.trace_files()
    text = trace.read_text().lower()
    assert "secret" not in text and "python" not in text
    # The one path is that of the library.
    assert text.replace(str(MULTIARCH).lower(), "").count("/") == 0


def test_one_process_in_so_many(attached: Attached) -> None:
    attached.sample(one_of=2)
    attached.play(FORKS)
    assert 0 < len(attached.run.trace_files()) < 64
    attached.sample(one_of=10**12)
    before = attached.run.trace_files()
    attached.play(FORKS)
    assert attached.run.trace_files() == before


def test_the_number_of_files_is_limited(attached: Attached) -> None:
    attached.sample(files=3)
    attached.play(FORKS)
    assert len(attached.run.trace_files()) == 3
    assert not attached.usage().incomplete


@pytest.mark.slow
@pytest.mark.parametrize("lacks", [(), ("STANDIN_CUPTI_OLD",)])
def test_the_time_is_limited(attached: Attached, lacks: tuple[str, ...]) -> None:
    """What follows is not traced, which is no lack, for a sample never shows what is unused.

    Also with a CUPTI that lacks a driver call.
    """
    attached.sample(seconds=1)
    attached.environ |= dict.fromkeys(lacks, "1")
    folder = str(attached.run.trace_dir)
    attached.play(
        "import time\n"
        f"{USES}[trace] = os.scandir({folder!r})\n"
        "while '\"gap\"' not in open(trace).read():\n"
        "    time.sleep(0.05)\n"
        "assert use('later') == 0\n"
    )
    usage = attached.usage()
    assert kernels(usage) == {MULTIARCH.name: ["k"]}
    assert not usage.incomplete and usage.processes[0].ended
    *_, warning = usage.warnings
    assert len(usage.warnings) == 1 + len(lacks)
    assert warning.process is None and "a sample: process: the detector went off" in warning.text
    assert "the time for which it is traced is over" in warning.text


@pytest.mark.parametrize("limit", [0, 100, 1500])
def test_a_full_disk_is_nothing_to_the_service(attached: Attached, limit: int) -> None:
    attached.sample()
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    attached.play(f"{limited}start()\nfor i in range(100): assert use('k' * i) == 0\n")
    usage = attached.usage()
    assert not usage.incomplete
    assert [warning.code for warning in usage.warnings] == [
        "trace-lost" if limit == 1500 else "trace-unreadable"
    ]


@pytest.mark.slow
def test_the_size_of_a_trace_is_limited(attached: Attached) -> None:
    """A program that makes kernels for ever fills no disk, and goes on."""
    attached.sample()
    attached.play("start()\nfor i in range(80): assert use(f'{i}' + 'k' * 10**6) == 0\n")
    [trace] = attached.run.trace_files()
    assert 64 << 20 < trace.stat().st_size < 66 << 20
    usage = attached.usage()
    assert not usage.incomplete and [w.code for w in usage.warnings] == ["trace-lost"]


def test_a_sample_may_still_run(attached: Attached) -> None:
    attached.sample()
    with attached.running(USES):
        assert kernels(attached.usage()) == {MULTIARCH.name: ["k"]}
        assert not attached.usage().incomplete


def test_cupti_that_is_taken(attached: Attached) -> None:
    attached.sample()
    attached.environ["STANDIN_CUPTI_TAKEN"] = "1"
    attached.play(USES)
    usage = attached.usage()
    assert not usage.incomplete and "CUPTI serves one tool" in usage.warnings[0].text


def test_odd_settings_trace_nothing(attached: Attached) -> None:
    attached.sample()
    odd = [("SAMPLE", "x"), ("SAMPLE", "-1"), ("SAMPLE", "0"), ("SAMPLE", "9" * 30),
           ("SAMPLE_FILES", ""), ("SAMPLE_FILES", "-9"), ("TRACE_DIR", "/nowhere")]  # fmt: skip
    attached.play(
        f"for name, value in {odd!r}:\n"
        "    if os.fork() == 0:\n"
        "        os.environ[f'NEGATIVA_{name}'] = value\n"
        f"        {USES.strip()}\n"
        "        os._exit(0)\n"
        "    assert os.wait()[1] == 0\n"
    )
    assert not attached.run.trace_files()


@pytest.mark.skipif(not IS_ROOT, reason="only root may become another user")
def test_another_user(driver: Path) -> None:
    """Without the right to write there, the service runs untraced, and says nothing."""
    injection = injection_library()
    assert injection is not None
    # pytest's own temporary folders are closed to others.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        copies = (Path(shutil.copy(path, folder)) for path in (driver, injection))
        with contextlib.closing(Attached(folder, *copies)) as attached:
            attached.sample()
            other = f"os.setgid(65534); os.setuid(65534)\n{USES}"
            attached.play(other)
            assert not attached.run.trace_files()
            attached.run.trace_dir.chmod(0o1777)
            attached.play(other)
            assert len(attached.run.trace_files()) == 1


@pytest.mark.planted_fault(
    "A test starts a service that has the variables of negativa trace --attach-env",
    says="it is traced as a sample, into another run",
)
def test_a_service_within_a_session(attached: Attached, fault: PlantedFault) -> None:
    attached.sample(one_of=10**12)
    session, outer = Children(), Children()
    attached.environ["NEGATIVA_LACKS"] = session.name
    attached.environ["NEGATIVA_OUTER_LACKS"] = outer.name
    attached.play(USES)
    [lack] = session.untraced()
    fault.check(lack)
    assert list(outer.untraced())
    session.close()
    outer.close()


def test_a_session_in_the_environment_of_a_service_traces_all_children(
    attached: Attached, tmp_path: Path
) -> None:
    session = dict(attached.environ)
    run = attached.run
    attached.run = Run(tmp_path / "service" / "run")
    attached.sample(one_of=10**12)
    attached.environ |= session
    attached.run = run
    attached.play(USES)
    assert [p.header.role for p in attached.usage().processes] == [Role.CHILD]


@pytest.mark.planted_fault(
    "A process that may write to the folder of samples leaves the trace of a whole test session",
    says="only samples of processes outside of tests used it",
)
def test_a_trace_that_claims_to_be_no_sample(tmp_path: Path, fault: PlantedFault) -> None:
    run = Run(tmp_path / "run")
    run.trace_dir.mkdir(parents=True)
    run.mark("samples", "made by negativa trace --attach-env")
    path = write(run.trace_dir, header(role=Role.SOLO), records("k"))
    found = TraceReader(path).header
    assert found is not None and found.role is Role.SAMPLE
    usage = merge_traces([path])
    [used] = usage.libraries
    fault.check(str(Contents(usage).of(used.library).lack))


@pytest.mark.planted_fault(
    "Tests used no GPU, and a sample tells one", says="samples alone tell their devices"
)
def test_devices_of_samples_alone(tmp_path: Path, fault: PlantedFault) -> None:
    """Without a device a session makes nothing unused; samples only add."""
    no_gpu = [line for line in records() if isinstance(line, LibraryRecord)]
    traces = [write(tmp_path, header(), no_gpu)]
    assert merge_traces(traces).devices == ()
    traces.append(write(tmp_path, header(8, Role.SAMPLE), records("k")))
    [lack] = merge_traces(traces).incomplete
    assert lack.process is None
    fault.check(lack.text)
    assert not merge_traces(traces[1:]).incomplete
    traces.append(write(tmp_path, header(9), records()))
    assert not merge_traces(traces).incomplete


@pytest.mark.slow
def test_lines_for_a_shell(tmp_path: Path) -> None:
    """Whatever the folder is called, a shell reads its name."""
    folder = tmp_path / "it's $HOME; `x`"
    folder.mkdir()
    code = (
        'eval "$(negativa trace --attach-env --one-of 7 2>/dev/null)" && '
        'echo "$NEGATIVA_SAMPLE:$NEGATIVA_TRACE_DIR"'
    )
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", code], cwd=folder, env=environ, capture_output=True, text=True, check=True
    )
    sample, _, traces = done.stdout.strip().partition(":")
    assert sample == "7" and Path(traces).is_dir() and Path(traces).is_relative_to(folder)
