"""Write the kernels of bound lines: a Triton generator or a PyTorch writer per form; `launchers` takes one by form."""
