"""Lets the trainer of speculators 0.9 run without an accelerator: it asks torch for one by its index.

In PYTHONPATH of the training job; ctl's own sitecustomize stands before it and runs it.
"""

import sys
from importlib.machinery import PathFinder


class Patch:
    """Changes `speculators.train.trainer` when it is imported, and nothing before."""

    def find_spec(self, name, path=None, target=None):
        if name != "speculators.train.trainer":
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            import torch

            module.get_local_rank = lambda: "cpu"
            torch.accelerator.synchronize = lambda *_: None
            setup = module.Trainer.setup_trainer

            def setup_trainer(self):
                setup(self)
                self.device_type = "cpu"

            module.Trainer.setup_trainer = setup_trainer

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Patch())
