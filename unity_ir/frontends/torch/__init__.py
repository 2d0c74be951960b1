"""Import from PyTorch through `torch.export`: `from_torch(module, example_inputs, loss=...)`."""

from unity_ir.frontends.torch.imported import Imported, from_torch

__all__ = ["Imported", "from_torch"]
