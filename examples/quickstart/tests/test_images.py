"""``rotate``, ``median`` and blurs of a radius above 2 have no test."""

from __future__ import annotations

import pytest
import quickstart

WIDTH, HEIGHT = 40, 30
# A white box on black.
BOX = bytes(
    255 if 10 <= x < 30 and 10 <= y < 20 else 0 for y in range(HEIGHT) for x in range(WIDTH)
)


@pytest.mark.gpu
def test_threshold() -> None:
    assert quickstart.threshold(bytes(range(256)), 100) == bytes(100) + b"\xff" * 156


@pytest.mark.gpu
def test_flip() -> None:
    assert quickstart.flip(b"abcdef", 3, 2) == b"cbafed"


@pytest.mark.gpu
@pytest.mark.parametrize("radius", [1, 2])
def test_blur_keeps_a_grey_image(radius: int) -> None:
    grey = bytes([100]) * (WIDTH * HEIGHT)
    assert quickstart.blur(grey, WIDTH, HEIGHT, radius) == grey


@pytest.mark.gpu
def test_outline() -> None:
    drawn = quickstart.outline(BOX, WIDTH, HEIGHT)
    assert drawn[15 * WIDTH + 10] == 255
    assert drawn[15 * WIDTH + 20] == drawn[5 * WIDTH + 5] == 0


def test_an_image_of_another_size() -> None:
    with pytest.raises(ValueError, match="5 pixels, expected 3 x 2"):
        quickstart.flip(b"abcde", 3, 2)
