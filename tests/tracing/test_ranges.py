"""NVTX ranges: from the functions that NVTX calls to the names around a launch."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_negativa.tracing.children import injection_library
from pytest_negativa.tracing.detector import TracerUnavailable
from pytest_negativa.tracing.launches import KernelLaunches, LaunchCounter, Ranges
from tests.support.compiling import needs_compiler
from tests.support.libraries import ROOT

# What NVTX and CUPTI are to the native library, in a process of its own: it keeps its state. The
# tables are those of nvtx3/nvtxDetail/nvtxTypes.h, the attributes those of nvtx3/nvToolsExt.h.
PROGRAM = """
import ctypes, json, os, sys, threading

# A file mapped under CUPTI's name.
cupti = ctypes.CDLL(sys.argv[1])
from pytest_negativa.tracing.launches import Ranges
ranges = Ranges()
injection = ctypes.CDLL(os.environ["NVTX_INJECTION64_PATH"])

POINTER, SIZE = ctypes.c_void_p, 20
slots = {module: (POINTER * SIZE)() for module in (1, 5)}
tables = {
    module: (POINTER * SIZE)(*(ctypes.addressof(own) + 8 * i for i in range(SIZE)))
    for module, own in slots.items()
}
OUT, LENGTH = ctypes.POINTER(POINTER), ctypes.POINTER(ctypes.c_uint)
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, OUT, LENGTH)
def module_table(module, table, length):
    table[0], length[0] = ctypes.addressof(tables[module]), SIZE
    return 1
callbacks = (POINTER * 2)(16, ctypes.cast(module_table, POINTER))
EXPORT = ctypes.CFUNCTYPE(POINTER, ctypes.c_uint32)
export = EXPORT(lambda kind: ctypes.addressof(callbacks) if kind == 1 else None)
assert injection.InitializeInjectionNvtx2(export) == 1

def call(module, number, *types, result=ctypes.c_int):
    return ctypes.CFUNCTYPE(result, *types)(slots[module][number])
class Attributes(ctypes.Structure):
    _fields_ = [("head", ctypes.c_uint32 * 8), ("type", ctypes.c_int), ("message", POINTER)]
assert ctypes.sizeof(Attributes) == 48
push_a, push_w, pop = call(1, 9, ctypes.c_char_p), call(1, 10, ctypes.c_wchar_p), call(1, 11)
push_ex = call(1, 8, ctypes.POINTER(Attributes))
domain = call(5, 12, ctypes.c_char_p, result=POINTER)(b"a domain")
register = call(5, 10, POINTER, ctypes.c_char_p, result=POINTER)
domain_push = call(5, 4, POINTER, ctypes.POINTER(Attributes))
domain_pop = call(5, 5, POINTER)

def now():
    found = ctypes.c_uint64 * 64
    held = found.in_dll(cupti, "held")
    depth = ctypes.c_int.in_dll(cupti, "depth").value
    return [list(ranges.names(held[i])) for i in range(depth)]

def registered(name):
    return ctypes.byref(Attributes(type=3, message=register(domain, name)))

