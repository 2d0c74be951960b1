# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Write one real step of every rank as a Chrome trace."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unity_ir.lowering.runtime.collectives import Pending
from unity_ir.lowering.runtime.files import write_file
from unity_ir.lowering.runtime.plan import LINKS, NAME
from unity_ir.lowering.runtime.ranks import from_all
from unity_ir.lowering.runtime.watch import lines_of, parts_of_step, watched

# --- copied into the program from here on ---


# --- a profile: one step of every rank in Chrome's trace format, with the tracks and names of the simulator's --trace


class Profile:
    """
    Records a step: call the wrappers that `run` makes of its functions, then `write`. On GPUs times are those of CUDA
    events, which leave the overlap as it is, else of the clock. All ranks make one together.
    """

    COLOURS = {  # noqa: RUF012
        "forward": "thread_state_running",
        "forward communication": "thread_state_runnable",
        "backward": "rail_response",
        "backward communication": "thread_state_iowait",
        "gradient sync": "rail_animation",
        "update": "rail_idle",
    }

    def __init__(self, ctx):
        self.ctx = ctx
        self.spans = []  # track number, name, kind, result, begin, end
        self.counts = []  # time, and bytes held then
        self.under_way = []
        self.tracks = ["compute", *(f"{link} link" for link in dict.fromkeys(LINKS))]
        self.side = torch.cuda.Stream() if ctx.device.type == "cuda" else None
        dist.barrier()
        if self.side:
            torch.cuda.synchronize()
        self.start = self.last = self._now()

    def _now(self):
        if self.side is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _microseconds(self, at):
        if self.side is None:
            return (at - self.start) * 1e6
        return self.start.elapsed_time(at) * 1e3

    def run(self, function):
        """
        Return a wrapper of `function` (the step or the update) that records the time of each of its lines when it is
        called.
        """
        self.lines, self.backward = {}, set()
        for part in parts_of_step(function):
            lines = lines_of(part)
            is_forward = part is function or part.__name__.startswith(("before", "forward"))
            first = next((n for n, line in lines.items() if line[1] == "--- backward"), float("inf"))
            self.backward |= {n for n in lines if n >= first or not is_forward}
            self.lines |= lines

        def begin():
            self.last = self._now()

        def taken_down(*arguments):
            self.last, Pending.watch = self._now(), self.started
            try:
                return watched(function, self._after, begin)(*arguments)
            finally:
                Pending.watch = None

        return taken_down

    def _after(self, number, variables):
        now = self._now()
        targets, comment = self.lines[number]
        what, _, makes = comment.partition(" [")
        kind = "backward" if number in self.backward else "forward"
        if variables.get("grads") is not None:
            what, kind = f"{what} of {variables['name']}" if "name" in variables else what, "update"
        mine, self.under_way = self.under_way, []
        if mine:
            kind = "gradient sync" if what.endswith(" gradients") else f"{kind} communication"
        of = what.partition(" of ")[2]
        for move, axes, begin, end in mine:
            for link in dict.fromkeys(LINKS[a] for a in axes):
                self.spans.append((self.tracks.index(f"{link} link"), f"{move} of {of}", kind, makes, begin, end))
        name = what if comment else f"wait for {', '.join(targets)}" if targets else ""
        if name:
            self.spans.append((0, name, kind, makes, self.last, now))
        self.counts.append((now, self._held(variables)))
        self.last = now

    def started(self, pending, axes, work):
        """Record that a collective along mesh axes `axes`, with handle `work`, has started; `Pending` calls this."""
        begin, end = self._now(), []
        # The name of the function that starts it, as a line may have several moves.
        move = sys._getframe(2).f_code.co_name.removesuffix("_many")
        self.under_way.append((move, axes, begin, end))
        if self.side is not None:
            # A stream of its own waits for the collective, not yet the one that computes.
            with torch.cuda.stream(self.side):
                work.wait()
                end.append(self._now())
            return
        try:
            work.get_future().add_done_callback(lambda _: end.append(self._now()))
        except RuntimeError:  # messages between two ranks have no future; their end is the end of the wait
            pending.ended = lambda: end.append(self._now())

    def _held(self, variables):
        """Return the bytes of memory in use: on GPUs all that is allocated, else that of the step's variables."""
        if self.side is not None:
            return torch.cuda.memory_allocated()
        return held_bytes(variables)

    def write(self, path):
        """
        Gather the records of all ranks, which all call it; on rank 0, write them to the file `path` as a Chrome trace.
        """
        if self.side:
            torch.cuda.synchronize()
        at = self._microseconds
        spans = [(*s[:4], at(s[4]), at(s[5][0] if isinstance(s[5], list) else s[5])) for s in self.spans if s[5]]
        everyone = from_all((spans, [(at(when), held) for when, held in self.counts]))
        if self.ctx.rank:
            return
        events = [event for rank, found in enumerate(everyone) for event in self._events(rank, *found)]
        text = ",\n".join(json.dumps(e, separators=(",", ":")) for e in events)
        title = json.dumps(f"{NAME}, measured")
        whole = f'{{"displayTimeUnit":"ms","otherData":{{"title":{title}}},"traceEvents":[\n{text}\n]}}\n'
        write_file(path, lambda partial: Path(partial).write_text(whole))

    def _events(self, rank, spans, counts):
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"device {rank}"}}
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}}
        for track, name in enumerate(self.tracks):
            yield {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
        for track, name, kind, makes, begin, end in spans:
            yield {
                "ph": "X", "pid": rank, "tid": track, "ts": begin, "dur": end - begin, "name": name, "cat": kind,
                "cname": self.COLOURS[kind], "args": {"result": f"[{makes}" if makes else ""},
            }  # fmt: skip
        for when, held in counts:
            yield {"ph": "C", "pid": rank, "name": "memory", "ts": when, "args": {"bytes": held}}


def held_bytes(variables):
    """Return the bytes of the tensors in a dict, its dicts, lists, tuples and Pendings; shared memory counts once."""
    memories, todo = {}, list(variables.values())
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            memories[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, Pending):
            todo += value.holds
        elif isinstance(value, dict):
            todo += (*value.values(), *getattr(value, "casts", {}).values())
        elif isinstance(value, (tuple, list)):
            todo += value
    return sum(memories.values())
