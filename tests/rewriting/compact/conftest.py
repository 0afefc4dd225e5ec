from __future__ import annotations

import pytest

from tests.support.sound import Sound, build_sound


@pytest.fixture(scope="package")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[Sound]:
    return build_sound(tmp_path_factory.mktemp("sound"))
