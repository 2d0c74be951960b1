"""
Read and write profiles: seconds of kernels and collectives measured by `unity-profile`, in an SQLite file.

A file carries the format (`application_id`), the version of its tables (`user_version`), and in `about` the device and
software it was made with. Each row is written in a transaction of its own, so a stopped run loses no measurement.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path

import numpy as np

from unity_ir.errors import UnityError

APPLICATION = 0x756E6974
"""`unit` in ASCII."""
SCHEMA = 1

MAX_SECONDS = 86400.0
"""Maximum of a measurement, in seconds."""

SIZES_LENGTH = 1000
"""Maximum length of the text of a kernel's sizes."""

_TABLES = """
create table about (key text primary key, value text not null) without rowid;
create table kernels (
  operator text, sizes text, ranks integer,
  kind text not null, dtype text not null, flops integer not null, bytes integer not null,
  seconds real not null, spread real not null, repeats integer not null, measured text not null,
  primary key (operator, sizes, ranks)
) without rowid;
create table collectives (
  kind text, members integer, bytes integer, ranks integer,
  seconds real not null, spread real not null, repeats integer not null, measured text not null,
  primary key (kind, members, bytes, ranks)
) without rowid;
"""

_WRONG = f"""
select 1 from kernels where typeof(seconds) != 'real' or seconds <= 0 or seconds > {MAX_SECONDS}
  or typeof(sizes) != 'text' or sizes glob '*[^0-9 ]*' or length(sizes) > {SIZES_LENGTH} or typeof(operator) != 'text'
  or typeof(ranks) != 'integer' or typeof(flops) != 'integer' or flops < 0 or typeof(bytes) != 'integer' or bytes < 0
  or typeof(kind) != 'text' or typeof(dtype) != 'text' or typeof(repeats) != 'integer' or typeof(spread) != 'real'
union all
select 1 from collectives where typeof(seconds) != 'real' or seconds <= 0 or seconds > {MAX_SECONDS}
  or typeof(bytes) != 'integer' or bytes <= 0 or typeof(members) != 'integer' or typeof(kind) != 'text'
  or typeof(ranks) != 'integer'
union all
select 1 from about where typeof(key) != 'text' or typeof(value) != 'text'
union all
select 1 where not exists (select 1 from about where key = 'device' and typeof(value) = 'text')
limit 1
"""
"""Query for rows that no valid profile has."""

Points = tuple[tuple[float, float], ...]
"""(bytes, seconds), from the smallest on."""


@dataclass(frozen=True)
class Profile:
    """
    The measured seconds of kernels and collectives on one device, for one number of ranks at work at once.

    `device` is the name of the kind of device. Seconds of `kernels` are by operator and sizes (see `cost.time.Kernel`),
    those of `collectives` by kind and number of devices in a group. `about` describes the file (`ProfileFile.about`).
    """

    device: str
    kernels: Mapping[str, Mapping[tuple[int, ...], float]] = field(
        default_factory=dict[str, Mapping[tuple[int, ...], float]]
    )
    collectives: Mapping[tuple[str, int], Points] = field(default_factory=dict[tuple[str, int], Points])
    about: Mapping[str, str] = field(default_factory=dict[str, str])

    def collective(self, kind: str, members: int, bytes: float) -> float | None:
        """
        Return the seconds of the collective named `kind`, such as `all_reduce`, in groups of `members` devices, with
        shards of `bytes` bytes before it; None if no size was measured for that collective and number of devices.

        Between two measured sizes, interpolates linearly between logarithms. Below the smallest, returns the seconds of
        the smallest; above the largest, extrapolates in proportion to the bytes.
        """
        points = self.collectives.get((kind, members))
        if not points:
            return None
        sizes, seconds = [s for s, _ in points], [t for _, t in points]
        if bytes >= sizes[-1]:
            return seconds[-1] * bytes / sizes[-1]
        return exp(float(np.interp(log(max(bytes, 1.0)), list(map(log, sizes)), list(map(log, seconds)))))


