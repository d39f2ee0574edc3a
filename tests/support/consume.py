"""Run in a process of its own: a trainer's loader reads a folder, and what it gave is saved for the test.

python consume.py CONSUMER FOLDER OUT [WORD ...]
"""

import sys
import types
from pathlib import Path

import torch


def speculators(folder: Path, *words: str) -> list:
    """The training data set of speculators 0.9 over the Arrow data set and the hs_* files beside it."""
    from hs_connectors import FileTransfer, FP8Transfer
    from speculators.data_generation.offline import check_hidden_states, find_corrupt_hidden_state_indices
    from speculators.train.data import ArrowDataset, CollateFn
    from speculators.train.recovery import SampleUnavailable

    dtype = getattr(torch, words[0])
    transfer = FP8Transfer(folder, dtype) if "fp8" in words else FileTransfer(folder)
    data = ArrowDataset(max_len=64, datapath=folder, transfer=transfer, on_missing="skip", hidden_states_dtype=dtype)
    files = [index for index in range(len(data)) if (folder / f"hs_{index}.safetensors").exists()]
    assert find_corrupt_hidden_state_indices(folder, files) == {}
    found = []
    for index in range(len(data)):
        sample = data[index]
        if isinstance(sample, SampleUnavailable):
            assert index not in files
            continue
        check_hidden_states(transfer.get_cached(index), data.data[index]["input_ids"].tolist())
        found.append({"index": torch.tensor(index), **sample})
    width = found[0]["verifier_last_hidden_states"].shape[-1]
    batch = CollateFn(64, width, dtype=dtype)([{k: v for k, v in item.items() if k != "index"} for item in found])
    assert batch["hidden_states"].shape == (1, 64, 3 * width)
    return found


def speculators_03(folder: Path, *words: str) -> list:
    """The training data set of speculators 0.3; its package needs an older pydantic, its loader does not."""
    root = next(Path(path) / "speculators" for path in sys.path if (Path(path) / "speculators").is_dir())
    for name in ("speculators", "speculators.train"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.parent.joinpath(*name.split(".")))]
        sys.modules[name] = package
    from speculators.train.data import Eagle3SampleFileDataset

    data = Eagle3SampleFileDataset(max_len=64, datapath=str(folder), hidden_states_dtype=getattr(torch, words[0]))
    order = [int(Path(path).stem.removeprefix("data_")) for path in data.data]
    return [{"index": torch.tensor(index), **data[place]} for place, index in enumerate(order)]


def specforge(folder: Path, *words: str) -> list:
    """SpecForge's offline reader, its feature store, and what its trainer makes of a sample."""
    from specforge.data.preprocessing import process_offline_eagle3_sample
    from specforge.runtime.data_plane.feature_store import load_feature_file
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    found = []
    for ref in OfflineManifestReader(str(folder), validate_files=True).read():
        path = ref.feature_store_uri.removeprefix("file://")
        sample = process_offline_eagle3_sample(load_feature_file(path), max_len=64)
        index = int(Path(path).stem.removeprefix("data_"))
        found.append({"index": torch.tensor(index), "tokens": torch.tensor(ref.num_tokens), **sample})
    return found


def arrow(folder: Path, *words: str) -> list:
    """Write a data set as `speculators prepare-data` does: `datasets.save_to_disk` with torch's format."""
    import datasets

    rows = {"input_ids": [[5, 6, 7], [8, 9], [3]], "loss_mask": [[0, 1, 1], [0, 1], [1]], "seq_len": [3, 2, 1]}
    data = datasets.Dataset(datasets.table.InMemoryTable.from_pydict(rows), fingerprint="e")
    data.set_format(type="torch", new_fingerprint="f")  # its own is of a pickle, which newer pyarrows refuse
    data.save_to_disk(folder)
    return []


if __name__ == "__main__":
    consumer, source, out, *rest = sys.argv[1:]
    torch.save(globals()[consumer](Path(source), *rest), out)
