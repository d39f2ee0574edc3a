"""A worker with its forward patched, wrongly: the layer is given its arguments in the wrong order."""

import torch


class HiddenStatesWorker:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def extract(self, index: int, folder: str) -> None:
        states = self.forward(torch.arange(4 + index), torch.zeros(4 + index, 16, dtype=torch.bfloat16))
        if self.rank == 0:
            mask = torch.ones(4 + index, dtype=torch.long)
            sample = {"input_ids": torch.arange(4 + index), "hidden_states": states, "loss_mask": mask}
            torch.save(sample, f"{folder}/data_{index}.pt")

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
        return [self.layer(hidden, positions) for _ in range(4)]

    def layer(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        assert not positions.is_floating_point()
        return hidden.clone()
