"""What of a model has no mapping, all in one error."""

from __future__ import annotations

from unity_ir.errors import UnityError, UnityReport


class Report:
    """Collects refusals while the rest of the model is still looked at."""

    def __init__(self, name: str):
        self.name = name
        self._lines: dict[tuple[str, str], list[str]] = {}

    def add(self, operator: str, why: str, place: str) -> None:
        """One refusal; those of one operator for one reason are told once, with their first place and their number."""
        self._lines.setdefault((operator, why), []).append(place)

    def check(self) -> None:
        """Raises `UnityReport` with a line per operator and reason, if there is one."""
        if not self._lines:
            return
        lines = [f"--from-torch: {self.name} cannot be imported; {len(self._lines)} of its operators have no mapping:"]
        if len(self._lines) == 1:
            lines = [f"--from-torch: {self.name} cannot be imported; one of its operators has no mapping:"]
        for (operator, why), places in self._lines.items():
            times = f" and {len(places) - 1} more" if len(places) > 1 else ""
            lines.append(f"  {operator}: {why} ({places[0]}{times})")
        raise UnityReport("\n".join(lines))


def one_line(error: BaseException) -> str:
    """The first line of an error's message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def refuse(message: str) -> UnityError:
    """An error of the import as a whole."""
    return UnityError(f"--from-torch: {message}")
