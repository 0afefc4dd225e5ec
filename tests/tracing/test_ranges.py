"""NVTX ranges: from the functions that NVTX calls to the names around a launch."""

from __future__ import annotations

import ctypes
import functools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_negativa.tracing.children import injection_library
from pytest_negativa.tracing.detector import TracerUnavailable
from pytest_negativa.tracing.launches import LaunchCounter
from tests.support.compiling import needs_compiler
from tests.support.libraries import ROOT

# What NVTX and CUPTI are to the native library, in a process of its own: it keeps its state. The
# tables are those of nvtx3/nvtxDetail/nvtxTypes.h, the attributes those of nvtx3/nvToolsExt.h.
PROGRAM = """
import ctypes, json, os, sys, threading

# A file mapped under CUPTI's name.
cupti = ctypes.CDLL(sys.argv[1])
from pytest_negativa.models.trace import Context, Phase
from pytest_negativa.tracing.launches import LaunchCounter
ranges = LaunchCounter(in_ranges=True)
assert ranges.start(Context(phase=Phase.IMPORT)) is None
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
    held = found.in_dll(cupti, "pushed")
    depth = ctypes.c_int.in_dll(cupti, "depth").value
    return [list(ranges.names(held[i])) for i in range(depth)]

def registered(name):
    return ctypes.byref(Attributes(type=3, message=register(domain, name)))

SCENE = sys.argv[2]
seen = []
exec(SCENE)
print(json.dumps(seen))
"""

# Hands the buffers of records that standard input has over, the ranges by their numbers here.
RECORDED = """
import struct
given, names, numbers = json.load(sys.stdin), [], {}
for number, name in given["ranges"].items():
    around = name.split(" > ")
    for one in around: push_a(one.encode())
    numbers[int(number)] = (ctypes.c_uint64 * 64).in_dll(cupti, "pushed")[len(around) - 1]
    for one in around: pop()
def packed(kind, call, *values):
    record = bytearray(160)
    struct.pack_into("<I", record, 0, kind)
    if kind == 10:
        name, start, end, node = values
        names.append(ctypes.create_string_buffer(name.encode()))
        struct.pack_into("<QQ", record, 16, start, end)
        struct.pack_into("<I", record, 92, call)
        struct.pack_into("<Q", record, 104, ctypes.addressof(names[-1]))
    elif kind == 39:
        number, external = values
        struct.pack_into("<IQI", record, 4, external, numbers[number], call)
    return bytes(record)
for call in given["phases"]:
    ranges.called(call)
    ranges.begin(Context(phase=Phase.CALL, nodeid=f"after {call}"))
for buffer in given["buffers"]:
    records = b"".join(packed(*one) for one in buffer)
    cupti.hand_over(records, ctypes.c_size_t(len(records)))
taken = [*ranges.take(all_of_them=False), *ranges.take(all_of_them=True)]
assert all(record.count for _, record in taken)
assert not list(ranges.take(all_of_them=True))
seen += sorted(
    [context.nodeid or "", one.name, one.ranges, one.count, one.gpu_ns] for context, one in taken
)
ranges.stop()
"""


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
            "seen += [now()]; seen += [ctypes.c_uint64.in_dll(cupti, 'pushed').value]",
            [[["aten::mm"]], 1],
            id="operators of PyTorch",
        ),
        pytest.param(
            "push_a(b'Module:#m=f,program_id=12#')\n"
            "push_a(b'Thunk:#a=b,unique_hlo_op_id=345,c=d#'); push_a(b'a, b'); seen += [now()[-1]]",
            [["Module:#m=f", "Thunk:#a=b", "a, b"]],
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


@needs_compiler
def test_another_tool_keeps_the_ranges(cupti: Path) -> None:
    program = """
import ctypes, sys
cupti = ctypes.CDLL(sys.argv[1])
from pytest_negativa.models.trace import Context, Phase
from pytest_negativa.tracing.launches import LaunchCounter
counter = LaunchCounter(in_ranges=True, environ={"NVTX_INJECTION64_PATH": "/tool.so"})
print(*counter.start(Context(phase=Phase.IMPORT)))
"""
    command = [sys.executable, "-c", program, str(cupti)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told == (
        "ranges-unavailable NVTX ranges go to another tool: NVTX_INJECTION64_PATH is set to "
        "/tool.so\n"
    )


def test_no_launches_are_counted_without_cupti() -> None:
    with pytest.raises(TracerUnavailable, match="can't be counted without CUPTI's file"):
        LaunchCounter()


Buffers = list[list[list[Any]]]


@functools.cache
def recorded() -> dict[str, Any]:
    """The buffers that CUPTI 13.0 gave for a scene of PyTorch on an H200, and its ranges.

    The calls of the runtime are in them, too (kind 5), which are not asked for any more.
    """
    found: dict[str, Any] = json.loads((ROOT / "tests/data/launches/torch.json").read_text())
    return found


class Launches(NamedTuple):
    """Launches of a kernel in a phase, by the node id of a test."""

    phase: str
    name: str
    ranges: tuple[str, ...]
    launches: int
    gpu_ns: int


def counted(cupti: Path, buffers: Buffers, *phases: int) -> list[Launches]:
    """The launches of the buffers, with phases that begin after these calls."""
    given = {"buffers": buffers, "ranges": recorded()["ranges"], "phases": phases}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, cupti, RECORDED],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [
        Launches(phase, name, tuple(ranges), *counts)
        for phase, name, ranges, *counts in json.loads(done.stdout)
    ]


@needs_compiler
def test_launches_of_pytorch_by_range(cupti: Path) -> None:
    found = counted(cupti, recorded()["buffers"])
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
    assert sum(one.launches for one in found) == 34


@needs_compiler
def test_ranges_come_however_cupti_cuts_its_buffers(cupti: Path) -> None:
    buffers = recorded()["buffers"]
    whole = counted(cupti, buffers)
    flat = [record for buffer in buffers for record in buffer]
    assert counted(cupti, [[record] for record in flat]) == whole
    kernels = [record for record in flat if record[0] == 10]
    calls = [record for record in flat if record[0] != 10]
    assert counted(cupti, [kernels, calls]) == counted(cupti, [calls, kernels]) == whole


@needs_compiler
def test_a_launch_whose_call_is_lost_is_outside_of_ranges(cupti: Path) -> None:
    kernels = [one for buffer in recorded()["buffers"] for one in buffer if one[0] == 10]
    found = counted(cupti, [kernels])
    assert {one.ranges for one in found} == {()}
    assert sum(one.launches for one in found) == 34


@needs_compiler
def test_a_launch_belongs_to_the_phase_of_its_call(cupti: Path) -> None:
    """However late CUPTI hands the record over, and though the numbers of calls begin anew."""
    phases = [(2**32 - 40 + n) % 2**32 for n in (7, 7, 20, 38)]
    calls = [(2**32 - 40 + n) % 2**32 for n in (5, 8, 12, 30, 39, 42)]
    found = counted(cupti, [[[10, call, "k", 0, 1, 0] for call in calls[::-1]]], *phases)
    # Nothing is called between the first two phases.
    assert {one.phase: one.launches for one in found} == {
        "": 1,
        f"after {phases[1]}": 2,
        f"after {phases[2]}": 1,
        f"after {phases[3]}": 2,
    }
