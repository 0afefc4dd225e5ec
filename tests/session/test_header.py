"""pytest's header tells the device, the configuration and a replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_negativa.devices import gpu_names
from pytest_negativa.models.settings import Settings, TraceLevel
from pytest_negativa.session.reporter import describe_session
from tests.support.analyses import settings
from tests.support.sessions import Project


@pytest.fixture
def replaying(tmp_path: Path) -> Settings:
    return settings(tmp_path, "trace: {replay: recorded, level: launch}")


def describe(
    found: Settings,
    root: Path,
    gpus: tuple[str, ...] = (),
    *,
    recorded: TraceLevel | None = None,
    not_traced: str | None = None,
) -> str:
    return describe_session(found, gpus=gpus, recorded=recorded, not_traced=not_traced, root=root)


def test_the_line(replaying: Settings, tmp_path: Path) -> None:
    end = ", level launch, negativa.yaml"
    two = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3")
    assert describe(replaying, tmp_path, two) == f"negativa: tracing on {two[0]}{end}"
    assert describe(replaying, tmp_path) == f"negativa: tracing on a GPU{end}"
    shown = describe(replaying, tmp_path, recorded=TraceLevel.LOOKUP)
    assert shown == "negativa: no GPU, replaying recorded, level lookup, negativa.yaml"
    elsewhere = describe(replaying, tmp_path / "below", recorded=TraceLevel.RANGE)
    assert f"replaying {tmp_path}/recorded" in elsewhere
    shown = describe(replaying, tmp_path, not_traced="why\x1b")
    assert shown == f"negativa: GPU code not traced: why\\x1b{end}"


def test_names_of_gpus(tmp_path: Path) -> None:
    for number in (1, 0):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        text = f"Model: \t\t NVIDIA A{number}00\nIRQ:   \t\t 1\nGPU UUID: \t GPU-{number}\n"
        (folder / "information").write_text(text)
    (tmp_path / "0000:02:00.0" / "information").mkdir(parents=True)
    assert gpu_names(tmp_path) == ("NVIDIA A000", "NVIDIA A100")
    assert gpu_names(tmp_path / "none") == ()


def test_in_a_session(project: Project) -> None:
    project.write("test_a.py", "def test_passes(): pass\n")
    shown = project.pytest("--negativa").stdout
    assert "\nnegativa: no GPU, replaying recorded, level lookup, negativa.yaml\n" in shown
    assert "negativa:" not in project.pytest().stdout
