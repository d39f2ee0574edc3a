"""The Arrow data set beside `hs_*` files: what speculators trains from, and how it knows which file is whose.

Row i belongs to `hs_{i}.safetensors`, so there is a row for every index of the data set: also for the samples of
other shards, so that shares can be put into one folder, and an empty one for each record that was skipped. Without
this data set speculators' trainer, which looks its rows up in the files, has nothing to look up and generates anew.
The files are those of `datasets.save_to_disk`; pyarrow is enough to write them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from remote_payload.extract.dataset import Sample
from remote_payload.extract.formats import TEMPORARY_SUFFIX
from remote_payload.extract.records import require_pyarrow
from remote_payload.host.files import fsync_folder, write_json

DATA, INFO, STATE = "data-00000-of-00001.arrow", "dataset_info.json", "state.json"
FILES = (DATA, INFO, STATE)

BATCH_TOKENS = 1 << 20
"""Tokens of a record batch: 16 MiB of ids and masks."""

_LIST = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "Sequence"}
FEATURES = {"input_ids": _LIST, "loss_mask": _LIST, "seq_len": {"dtype": "int64", "_type": "Value"}}


def write_data_set(folder: str, samples: Iterable[Sample], *, indexes: int, fingerprint: str) -> None:
    """Write the rows 0..indexes-1; `samples` rise in their index. Samples without a mask count every token.

    `state.json`, without which no folder is a data set, comes last. Runs that share a folder write the same rows, so
    it does not matter which is last. Raises ConfigError without pyarrow, OSError.
    """
    require_pyarrow("the data set beside hs_* files")
    import pyarrow

    ids = pyarrow.list_(pyarrow.int64())
    schema = pyarrow.schema(
        [("input_ids", ids), ("loss_mask", ids), ("seq_len", pyarrow.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": FEATURES}})},
    )
    os.makedirs(folder, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{DATA}.", suffix=TEMPORARY_SUFFIX, dir=folder)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o640)  # as the samples are
            with pyarrow.ipc.new_stream(file, schema) as writer:
                for rows in _batches(samples, indexes):
                    writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema=schema))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, os.path.join(folder, DATA))
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    write_json(os.path.join(folder, INFO), {"citation": "", "description": "", "features": FEATURES, "license": ""})
    state: dict[str, Any] = {
        "_data_files": [{"filename": DATA}], "_fingerprint": fingerprint, "_format_columns": None,
        "_format_kwargs": {}, "_format_type": "torch", "_output_all_columns": False, "_split": None,
    }  # fmt: skip
    write_json(os.path.join(folder, STATE), state)
    fsync_folder(folder)


def _batches(samples: Iterable[Sample], indexes: int) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    tokens = 0
    for row in _rows(samples, indexes):
        batch.append(row)
        tokens += row["seq_len"] + 1
        if tokens >= BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _rows(samples: Iterable[Sample], indexes: int) -> Iterator[dict[str, Any]]:
    place = 0
    for sample in samples:
        yield from _holes(sample.index - place)
        mask = list(sample.loss_mask) if sample.loss_mask is not None else [1] * len(sample.token_ids)
        yield {"input_ids": sample.token_ids, "loss_mask": mask, "seq_len": len(mask)}
        place = sample.index + 1
    yield from _holes(indexes - place)


def _holes(count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        yield {"input_ids": [], "loss_mask": [], "seq_len": 0}
