"""What pages tell of removed code that tests touched."""

from __future__ import annotations

import pytest

from pytest_negativa.spare.misses import Miss, Misses
from pytest_negativa.verifying.touched import is_touched

PAGE = 4096


@pytest.mark.parametrize(
    ("first", "times", "span", "touched"),
    [
        # The driver reads a header before the payload, on a page that both share.
        (PAGE + 10, 1, (PAGE + 100, 2 * PAGE), False),
        (PAGE + 100, 1, (PAGE + 100, 2 * PAGE), True),
        # A page that is all payload.
        (PAGE, 1, (PAGE - 100, 2 * PAGE + 100), True),
        (PAGE, 0, (PAGE - 100, 2 * PAGE + 100), False),
        (PAGE, 1, (2 * PAGE, 3 * PAGE), False),
    ],
    ids=["header", "payload", "inside", "beside", "elsewhere"],
)
def test_what_was_touched_first_on_a_page(
    first: int, times: int, span: tuple[int, int], touched: bool
) -> None:
    misses = Misses("lib.so", bytes(32), 4 * PAGE, {1: Miss(times, first, False)})
    assert is_touched(misses, *span) == touched
