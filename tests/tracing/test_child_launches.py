"""Launches of child processes, which the native library counts by CUPTI's activity records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pytest_negativa.models.settings import TraceLevel
from pytest_negativa.models.trace import Usage
from pytest_negativa.tracing.children import injection_library
from pytest_negativa.tracing.trace_files import TraceReader
from tests.support.compiling import needs_compiler
from tests.support.injected import Injected

pytestmark = needs_compiler

# Kernels' names must outlive their launches, as those of the driver do.
LAUNCH = """
names = [ctypes.create_string_buffer(name) for name in (b'add', b'mul', bytes([111, 255, 10]))]
def launch(number, gpu_ns, times=1):
    for _ in range(times): DRIVER.cuLaunchKernel(names[number], ctypes.c_uint64(gpu_ns))
start(); use("k")
"""

# What NVTX does at the first range: nvtxDetail/nvtxInit.h, slots 9 (push) and 11 (pop) of its core.
NVTX = """
POINTER, SIZE = ctypes.c_void_p, 20
slots = (POINTER * SIZE)()
table = (POINTER * SIZE)(*(ctypes.addressof(slots) + 8 * i for i in range(SIZE)))
OUT, LENGTH = ctypes.POINTER(POINTER), ctypes.POINTER(ctypes.c_uint)
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, OUT, LENGTH)
def module_table(module, given, length):
    given[0], length[0] = ctypes.addressof(table), SIZE
    return module == 1
callbacks = (POINTER * 2)(16, ctypes.cast(module_table, POINTER))
export = ctypes.CFUNCTYPE(POINTER, ctypes.c_uint32)(lambda kind: ctypes.addressof(callbacks))
assert ctypes.CDLL(os.environ["CUDA_INJECTION64_PATH"]).InitializeInjectionNvtx2(export) == 1
enter = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(slots[9])
leave = ctypes.CFUNCTYPE(ctypes.c_int)(slots[11])
"""


@pytest.fixture
def start(tmp_path: Path, driver: Path) -> Iterator[Callable[[TraceLevel], Injected]]:
    injection = injection_library()
    assert injection is not None
    started: list[Injected] = []

    def at(level: TraceLevel) -> Injected:
        started.append(Injected(tmp_path, driver, injection, level=level))
        return started[-1]

    yield at
    for one in started:
        with closing(one):
            pass


def counts(usage: Usage) -> dict[tuple[str, tuple[str, ...]], tuple[int, int | None]]:
    return {
        (name, usage.ranges_of(row)): (row.count, row.gpu_ns) for name, row in usage.iter_launches()
    }


def test_each_launch_counts_for_the_test_that_started_the_child(
    start: Callable[[TraceLevel], Injected],
) -> None:
    injected = start(TraceLevel.LAUNCH)
    injected.environ["PYTEST_CURRENT_TEST"] = "test_a.py::test_child (call)"
    injected.play(f"{LAUNCH}launch(0, 5, 3); launch(1, 7); launch(0, 1); launch(2, 2)")
    usage = injected.usage()
    assert counts(usage) == {
        ("add", ()): (4, 16),
        ("mul", ()): (1, 7),
        ("o\\xff\n", ()): (1, 2),
    }
    assert {usage.contexts[row.context].test for _, row in usage.iter_launches()} == {
        "test_a.py::test_child"
    }
    assert all(process.counts_launches for process in usage.processes)
    assert not usage.warnings


def test_launches_of_several_buffers_add_up(start: Callable[[TraceLevel], Injected]) -> None:
    injected = start(TraceLevel.LAUNCH)
    injected.play(
        f"{LAUNCH}for _ in range(5): launch(0, 1, 30); launch(1, 1, 20); "
        "DRIVER.cuptiActivityFlushAll(0)"
    )
    assert counts(injected.usage()) == {("add", ()): (150, 150), ("mul", ()): (100, 100)}


def test_a_killed_child_has_written_what_a_second_ago_was_launched(
    start: Callable[[TraceLevel], Injected],
) -> None:
    injected = start(TraceLevel.LAUNCH)
    injected.play(
        f"{LAUNCH}launch(0, 1, 9)\n"
        "traces, RECORD = Path(os.environ['NEGATIVA_TRACE_DIR']), '\"record\":\"launch\"'\n"
        "def written(): return any(RECORD in one.read_text() for one in traces.iterdir())\n"
        "while not written(): DRIVER.cuptiActivityFlushAll(0)\n"
        "launch(1, 1, 5)\nos.kill(os.getpid(), 9)",
        status=-9,
    )
    usage = injected.usage()
    assert counts(usage) == {("add", ()): (9, 9)}
    [warning] = usage.warnings
    assert warning.code == "launches-cut" and "its last launches are not counted" in warning.text
    assert not usage.incomplete


def test_launches_by_range(start: Callable[[TraceLevel], Injected]) -> None:
    injected = start(TraceLevel.RANGE)
    injected.play(
        # Before CUDA.
        f"{NVTX}{LAUNCH}"
        "launch(0, 1); enter(b'outer'); launch(0, 2); enter(b'inner'); launch(1, 3, 2)\n"
        "DRIVER.cuptiActivityFlushAll(0)\n"
        "leave(); launch(0, 4); leave(); launch(1, 5)"
    )
    assert counts(injected.usage()) == {
        ("add", ()): (1, 1),
        ("add", ("outer",)): (2, 6),
        ("mul", ("outer", "inner")): (2, 6),
        ("mul", ()): (1, 5),
    }


def test_a_number_of_another_tool_is_no_range(start: Callable[[TraceLevel], Injected]) -> None:
    injected = start(TraceLevel.RANGE)
    injected.play(
        f"{LAUNCH}for number in (7, 1 << 30):\n"
        "    DRIVER.cuptiActivityPushExternalCorrelationId(5, ctypes.c_uint64(number))\n"
        "    launch(0, 1)"
    )
    assert counts(injected.usage()) == {("add", ()): (2, 2)}


def test_nothing_is_counted_at_level_lookup(start: Callable[[TraceLevel], Injected]) -> None:
    injected = start(TraceLevel.LOOKUP)
    injected.play(f"{LAUNCH}launch(0, 1)")
    assert not counts(injected.usage())


def test_a_cupti_that_counts_no_launches(start: Callable[[TraceLevel], Injected]) -> None:
    injected = start(TraceLevel.LAUNCH)
    injected.environ["STANDIN_CUPTI_OLD"] = "1"
    injected.play(f"{LAUNCH}launch(0, 1)")
    usage = injected.usage()
    assert "launches-unavailable" in {warning.code for warning in usage.warnings}
    assert not counts(usage)


def test_a_forked_child_counts_its_own(start: Callable[[TraceLevel], Injected]) -> None:
    injected = start(TraceLevel.LAUNCH)
    injected.play(
        LAUNCH.replace('start(); use("k")', "")
        + "child = os.fork()\nstart(); use('k'); launch(0, 1, 2 if child else 3)\n"
        "os.waitpid(child, 0) if child else sys.exit()"
    )
    assert counts(injected.usage()) == {("add", ()): (5, 5)}
    assert len(list(map(TraceReader, injected.run.trace_files()))) == 2
