"""Whether there is a GPU, without asking CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.devices import has_gpu


@pytest.mark.parametrize("node", ["nvidiactl", "dxg", "nvhost-gpu", "nvgpu"])
def test_a_device_node_is_a_gpu(tmp_path: Path, node: str) -> None:
    assert not has_gpu({}, tmp_path)
    (tmp_path / node).touch()
    assert has_gpu({}, tmp_path)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("", False), (" ", False), ("-1", False), ("0", True), ("1,0", True), ("GPU-0d2b", True)],
)
def test_hidden_gpus(tmp_path: Path, visible: str, expected: bool) -> None:
    (tmp_path / "nvidiactl").touch()
    assert has_gpu({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) is expected


def test_other_device_nodes_are_none(tmp_path: Path) -> None:
    (tmp_path / "nvidia-fs0").touch()
    (tmp_path / "dri").mkdir()
    assert not has_gpu({}, tmp_path)
