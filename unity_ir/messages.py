"""
Format and print the messages of all tools: one line each, of bounded length, without control characters.

Every message goes through `one_line`, which `tell` calls. Text from files, file names and arguments may hold anything:
newlines, NUL, marks that change the direction of text, words of a megabyte.
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
    Return `text` as one line of at most `LENGTH` characters: runs of whitespace become single blanks, and unprintable
    characters escapes.

    A text that is too long first loses the middle of its longest words, then its own middle, since a message begins
    with where the error is (a file or an operator) and ends with what to do.
    """
    # Nothing beyond this is ever shown, and escaping a file as long as memory would take a while.
    kept = _cut(text, 20 * LENGTH)
    line = printable(" ".join(kept.split()))
    if len(line) <= LENGTH:
        return line
    return _cut(re.sub(rf"\S{{{WORD + 1},}}", lambda word: _cut(word[0], WORD), line), LENGTH)


def printable(text: str) -> str:
    """Return `text` with unprintable characters (control characters, marks of text direction) as escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def tell(message: str) -> None:
    """
    Print `message` to stderr as one line (see `one_line`), with its indentation, up to 8 blanks. Does nothing if there
    is no stderr.
    """
    if sys.stderr is not None:
        indent = message[: len(message) - len(message.lstrip(" "))][:8]
        print(indent + one_line(message), file=sys.stderr)


def _cut(text: str, length: int) -> str:
    """Given `abcdefghij` and 7, returns `abc..ij`."""
    if len(text) <= length:
        return text
    end = (length - len(ELLIPSIS)) // 3
    return text[: length - len(ELLIPSIS) - end] + ELLIPSIS + text[len(text) - end :]
