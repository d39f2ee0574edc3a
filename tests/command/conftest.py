from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commandhost import CommandHost


@pytest.fixture
def host(tmp_path: Path) -> Iterator[CommandHost]:
    host = CommandHost(tmp_path)
    yield host
    host.close()
