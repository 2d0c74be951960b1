# pyright: basic, reportPrivateImportUsage=false
"""End a run in which a rank hangs, with a line that names the rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta

from unity_ir.lowering.runtime.plan import NAME, WORLD

# --- copied into the program from here on ---


# --- ranks that hang


LONGEST_START = 300.0
"""Seconds that a rank may take to start, even if the limit is less: imports take long on busy disks."""

_KEEPER = "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


class Watchdog(threading.Thread):
    """
    A thread of every rank that ends the run if a rank hangs. The backends' own timeouts do not serve: gloo's names only
    the neighbour that it waits for, and NCCL's aborts the process.

    Every few seconds each rank writes a beat to the store: that it is alive, and how often its main thread has called
    `note_progress`. Each rank reads the beats of the rank before it: without a new one for `seconds`, that process has
    stopped or its machine is gone. If a rank itself has made no progress for `seconds`, the ranks that are furthest
    behind hang, in a loop or a call of their own, unless some rank is in `unlimited`, where it reads or writes files.
    """

    def __init__(self, store, rank, seconds):
        super().__init__(daemon=True)
        # A connection of its own, as the main thread may be waiting on the other one.
        self.store, self.rank, self.seconds = store.clone(), rank, seconds
        self.store.set_timeout(timedelta(seconds=seconds))
        self.pause = min(seconds / 10, 5.0)
        self.count = 0  # calls of `note_progress`
        self.files = False  # whether the main thread reads or writes files
        self.stopped = threading.Event()
        self.turned = time.monotonic()
        self.start()
        threading.Thread(target=self._watch_store, daemon=True).start()

    def note_progress(self):
        """Note that the main thread makes progress; it must call this at least once per step."""
        self.count += 1

    @contextmanager
    def unlimited(self):
        """Context in which the main thread reads or writes files, for any length of time."""
        self.files = True
        try:
            yield
        finally:
            self.files = False
            self.note_progress()

    def stop(self):
        """End the thread; the main thread calls this when it is done."""
        if not self.stopped.is_set():
            self.stopped.set()
            self.join()
            with suppress(RuntimeError):  # the process that keeps the store may have ended
                self.store.set(f"beat {self.rank}", "done")

    def first(self):
        """Return whether this rank is the first that wants to say why the run ends; only that one does."""
        try:
            return self.store.add("ended", 1) == 1
        except RuntimeError:  # the process that keeps the store has ended
            return self.rank == 0

    def run(self):
        """
        Watch the ranks until `stop` is called. This is the body of the thread, which the constructor starts: do not
        call it.
        """
        try:
            self._watch()
        except Exception as e:
            if not self.stopped.wait(self.pause):
                text = str(e).strip().splitlines() or [type(e).__name__]
                self._end(f"{_KEEPER}, which keeps the ranks' store, has ended: {text[0]}")

    def _watch(self):
        own = [socket.gethostname(), os.getpid(), *_parent_and_start("self")]
        self.store.set(f"process {self.rank}", json.dumps(own))
        self.store.set(f"beat {self.rank}", json.dumps([0, 0, False, False]))
        before = (self.rank - 1) % WORLD
        last = time.monotonic()
        theirs, since, mine, mine_since, beats = None, last, None, last, 0
        while not self.stopped.wait(self.pause):
            now = time.monotonic()
            if now - last > self.seconds / 2:  # this process was stopped itself, and perhaps all were
                since = mine_since = now
            last, beats = now, beats + 1
            self.turned = now
            self.store.set(f"beat {self.rank}", json.dumps([beats, self.count, self.files, _waits()]))
            if self.store.check(["blamed"]):
                self._leave()
            found = self._beat(before)
            if found != theirs or found == b"done":
                theirs, since = found, now
            elif now - since >= (self.seconds if found else max(self.seconds, LONGEST_START)) - 4 * self.pause:
                self.store.set("suspects", json.dumps([before]))
                self._blame([before], "has not answered" if found else "has not started", now - since)
            if self.count != mine or self.count == 0 or self.files:
                mine, mine_since = self.count, now
            elif now - mine_since >= self.seconds - self.pause:  # later, as a stopped rank keeps others waiting
                mine_since = now if self._stuck(now - mine_since) else mine_since

    def _watch_store(self):
        """End this rank if the store does not answer at all: requests to a stopped process wait for ever."""
        last = time.monotonic()
        while not self.stopped.wait(self.pause):
            now = time.monotonic()
            if now - last > self.seconds / 2:
                self.turned = now
            last = now
            if now - self.turned >= self.seconds - self.pause:
                said = f"{_KEEPER}, which keeps the ranks' store, has not answered for {now - self.turned:.0f} s"
                sys.stderr.write(f"{NAME}: {said}; --timeout sets the limit\n")
                sys.stderr.flush()
                os._exit(1)

    def _beat(self, rank):
        key = f"beat {rank}"
        return self.store.get(key) if self.store.check([key]) else None

    def _stuck(self, seconds):
        """Blame ranks in no collective (all or none: the furthest behind); return True instead if one is at files."""
        found = {r: json.loads(b) for r in range(WORLD) if (b := self._beat(r)) not in (None, b"done")}
        if any(files for _, _, files, _ in found.values()):
            return True
        least = min(count for _, count, _, _ in found.values())
        behind = [r for r, (*_, waits) in found.items() if not waits]
        if len(behind) in (0, len(found)):
            behind = [r for r, (_, count, *_) in found.items() if count == least]
        if len(behind) == WORLD:
            said = f"no rank has come further for {seconds:.0f} s, nor is one behind"
            return self._end(f"{said}; --timeout sets the limit")
        return self._blame(behind, "has come no further", seconds)

    def _blame(self, ranks, what, seconds):
        names = [f"rank {r}{self._process(r)}" for r in ranks[:4]] + ["others"] * (len(ranks) > 4)
        self._end(f"{', '.join(names)} {what} for {seconds:.0f} s; --timeout sets the limit")

    def _process(self, rank):
        """Return a rank's process and host as text; empty if they are not known."""
        if not self.store.check([f"process {rank}"]):
            return ""
        host, pid, *_ = json.loads(self.store.get(f"process {rank}"))
        return f" (process {pid} on {host})"

    def _end(self, message):
        """Print the message, unless another rank has printed one, and end this process, whose main thread may hang."""
        if self.first():
            sys.stdout.flush()
            sys.stderr.write(f"{NAME}: {message}\n")
            sys.stderr.flush()
        try:
            self.store.set("blamed", "")
            self._leave()
        finally:
            os._exit(1)

    def _leave(self):
        """End this process; first kill a stopped one of the same torchrun, which would wait half a minute for it."""
        for rank in json.loads(self.store.get("suspects")) if self.store.check(["suspects"]) else ():
            if rank != self.rank and self.store.check([f"process {rank}"]):
                host, pid, parent, start = json.loads(self.store.get(f"process {rank}"))
                beside = host == socket.gethostname() and parent == os.getppid()
                if beside and _parent_and_start(pid) == [parent, start]:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(2 * self.pause)  # others still read the store, which this process may keep
        os._exit(1)


def _waits():
    """Return whether the main thread waits for other ranks; on GPUs it may wait for its stream elsewhere, unseen."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and (
        frame.f_code.co_name in ("wait", "wait_for") or f"{os.sep}distributed{os.sep}" in frame.f_code.co_filename
    )


def _parent_and_start(pid):
    """Return a process's parent and start time, which together identify it; zeros if the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return [int(fields[1]), int(fields[19])]
    except (OSError, ValueError, IndexError):
        return [0, 0]
