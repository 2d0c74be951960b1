"""Draw a simulated iteration (SVG): a row for each stream of each class of devices, and the memory held."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from unity_ir.simulate.full import Timeline
from unity_ir.simulate.memory import held_over_time
from unity_ir.simulate.streams import TICKS
from unity_ir.simulate.tasks import KINDS
from unity_ir.simulate.trace import name

COLOURS = ("#4c78a8", "#9ecae9", "#f58518", "#ffbf79", "#54a24b", "#b279a2")
"""The colour of each of `KINDS`."""

LEFT, WIDTH, ROW, GAP, MEMORY = 130, 1000, 26, 8, 60
"""Sizes in pixels."""

MAX_CLASSES = 16
"""Maximum number of device classes drawn; further ones are left out."""


def timeline_svg(timeline: Timeline, title: str) -> str:
    """
    Return the drawing of a simulated iteration as SVG text, headed by `title` and its seconds: a row for each stream of
    each device class, and the memory held. Classes beyond the first `MAX_CLASSES` are left out.
    """
    streams = timeline.tasks.streams
    shown = min(streams.classes, MAX_CLASSES)
    body: list[str] = []
    y = 64
    for k in range(shown):
        alike = streams.machine.devices // streams.classes
        what = f"{alike} devices alike" if alike > 1 else f"device {k}"
        body.append(_text(LEFT, y + 12, f"class {k}: {what}" if streams.classes > 1 else what, "bold"))
        y += 20
        for stream in range(k * streams.width, (k + 1) * streams.width):
            row = streams.name(stream) + (" link" if stream % streams.width else "")
            body.append(_text(8, y + ROW * 0.65, row))
            body.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW}" fill="#f2f2f2"/>')
            body.extend(_tasks(timeline, stream, y))
            y += ROW + GAP
        body.extend(_memory(timeline, k, y))
        y += MEMORY + 2 * GAP
    if shown < streams.classes:
        body.append(_text(LEFT, y + 12, f"and {streams.classes - shown} more classes"))
        y += 20
    body.extend(_axis(timeline, y))
    height, width = y + 30, LEFT + WIDTH + 30
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(8, 20, f"{title}: {ticks_text(timeline.makespan)}", "bold"),
        *_legend(),
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def ticks_text(ticks: int) -> str:
    """Return the text for a number of ticks (picoseconds): given 1.5e9, returns `1.5 ms`."""
    for unit, scale in (("s", 1), ("ms", 10**3), ("us", 10**6)):
        if ticks * scale >= TICKS:
            break
    return f"{ticks * scale / TICKS:.4g} {unit}"


def _x(timeline: Timeline, ticks: int) -> float:
    return LEFT + WIDTH * ticks / max(1, timeline.makespan)


def _tasks(timeline: Timeline, stream: int, y: int) -> Iterator[str]:
    """Yield a bar for each task of a stream; neighbours of one kind that are too narrow to see share a bar."""
    tasks = timeline.tasks
    held = tasks.held
    run: tuple[float, float, int, list[str]] | None = None
    here: list[int] = held.owners[held.flat == stream].tolist()
    for t in here:
        if not tasks.ticks[t]:
            continue
        label = tasks.labels[t]
        begin, end = _x(timeline, int(timeline.starts[t])), _x(timeline, int(timeline.ends[t]))
        if (
            run is not None
            and run[2] == label.kind
            and begin - run[1] < 0.3
            and (end - run[0] < 1 or end - begin < 0.5)
        ):
            run = (run[0], end, label.kind, [*run[3], name(label)])
            continue
        if run is not None:
            yield _bar(*run, y)
        run = (begin, end, label.kind, [f"{name(label)}, {ticks_text(int(tasks.ticks[t]))}"])
    if run is not None:
        yield _bar(*run, y)


def _bar(begin: float, end: float, kind: int, names: list[str], y: int) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    title = escape(f"{KINDS[kind]}: {', '.join(names[:3])}{more}")
    return (
        f'<rect x="{begin:.2f}" y="{y}" width="{max(0.2, end - begin):.2f}" height="{ROW}" fill="{COLOURS[kind]}">'
        f"<title>{title}</title></rect>"
    )


def _memory(timeline: Timeline, k: int, y: int) -> Iterator[str]:
    curve = held_over_time(timeline, k)
    peak = max(1, curve.peak)
    # The most in each half pixel.
    held = [0] * (2 * WIDTH + 1)
    columns = [round(2 * (_x(timeline, at) - LEFT)) for at in curve.ticks.tolist()]
    for begin, end, size in zip(columns, [*columns[1:], 2 * WIDTH], curve.bytes.tolist(), strict=True):
        held[begin : end + 1] = [max(size, before) for before in held[begin : end + 1]]
    points = [f"{LEFT},{y + MEMORY}"]
    for i, size in enumerate(held):
        if i in (0, 2 * WIDTH) or not held[i - 1] == size == held[i + 1]:
            points.append(f"{LEFT + i / 2:g},{y + MEMORY * (1 - size / peak):.1f}")
    points.append(f"{LEFT + WIDTH},{y + MEMORY}")
    yield _text(8, y + 14, "memory")
    yield _text(8, y + 30, f"peak {peak / 1e9:.3g} GB" if peak >= 10**8 else f"peak {peak / 1e6:.3g} MB")
    yield f'<polygon points="{" ".join(points)}" fill="#d9d9d9" stroke="#7f7f7f" stroke-width="0.5"/>'


def _axis(timeline: Timeline, y: int) -> Iterator[str]:
    for i in range(6):
        x = LEFT + WIDTH * i / 5
        yield f'<line x1="{x}" y1="{y - GAP}" x2="{x}" y2="{y - 2}" stroke="black"/>'
        yield _text(x, y + 12, ticks_text(timeline.makespan * i // 5) if i else "0", anchor="middle")


def _legend() -> Iterator[str]:
    x = LEFT
    for kind, colour in zip(KINDS, COLOURS, strict=True):
        yield f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 17, 44, kind)
        x += 34 + 7 * len(kind)


def _text(x: float, y: float, text: str, weight: str = "normal", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'
