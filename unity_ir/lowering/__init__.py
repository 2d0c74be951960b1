"""Print a step's plan as a readable Python file: `emit` writes it, `runtime` is its fixed part, `measure` times it."""