@dataclass(frozen=True, slots=True)
class KernelRow:
    """
    A measured kernel of a profile file, as `cost.time.Kernel` describes it, with the number of ranks at work at once.
    """

    operator: str
    sizes: tuple[int, ...]
    ranks: int
    kind: str
    dtype: str
    flops: int
    bytes: int
    seconds: float
    """Seconds of one run of the kernel: the median of repeats, or as `lowering.measure.operators.Measured` says."""
    spread: float
    """Seconds from the second fastest to the second slowest repeat, as a fraction of the median."""
    repeats: int
    measured: str
    """Time of the measurement in ISO 8601."""


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """
    A measured collective of a profile file, in groups of `members` devices, all groups at once; `bytes` is a rank's
    piece before it.
    """

    kind: str
    members: int
    bytes: int
    ranks: int
    seconds: float
    spread: float
    """Seconds from the second fastest to the second slowest repeat, as a fraction of the median."""
    repeats: int
    measured: str


class ProfileFile:
    """An open profile file (SQLite); see `open_profile`."""

    def __init__(self, path: Path, connection: sqlite3.Connection):
        self.path = path
        self.connection = connection

    @property
    def about(self) -> dict[str, str]:
        """The file's description of its device, software and so on, by key."""
        return dict(self.connection.execute("select key, value from about"))

    def kernels(self, ranks: int | None = None) -> list[KernelRow]:
        """Return the kernels measured with `ranks` ranks at work at once; None returns all."""
        columns = ", ".join(KernelRow.__slots__)
        rows = self.connection.execute(f"select {columns} from kernels where ?1 is null or ranks = ?1", (ranks,))
        return [KernelRow(o, _sizes(s), *rest) for o, s, *rest in rows]

    def collectives(self, ranks: int | None = None) -> list[CollectiveRow]:
        """Return the collectives measured on `ranks` ranks, all groups of them at once; None returns all."""
        columns = ", ".join(CollectiveRow.__slots__)
        rows = self.connection.execute(f"select {columns} from collectives where ?1 is null or ranks = ?1", (ranks,))
        return [CollectiveRow(*row) for row in rows]

    def add_kernel(self, row: KernelRow) -> None:
        """
        Write a measured kernel to the file, in place of one with the same operator, sizes and ranks, and commit it.
        """
        self._add("kernels", [getattr(row, n) if n != "sizes" else _text(row.sizes) for n in row.__slots__])

    def add_collective(self, row: CollectiveRow) -> None:
        """
        Write a measured collective to the file, in place of one with the same kind, members, bytes and ranks, and
        commit it.
        """
        self._add("collectives", [getattr(row, n) for n in row.__slots__])

    def _add(self, table: str, values: list[object]) -> None:
        with self.connection:
            self.connection.execute(f"insert or replace into {table} values ({', '.join('?' * len(values))})", values)

    def profile(self, ranks: int) -> Profile:
        """
        Return the file's measurements for a machine of `ranks` devices.

        Its kernels are those measured with that many ranks at work at once; kernels for which there is no such
        measurement are those measured with one rank. Its collectives are those measured with that many ranks. If a
        collective took longer than on more bytes, its time is lowered to that.
        """
        found: dict[str, dict[tuple[int, ...], float]] = {}
        for row in (*self.kernels(1), *(self.kernels(ranks) if ranks != 1 else ())):
            found.setdefault(row.operator, {})[row.sizes] = row.seconds
        points: dict[tuple[str, int], dict[float, float]] = {}
        for row in self.collectives(ranks):
            points.setdefault((row.kind, row.members), {})[row.bytes] = row.seconds
        about = self.about
        return Profile(about["device"], found, {k: _rising(p) for k, p in points.items()}, about)


