"""lock, report and inspect are killed, or meet a full disk, at each of their changes."""

from __future__ import annotations

import signal

import pytest

from tests.support.kills import FULL_DISK, Ended, points, run
from tests.support.libraries import NEGATIVA
from tests.support.verified import VerifiedProject

pytestmark = pytest.mark.slow

HOW = pytest.mark.parametrize(
    "by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, FULL_DISK], ids=str
)
OLD = b"what was there before\n"


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> VerifiedProject:
    """A project with a proved run."""
    folder = tmp_path_factory.mktemp("proved")
    project = VerifiedProject(folder / "project", "def test_use():\n    use(LIB)\n").trace()
    project.verify()
    return project


def negativa(project: VerifiedProject, *words: str, at: int = 0, by: int = signal.SIGKILL) -> Ended:
    below = project.folder.parent
    return run([NEGATIVA, *words], below, at=at, by=by, env=project.environ, cwd=project.folder)


@pytest.mark.nightly
@HOW
@pytest.mark.parametrize(
    "words", [("lock", "-o", "new"), ("report", "json:new")], ids=lambda w: w[0]
)
def test_a_file_that_the_user_named(
    proved: VerifiedProject, words: tuple[str, ...], by: int
) -> None:
    """It is the old one or the new one."""
    target = proved.folder / "new"
    target.write_bytes(OLD)
    whole = negativa(proved, *words)
    assert whole.status == 0, whole
    new = target.read_bytes()
    assert new != OLD
    for at in points(whole.changes, seed=by):
        target.write_bytes(OLD)
        ended = negativa(proved, *words, at=at, by=by)
        assert target.read_bytes() in (OLD, new)
        if by == FULL_DISK:
            assert ended.status == 1
            assert "new: cannot be written: No space left on device" in ended.stderr
            assert target.read_bytes() == OLD
        assert negativa(proved, *words).status == 0
        assert target.read_bytes() == new
