"""Progress in a log: a line now and then."""

from __future__ import annotations

from pytest_negativa.reporting.progress_lines import ProgressLines


def test_a_line_every_thirty_seconds() -> None:
    said: list[str] = []
    now = [0.0]
    lines = ProgressLines(said.append, "negativa: reading libraries", clock=lambda: now[0])
    for seconds, done in ((1, 10), (31, 2000), (40, 3000), (65, 4_000_000), (99, 5_000_000)):
        now[0] = seconds
        lines.update(done, 5_000_000)
    # Nothing at the end: what follows shows that it is done.
    assert said == [
        "negativa: reading libraries: 2.0 kB of 5.0 MB",
        "negativa: reading libraries: 4.0 MB of 5.0 MB",
    ]
