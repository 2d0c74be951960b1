"""Plans in the terms of other systems: PyTorch's DTensor."""
