"""What a listing of an output counts beside what may be deleted."""

from __future__ import annotations

import json
from pathlib import Path

from remote_payload.host.layout import OWNER_MARKER
from remote_payload.host.listing import scan


def test_whole_samples_are_counted_for_the_share_that_is_asked_for(tmp_path: Path) -> None:
    """Shares of several hosts lie in one folder: what another one wrote is not this one's."""
    output = tmp_path / "root" / "out"
    (output / "rows_0-9").mkdir(parents=True)
    names = (
        "hs_0.safetensors",
        "hs_1.safetensors",
        "hs_12.safetensors",
        "data_3.pt",
        "data_5.ckpt.gz",
        "rows_0-9/7.pt",
    )
    for name in (*names, ".hs_2.safetensors.partial", "config.json", "x_4.safetensors"):
        (output / name).write_bytes(b"1234")
    (output / OWNER_MARKER).write_text(json.dumps({"run_id": "20260101-000000-abcdef", "kind": "extract"}))
    counted = [scan(str(output), str(tmp_path / "root"), shard)["whole"] for shard in ((1, 1), (1, 2), (2, 2))]
    assert counted == [{"count": 6, "bytes": 24}, {"count": 2, "bytes": 8}, {"count": 4, "bytes": 16}]
