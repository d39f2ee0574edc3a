from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hostrun import HostRun


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostRun]:
    host = HostRun(tmp_path)
    yield host
    host.close()
