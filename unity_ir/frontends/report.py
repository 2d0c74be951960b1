"""Collect all operators of a model that cannot be imported, for one error."""

from __future__ import annotations

from unity_ir.errors import UnityError, UnityReport


class Report:
    """
    Collects the operators of the model `name` that cannot be imported, so that one error lists them all. `option` is
    the command line's for the frontend, with which messages begin.
    """

    def __init__(self, name: str, option: str = "--from-torch"):
        self.name, self.option = name, option
        self._lines: dict[tuple[str, str], list[str]] = {}

    def add(self, operator: str, why: str, source_line: str) -> None:
        """
        Record an operator that cannot be imported: its name, the reason (`why`), and the line of the model's source
        that calls it (`source_line`), as the text `file:line`.

        Operators of the same name and reason become one line of the error, with the first source line and how often
        they occur.
        """
        self._lines.setdefault((operator, why), []).append(source_line)

    def operators(self) -> list[str]:
        """Return the names of the operators recorded so far, each once."""
        return list(dict.fromkeys(operator for operator, _ in self._lines))

    def check(self) -> None:
        """Raise `UnityReport`, with a line per operator and reason, if any operator was recorded; else do nothing."""
        if not self._lines:
            return
        count = "one cause" if len(self._lines) == 1 else f"{len(self._lines)} causes"
        lines = [f"{self.option}: {self.name} cannot be imported, for {count}:"]
        for (operator, why), source_lines in self._lines.items():
            times = f" and {len(source_lines) - 1} more" if len(source_lines) > 1 else ""
            lines.append(f"  {operator}: {why} ({source_lines[0]}{times})")
        raise UnityReport("\n".join(lines))


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not blank; without one, the name of its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def refuse(message: str) -> UnityError:
    """Return (not raise) the `UnityError`, with this message, for a model that cannot be imported as a whole."""
    return UnityError(f"--from-torch: {message}")
