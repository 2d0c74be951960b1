"""Texts made wrong: tokens, lines and brackets of a text moved, doubled, dropped, or put in the place of another's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

TOKEN = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|[%@^#!][\w.$#-]*|\d+\.\d*(?:[eE][+-]?\d+)?|\d+|[A-Za-z_][\w.$-]*|->|\s+|.', re.DOTALL
)
"""What is moved as one: strings, comments, names, numbers, signs."""

NUMBERS = (
    *("0", "1", "2", "3", "4", "5", "6", "7", "8", "12", "64", "784", "1000", "1048576", "1048577", "4294967296"),
    *("2147483648", "9223372036854775807", "9223372036854775808", "18446744073709551616", "-1", "-2", "-0"),
    *(
        "100000000000000000000000000000",
        "9" * 400,
        "1" + "0" * 5000,
        "0.0",
        "1.0",
        "-1.5",
        "0.1",
        "1.0e-320",
        "1.0e308",
    ),
    *("1.0e999", "0x7FC00000", "0x7FF0000000000000", "0xFFFFFFFFFFFFFFFFFF", "01", "1_000", "1.e5", "true", "false"),
)

STRINGS = (
    *(
        "",
        " ",
        "x",
        "relu",
        "gelu",
        "sum",
        "copy",
        "m",
        "n",
        "k",
        "w1",
        "é",
        "日本",
        "a b",
        "a.b",
        "../../x",
        "/",
        "a'b",
    ),
    *(
        "\\22",
        "\\n",
        "\\00",
        "\\C3\\A9",
        "\\FF",
        "\u202e",
        "\ufeff",
        "\u0000",
        "\u0301",
        "x" * 400,
        "class",
        "__init__",
    ),
    *(
        "main",
        "{",
        "}",
        "%s",
        "{0}",
        "adam",
        "sgd",
        "adamw",
        "2gpu",
        "box:4",
        "box:0",
        "summit:2",
        "nothing",
        "1",
        "-1",
    ),
)

SIGNS = (
    *"()[]{}<>,:=*@%#!-+/\\\"'.;?|&^$~`",
    *("->", "::", "..", "//", "\n", "\x00", "\x1b", "\u202e", "\u2028", "é"),
)

Pools = dict[str, tuple[str, ...]]
"""Tokens of all seeds, by kind."""


def kind(token: str) -> str:
    """Tokens of one kind may stand for one another."""
    first = token[0]
    if first in '%@^#!"':
        return first
    if first.isdigit():
        return "number"
    if first.isspace():
        return "space"
    if first.isalpha() or first == "_":
        return "operation" if "." in token else "word"
    return "sign"


def pools(texts: Sequence[str]) -> Pools:
    """The tokens of texts, by kind."""
    found: dict[str, dict[str, None]] = {}
    for text in texts:
        for token in TOKEN.findall(text):
            found.setdefault(kind(token), {})[token] = None
    return {name: tuple(tokens) for name, tokens in found.items()}


class Mutator:
    """Mutates texts of one language. `texts` are what parts are taken from."""

    def __init__(self, random: Random, texts: Sequence[str]):
        self.random = random
        self.texts = texts
        self.pools = pools(texts)
        self.ways: tuple[Callable[[list[str]], None], ...] = (
            self.replace,
            self.replace,
            self.replace,
            self.number,
            self.number,
            self.drop,
            self.double,
            self.swap,
            self.sign,
            self.string,
            self.group,
            self.group,
            self.lines,
            self.lines,
            self.foreign_line,
            self.rename,
            self.rename,
            self.character,
            self.cut,
            self.nest,
        )

    def mutated(self, text: str) -> str:
        """A text a few mutations away."""
        tokens = TOKEN.findall(text)
        for _ in range(min(1 + int(self.random.expovariate(0.7)), 12)):
            if tokens:
                self.random.choice(self.ways)(tokens)
        return "".join(tokens)

    def _at(self, tokens: list[str], *kinds: str) -> int | None:
        """The place of a token of these kinds, or of any but space."""
        places = [i for i, t in enumerate(tokens) if (kind(t) in kinds if kinds else not t.isspace())]
        return self.random.choice(places) if places else None

    def replace(self, tokens: list[str]) -> None:
        """Another token of the same kind, from this text or any."""
        if (at := self._at(tokens)) is not None:
            own = [t for t in tokens if kind(t) == kind(tokens[at])]
            pool = own if self.random.random() < 0.5 else self.pools.get(kind(tokens[at]), own)
            tokens[at] = self.random.choice(pool or own)

    def number(self, tokens: list[str]) -> None:
        if (at := self._at(tokens, "number")) is not None:
            tokens[at] = self.random.choice(NUMBERS)

    def string(self, tokens: list[str]) -> None:
        if (at := self._at(tokens, '"')) is not None:
            tokens[at] = f'"{self.random.choice(STRINGS)}"'

    def sign(self, tokens: list[str]) -> None:
        tokens.insert(self.random.randrange(len(tokens) + 1), self.random.choice(SIGNS))

    def drop(self, tokens: list[str]) -> None:
        if (at := self._at(tokens)) is not None:
            del tokens[at : at + self.random.choice((1, 1, 1, 2, 3, 8))]

    def double(self, tokens: list[str]) -> None:
        if (at := self._at(tokens)) is not None:
            tokens[at:at] = tokens[at : at + self.random.choice((1, 2, 4, 12))]

    def swap(self, tokens: list[str]) -> None:
        one = self._at(tokens)
        if one is not None and (two := self._at(tokens, kind(tokens[one]))) is not None:
            tokens[one], tokens[two] = tokens[two], tokens[one]

    def rename(self, tokens: list[str]) -> None:
        """A value, operation or word by another name everywhere."""
        if (at := self._at(tokens, "%", "@", "operation", "word")) is not None:
            old = tokens[at]
            new = self.random.choice(self.pools.get(kind(old), (old,)))
            tokens[:] = [new if t == old else t for t in tokens]

    def group(self, tokens: list[str]) -> None:
        """What is in brackets: dropped, doubled, or another's."""
        one = self._group(tokens)
        other = TOKEN.findall(self.random.choice(self.texts)) if self.random.random() < 0.5 else list(tokens)
        two = self._group(other, tokens[one[0]]) if one is not None else None
        if one is None or two is None:
            return
        what = self.random.random()
        inside = other[slice(*two)]
        tokens[slice(*one)] = [] if what < 0.15 else inside if what < 0.85 else [*tokens[slice(*one)], *inside]

    def _group(self, tokens: list[str], opening: str | None = None) -> tuple[int, int] | None:
        pairs = {"(": ")", "[": "]", "{": "}", "<": ">"}
        starts = [i for i, t in enumerate(tokens) if (t == opening if opening else t in pairs)]
        if not starts:
            return None
        start = self.random.choice(starts)
        depth = 0
        for end in range(start, len(tokens)):
            depth += (tokens[end] == tokens[start]) - (tokens[end] == pairs.get(tokens[start]))
            if depth == 0:
                return start, end + 1
        return start, len(tokens)

    def lines(self, tokens: list[str]) -> None:
        """Lines dropped, doubled or swapped."""
        lines = "".join(tokens).split("\n")
        one, two = (self.random.randrange(len(lines)) for _ in range(2))
        match self.random.randrange(4):
            case 0:
                del lines[one]
            case 1:
                lines.insert(two, lines[one])
            case 2:
                lines[one], lines[two] = lines[two], lines[one]
            case _:
                lines.insert(two, lines.pop(one))
        tokens[:] = TOKEN.findall("\n".join(lines))

    def foreign_line(self, tokens: list[str]) -> None:
        lines = "".join(tokens).split("\n")
        lines.insert(
            self.random.randrange(len(lines) + 1), self.random.choice(self.random.choice(self.texts).split("\n"))
        )
        tokens[:] = TOKEN.findall("\n".join(lines))

    def character(self, tokens: list[str]) -> None:
        at = self.random.randrange(len(tokens))
        token = tokens[at]
        place = self.random.randrange(len(token))
        new = self.random.choice((chr(self.random.randrange(128)), chr(self.random.randrange(0xD800)), ""))
        tokens[at] = token[:place] + new + token[place + 1 :]
        if not tokens[at]:
            del tokens[at]

    def cut(self, tokens: list[str]) -> None:
        if self.random.random() < 0.3:
            del tokens[self.random.randrange(len(tokens)) :]

    def nest(self, tokens: list[str]) -> None:
        """Something many times in a row: brackets, words."""
        if self.random.random() < 0.3:
            at, times = self.random.randrange(len(tokens)), self.random.choice((3, 50, 2000))
            tokens[at] = self.random.choice((*SIGNS, tokens[at])) * times
