"""
What the command lines share: reading modules and graphs (`modules.py`, `graphs.py`, `source.py`), checking options of
passes and targets (`options.py`), pricing a plan (`stats.py`), and writing files (`files.py`).
"""