SCENE = sys.argv[2]
seen = []
exec(SCENE)
print(json.dumps(seen))
"""

CUPTI = """
#include <stdint.h>
uint64_t held[64];
int depth;
int cuptiActivityPushExternalCorrelationId(int kind, uint64_t id) {
    if (kind != 5) return 1;
    held[depth++] = id;
    return 0;
}
int cuptiActivityPopExternalCorrelationId(int kind, uint64_t *last) {
    *last = held[--depth];
    return kind != 5;
}
"""


@pytest.fixture(scope="module")
def cupti(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cupti")
    (folder / "cupti.c").write_text(CUPTI)
    library = folder / "libcupti.so.13"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "cupti.c"], check=True)
    return library


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("scene", "seen"),
    [
        pytest.param(
            "push_a(b'outer'); push_a(b'inner'); seen += [now()]; pop(); seen += [now()]; pop()\n"
            "seen += [now()]",
            [[["outer"], ["outer", "inner"]], [["outer"]], []],
            id="nested",
        ),
        pytest.param(
            "push_a(b'outer'); push_w('wide'); seen += [now()]; pop(); seen += [now()]",
            [[["outer"], ["outer", ""]], [["outer"]]],
            id="wide",
        ),
        pytest.param(
            "push_ex(registered(b'registered')); push_ex(ctypes.byref(Attributes()))\n"
            "seen += [now()]",
            [[["registered"], ["registered", ""]]],
            id="attributes",
        ),
        pytest.param(
            "push_a(b'a'); domain_push(domain, registered(b'd')); push_a(b'b')\n"
            "domain_pop(domain); seen += [now()]\n"
            "seen += [[pop(), pop(), pop(), domain_pop(domain)], now()]",
            # The range of the domain ends inside of b, so it goes with b.
            [[["a"], ["a", "d"], ["a", "d", "b"]], [2, 0, -1, -1], []],
            id="domains",
        ),
        pytest.param(
            "push_a(b'aten::mm, seq = 7, op_id = 3'); pop(); push_a(b'aten::mm, op_id = 4')\n"
            "seen += [now()]; seen += [ctypes.c_uint64.in_dll(cupti, 'held').value]",
            [[["aten::mm"]], 1],
            id="operators of PyTorch",
        ),
        pytest.param(
            "push_a(b'Module:#m=f,program_id=12#')\n"
            "push_a(b'Thunk:#a=b,unique_hlo_op_id=345,c=d#'); push_a(b'a, b'); seen += [now()[-1]]",
            [["Module:#m=f#", "Thunk:#a=b,c=d#", "a, b"]],
            id="programs of XLA",
        ),
        pytest.param(
            "for _ in range(40): push_a(b'x')\n"
            "seen += [len(now())]\n"
            "for _ in range(8): pop()\n"
            "seen += [len(now())]\n"
            "for _ in range(32): pop()\n"
            "seen += [len(now()), pop()]",
            [32, 32, 0, -1],
            id="too deep",
        ),
        pytest.param(
            "for n in range(10_003): push_a(b'%d' % n); pop()\n"
            "push_a(b'1'); push_a(b'new'); seen += [now()]",
            [[["1"], ["1"]]],
            id="too many",
        ),
        pytest.param(
            "push_a(b'n' * 1000 + b'\\xff'); seen += [len(now()[0][0])]", [256], id="too long"
        ),
        pytest.param(
            "push_a(b'here')\n"
            "thread = threading.Thread(target=lambda: (push_a(b'there'), seen.extend([now()])))\n"
            "thread.start(); thread.join()",
            [[["here"], ["there"]]],
            id="threads",
        ),
        pytest.param(
            "if os.fork() == 0:\n    os._exit(push_a(b'x') or len(now()))\n"
            "seen += [os.waitstatus_to_exitcode(os.wait()[1])]",
            [0],
            id="a forked child",
        ),
    ],
)
def test_a_thread_is_in_its_ranges(cupti: Path, scene: str, seen: list[Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, cupti, scene], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == seen


def test_a_process_that_counts_no_launches_leaves_nvtx_alone() -> None:
    library = ctypes.CDLL(str(injection_library()))
    assert library.InitializeInjectionNvtx2(None) == 0


def test_another_tool_keeps_the_ranges() -> None:
    with pytest.raises(TracerUnavailable, match=r"another tool: .* is set to /tool\.so"):
        Ranges({"NVTX_INJECTION64_PATH": "/tool.so"})


class Recorded:
    """Ranges as they were when the activity records in tests/data/launches were made."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = {int(number): tuple(name.split(" > ")) for number, name in names.items()}

    def names(self, number: int) -> tuple[str, ...]:
        return self._names[number] if number else ()


def records() -> tuple[list[list[SimpleNamespace]], Recorded]:
    """The buffers that cupti-python 13.0.1 gave for a scene of PyTorch on an H200."""
    recorded = json.loads((ROOT / "tests/data/launches/torch.json").read_text())
    fields = {
        10: ("name", "start", "end", "graph_node_id"),
        39: ("external_id", "external_kind"),
        5: ("cbid",),
    }
    buffers = [
        [
            SimpleNamespace(
                kind=kind,
                correlation_id=correlation,
                **dict(zip(fields[kind], values, strict=True)),
            )
            for kind, correlation, *values in buffer
        ]
        for buffer in recorded["buffers"]
    ]
    return buffers, Recorded(recorded["ranges"])


def counted(buffers: Iterable[Iterable[object]], ranges: Recorded | None) -> list[KernelLaunches]:
    counter = LaunchCounter(cast(Ranges, ranges))
    for buffer in buffers:
        counter._take_buffer(buffer)
    return sorted(counter._take_counts())


def test_launches_of_pytorch_by_range() -> None:
    buffers, ranges = records()
    found = counted(buffers, ranges)
    gemm = "sm80_xmma_gemm_f32f32_f32f32_f32_n"
    backward = "autograd::engine::evaluate_function: MmBackward0", "MmBackward0", "aten::mm"
    by_range: Counter[tuple[str, ...]] = Counter()
    for one in found:
        by_range[one.ranges] += one.launches if one.name.startswith(gemm) else 0
    assert +by_range == {
        # A product is a pair of kernels: one before any range, another before the graph is made,
        # the last in the replay outside of a range.
        (): 6,
        ("outer",): 2,
        ("aten::matmul", "aten::mm"): 2,
        backward: 2,
        # Two replays.
        ("replay",): 4,
    }
    assert sum(one.gpu_ns for one in found if one.ranges == backward) == 10_144 + 3_008
    assert {one.launches for one in found if one.ranges == ("outer", "inner")} == {1}
    # Without ranges, all are the same launches.
    whole = counted(buffers, None)
    assert sum(one.launches for one in whole) == sum(one.launches for one in found) == 34
    assert sum(one.gpu_ns for one in whole) == sum(one.gpu_ns for one in found)


def test_ranges_come_however_cupti_cuts_its_buffers() -> None:
    buffers, ranges = records()
    whole = counted(buffers, ranges)
    flat = [record for buffer in buffers for record in buffer]
    assert counted([[record] for record in flat], ranges) == whole
    kernels = [record for record in flat if record.kind == 10]
    calls = [record for record in flat if record.kind != 10]
    assert counted([kernels, calls], ranges) == counted([calls, kernels], ranges) == whole


def test_a_launch_whose_call_is_lost_is_outside_of_ranges() -> None:
    buffers, ranges = records()
    kernels = [record for buffer in buffers for record in buffer if record.kind == 10]
    found = counted([kernels], ranges)
    assert {one.ranges for one in found} == {()}
    assert sum(one.launches for one in found) == 34
