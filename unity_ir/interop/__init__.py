"""
Plans in the terms of other systems: PyTorch's DTensor (`dtensor`), and torch.distributed.pipelining (`pipelining`).
"""
