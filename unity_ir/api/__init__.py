"""
Plan and train from Python: what the command lines do, for scripts of one's own (docs/api.md).

`plan` and `load` give a `Plan` (`plans.py`): a module of xDSL, changed by the passes of the command line, which is read
from a model or a PyTorch module (`source.py`), or a text (`modules.py`). `options.py` checks what is asked of
passes and targets, `stats.py` prices a plan, `diff.py` compares two. `Plan.program`
executes the text that `Plan.emit` writes (`program.py`), and trains by its functions (`step.py`): there is no second
runtime. Errors are `UnityError`.

Importing this package imports no PyTorch; models from there and programs do.
"""
