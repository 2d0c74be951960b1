"""Map ATen operators to ours, one file per family. Importing this package fills `site.MAPPINGS`."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
