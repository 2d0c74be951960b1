"""The strategies, for `--search=name`. To add one, add a module with a tuple `STRATEGIES` (see `search.strategy`)."""
