"""unity-ir: joint algebraic and parallelization search for training graphs, lowered to Triton and NCCL programs."""

__version__ = "0.1.0"
