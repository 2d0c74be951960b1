"""Triton kernels generated from bound TDL lines, as text: `launcher.launcher` and `optimizer.optimizer_launcher`."""