@contextmanager
def open_profile(path: Path, create: Mapping[str, str] | None = None) -> Generator[ProfileFile]:
    """
    Return a context manager that opens a profile file for reading, or, with `create`, for adding measurements.

    `create` describes the measurements to be added, as `ProfileFile.about` does: device, host, versions; a missing file
    is then made with it. Raises `UnityError` where the file cannot be read, is of another format or version, or its
    `about` differs from `create` in more than the date.
    """
    new = create is not None and not path.exists()
    if not new and (not path.is_file() or path.stat().st_size == 0):
        raise UnityError(f"profile: {path} is {'empty' if path.is_file() else 'no file'}; make it with unity-profile")
    uri = path.resolve().as_uri() + ("" if create is not None else "?mode=ro")
    connection = None
    try:
        connection = sqlite3.connect(uri, uri=True)
        if new:
            assert create is not None
            _write_tables(connection, create)
        else:
            _check(path, connection)
        file = ProfileFile(path, connection)
        if create is not None:
            _check_about(path, file.about, create)
        yield file
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise UnityError(f"profile: {path} {_said(error, 'cannot be read or written')}") from error
    finally:
        if connection is not None:
            connection.close()


def read_profile(path: str | Path, device: str, ranks: int) -> Profile:
    """
    Return the measurements in the profile file at `path`, for a machine of `ranks` devices of the kind called `device`:
    those made with that many ranks at work at once (`ProfileFile.profile`).

    Raises `UnityError` if the file cannot be read, or is of another device.
    """
    with open_profile(Path(path)) as file:
        profile = file.profile(ranks)
    if profile.device != device:
        raise UnityError(f"profile: {path} is of {profile.device}, but the machine has {device}; profile that one")
    return profile


def _write_tables(connection: sqlite3.Connection, about: Mapping[str, str]) -> None:
    with connection:
        connection.executescript(f"pragma application_id = {APPLICATION}; pragma user_version = {SCHEMA}; {_TABLES}")
        connection.executemany("insert into about values (?, ?)", sorted(about.items()))


def _check(path: Path, connection: sqlite3.Connection) -> None:
    try:
        ((application,),) = connection.execute("pragma application_id").fetchall()
        ((schema,),) = connection.execute("pragma user_version").fetchall()
        if application != APPLICATION:
            raise UnityError(f"profile: {path} is no profile, or damaged; make one with unity-profile")
        if schema != SCHEMA:
            raise UnityError(
                f"profile: {path} has version {schema} of the tables, but this is for version {SCHEMA}; "
                "measure again with unity-profile"
            )
        found = connection.execute("pragma quick_check").fetchall()
        tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
        ((pages,),) = connection.execute("pragma page_count").fetchall()
        ((page,),) = connection.execute("pragma page_size").fetchall()
        sound = found == [("ok",)] and {"about", "kernels", "collectives"} <= tables
        # SQLite reads on where the last page is cut short.
        sound = sound and path.stat().st_size >= pages * page and connection.execute(_WRONG).fetchone() is None
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise UnityError(f"profile: {path} {_said(error, 'is no profile, or damaged')}") from error
    if not sound:
        raise UnityError(f"profile: {path} is damaged; measure again with unity-profile, or take a copy")


def _said(error: sqlite3.Error | UnicodeDecodeError, otherwise: str) -> str:
    if isinstance(error, UnicodeDecodeError) or "decode to UTF-8" in str(error):
        return "has text that is not UTF-8; measure again with unity-profile, or take a copy"
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "is locked by another process; wait for that to end, or take a copy"
    return f"{otherwise}: {error}"


CHANGES = ("date",)
"""Facts of `about` that may differ between the runs that fill one file."""


def _check_about(path: Path, have: Mapping[str, str], want: Mapping[str, str]) -> None:
    for key, value in want.items():
        if key not in CHANGES and have.get(key) != value:
            raise UnityError(
                f"profile: {path} was measured with {key} {have.get(key)}, and here it is {value}; "
                "write to another file"
            )


def _rising(points: Mapping[float, float]) -> Points:
    """More bytes do not take less: what took longer was disturbed."""
    out: list[tuple[float, float]] = []
    for size, seconds in sorted(points.items(), reverse=True):
        out.append((size, min(seconds, out[-1][1]) if out else seconds))
    return tuple(reversed(out))


def _text(sizes: tuple[int, ...]) -> str:
    return " ".join(map(str, sizes))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))
