"""The driver calls that a trace watches, and what Python's callbacks do with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_negativa.tracing.cupti import _raise_later, _slots
from pytest_negativa.tracing.drivercalls import DRIVER_CALLS, Action


def test_driver_calls_have_one_id_each() -> None:
    assert len({c.cbid for c in DRIVER_CALLS}) == len({c.name for c in DRIVER_CALLS}) == 25
    assert [c.cbid for c in DRIVER_CALLS] == sorted(c.cbid for c in DRIVER_CALLS)


def find_header(name: str) -> Path | None:
    places = [*sys.path, "/usr/local/cuda"]
    for place in places:
        for below in ("nvidia/cu13/include", "nvidia/cuda_cupti/include", "include"):
            if (Path(place) / below / name).is_file():
                return Path(place) / below / name
    return None


def test_driver_calls_agree_with_cupti_s_headers() -> None:
    """Ids and parameters, against the headers wherever CUPTI or CUDA is installed."""
    ids, parameters = find_header("cupti_driver_cbid.h"), find_header("generated_cuda_meta.h")
    if ids is None or parameters is None:
        pytest.skip("CUPTI's headers are not installed")
    id_text, parameter_text = ids.read_text(), parameters.read_text()
    subjects = {
        Action.KERNEL: ("name",),
        Action.DATA: ("name", "symbol"),
        Action.LOAD: ("image", "code", "fatCubin"),
        Action.LOAD_FILE: ("fname", "fileName"),
        Action.LINK_DATA: ("data",),
        Action.LINK_FILE: ("path",),
        Action.LINK_COMPLETE: ("cubinOut",),
    }
    for call in DRIVER_CALLS:
        words = [line.split() for line in id_text.splitlines() if f"_CBID_{call.name} " in line]
        assert [w[2].rstrip(",") for w in words] == [str(call.cbid)], call
        start = parameter_text.index(f"typedef struct {call.name}_params_st {{")
        body = parameter_text[start : parameter_text.index("}", start)].split("{")[1]
        members = [m.split()[-1].lstrip("*") for m in body.split(";") if m.strip()]
        assert _slots(call) <= len(members), call
        wanted = subjects.get(call.action)
        assert wanted is None or members[call.subject] in wanted, (call, members)


def test_what_a_signal_raised_in_a_callback_comes_later() -> None:
    with pytest.raises(KeyboardInterrupt, match="why"):
        _raise_later(KeyboardInterrupt("why"))
        for _ in range(1000):
            pass
