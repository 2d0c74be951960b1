"""
What tools say to people: each message one line, of bounded length, that steers no terminal.

Every message of every tool goes through `one_line`, which `tell` prints. Text from files, names of files and arguments
may hold anything: newlines, NUL, marks that turn the direction of text, words of a megabyte.
"""

from __future__ import annotations

import re
import sys

LENGTH = 300
"""Characters of a message, at most."""

WORD = 60
"""Characters of a word that are kept where a message is too long."""

ELLIPSIS = ".."


def one_line(text: str) -> str:
    """
    White space as single blanks, characters that cannot be seen escaped, and at most `LENGTH` characters.

    What is too long loses the middle of its longest words first, then its own: how a message begins says where, and how
    it ends says what to do.
    """
    # Nothing beyond this is ever shown, and escaping a file as long as memory would take a while.
    kept = _cut(text, 20 * LENGTH)
    line = printable(" ".join(kept.split()))
    if len(line) <= LENGTH:
        return line
    return _cut(re.sub(rf"\S{{{WORD + 1},}}", lambda word: _cut(word[0], WORD), line), LENGTH)


def printable(text: str) -> str:
    """Characters that steer a terminal, change the direction of text or cannot be seen, as escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def tell(message: str) -> None:
    """Print a message to stderr, unless that is closed, indented as it is."""
    if sys.stderr is not None:
        indent = message[: len(message) - len(message.lstrip(" "))][:8]
        print(indent + one_line(message), file=sys.stderr)


def _cut(text: str, length: int) -> str:
    """Given `abcdefghij` and 7, returns `abc..ij`."""
    if len(text) <= length:
        return text
    end = (length - len(ELLIPSIS)) // 3
    return text[: length - len(ELLIPSIS) - end] + ELLIPSIS + text[len(text) - end :]
