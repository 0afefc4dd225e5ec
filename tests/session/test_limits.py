"""The limits in sessions that trace, verify and heal: each on both sides."""

from __future__ import annotations

import pytest

from tests.support.verified import VerifiedProject

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> VerifiedProject:
    suite = "def test_use():\n    use(LIB, 0)\n"
    project = VerifiedProject(tmp_path_factory.mktemp("limits") / "project", suite).trace()
    project.negativa("baseline")
    text = (project.folder / "negativa-baseline.json").read_text()
    project.write("fewer.json", text.replace('"image_blur",', ""))
    return project


@pytest.mark.parametrize("mode", [(), ("--negativa-verify",), ("--negativa-heal",)])
@pytest.mark.parametrize(
    ("kept", "crossed", "says"),
    [
        (
            ("--negativa-max-gpu-code=67200",),
            ("--negativa-max-gpu-code=67199",),
            "max_gpu_code: there are 67,200 bytes",
        ),
        (
            ("--negativa-compare=fewer.json", "--negativa-compare-fail=new-kernels-untested:1"),
            ("--negativa-compare=fewer.json", "--negativa-compare-fail=new-kernels-untested:0"),
            "1 new kernel is untested (image_blur), the limit is 0",
        ),
    ],
    ids=["size", "growth"],
)
def test_a_limit_on_both_sides(
    traced: VerifiedProject,
    mode: tuple[str, ...],
    kept: tuple[str, ...],
    crossed: tuple[str, ...],
    says: str,
) -> None:
    assert says not in traced.pytest("-q", "--negativa", *mode, *kept).stdout
    assert says in traced.pytest("-q", "--negativa", *mode, *crossed, status=1).stdout
