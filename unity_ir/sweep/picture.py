"""Plot a sweep with matplotlib, as SVG, PNG or PDF: one knob along x, lines by another, panels by a third."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from unity_ir.errors import UnityError
from unity_ir.sweep.point import Answer
from unity_ir.sweep.report import knobs_of

ENDS = (".svg", ".png", ".pdf")

HEIGHTS = {"seconds": "step, s", "mfu": "MFU", "rate": "samples per second"}
"""What a plot may show along y, with its label."""

PANEL = (3.4, 3.2)
"""Inches of a panel."""


def check_picture(path: Path, knobs: Sequence[str], along: str | None, height: str) -> None:
    """
    Raise `UnityError` unless `draw` can plot a sweep. `path` must end as a picture (`ENDS`), `height` be one of
    `HEIGHTS`, `knobs` (the names of those with several values) have one to three entries, `along` be one of them or
    None, and matplotlib be installed.
    """
    if path.suffix not in ENDS:
        raise UnityError(f"sweep: the plot is {path}; its name must end in {', '.join(ENDS)}")
    if height not in HEIGHTS:
        raise UnityError(f"sweep: a plot of {height!a}; it shows {', '.join(HEIGHTS)}")
    if along is not None and along not in knobs:
        raise UnityError(f"sweep: --x={along}, which does not vary; {', '.join(knobs) or 'no knob'} does")
    if not 1 <= len(knobs) <= 3:
        raise UnityError(f"sweep: {len(knobs)} knobs vary, but a plot shows one to three; leave out --plot")
    _matplotlib()


def draw(answers: Sequence[Answer], path: Path, along: str | None, height: str) -> None:
    """
    Plot the answers of a sweep to the file `path`: along y the quantity `height` (a key of `HEIGHTS`), along x the knob
    `along`, by default (None) the last that varies. Of the other knobs, models and machines that vary, the last makes
    lines, the others panels. Points without a plan are left out; dotted lines show the lower bounds. Arguments must
    pass `check_picture`.
    """
    figure = _matplotlib().Figure
    rows = [(_names(answer), answer) for answer in answers]
    varying = [name for name in rows[0][0] if len({names[name] for names, _ in rows}) > 1]
    knobs = [name for name in knobs_of(answers) if name in varying]
    along = along or knobs[-1]
    others = [name for name in varying if name != along]
    lines, panels = others[-1:], others[:-1]
    boxes = list(dict.fromkeys(_label(names, panels) for names, _ in rows))
    drawn: Any = figure(figsize=(PANEL[0] * len(boxes) + 0.6, PANEL[1]), layout="constrained")
    axes = drawn.subplots(1, len(boxes), sharey=True, squeeze=False)[0]
    for box, ax in zip(boxes, axes, strict=True):
        of_box = [(names, answer) for names, answer in rows if _label(names, panels) == box]
        for number, line in enumerate(dict.fromkeys(_label(names, lines) for names, _ in of_box)):
            found = [(float(n[along]), a) for n, a in of_box if _label(n, lines) == line and a.seconds is not None]
            colour = f"C{number}"
            ax.plot([x for x, _ in found], [_height(a, a.seconds, height) for _, a in found], "o-", ms=3, color=colour)
            ax.lines[-1].set_label(line or None)
            ax.plot([x for x, _ in found], [_height(a, a.bound, height) for _, a in found], ":", color=colour)
        ax.set_xscale("log", base=2)
        ticks = sorted({float(names[along]) for names, _ in of_box})
        ax.set_xticks(ticks, [_short(tick) for tick in ticks])
        ax.minorticks_off()
        ax.set_xlabel(along)
        ax.set_title(box, fontsize=9)
        ax.grid(alpha=0.3)
    if height != "mfu":
        axes[0].set_yscale("log")
    axes[0].set_ylabel(HEIGHTS[height])
    if lines:
        axes[-1].legend(fontsize=7)
    # The same bytes from the same answers.
    dated: Any = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
    with _rc({"svg.hashsalt": "unity-sweep", "svg.fonttype": "none"}):
        drawn.savefig(path, **dated)


def _names(answer: Answer) -> dict[str, Any]:
    return {"model": answer.point.model, "machine": answer.point.machine, **dict(answer.point.settings)}


def _label(names: dict[str, Any], of: Sequence[str]) -> str:
    values = (names[name] for name in of)
    said = (v if isinstance(v, str) else f"{name} {_short(float(str(v)))}" for name, v in zip(of, values, strict=True))
    return ", ".join(map(str, said))


def _short(value: float) -> str:
    """Given 5e10, returns 50G."""
    for suffix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.3g}{suffix}"
    return f"{value:g}"


def _height(answer: Answer, seconds: float | None, height: str) -> float:
    assert seconds is not None
    return {"seconds": seconds, "mfu": answer.flops / seconds, "rate": answer.samples / seconds}[height]


def _matplotlib() -> Any:
    """Return matplotlib's module of figures, which needs no display. Raises `UnityError` without matplotlib."""
    try:
        return import_module("matplotlib.figure")
    except ImportError:
        raise UnityError("sweep: a plot needs matplotlib; pip install 'unity-ir[plot]', or leave out --plot") from None


def _rc(settings: dict[str, str]) -> Any:
    return import_module("matplotlib").rc_context(settings)
