"""What the command lines of the tools have in common."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import NoReturn

from unity_ir.errors import UnityError


class Parser(ArgumentParser):
    """A parser that raises `UnityError` for what it does not take."""

    def error(self, message: str) -> NoReturn:
        raise UnityError(f"{self.prog}: {message}; see {self.prog} --help")


def exit_code(
    parser: Parser, work: Callable[[Namespace], int], argv: Sequence[str] | None, interrupted: str = ""
) -> int:
    """
    Run a tool on its options. What is wrong with the input is one line on stderr and 1; Ctrl-C is 130, and what is said
    of it is `interrupted`.
    """
    try:
        return work(parser.parse_args(argv))
    except UnityError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
    except KeyboardInterrupt:
        if interrupted:
            print(f"{parser.prog}: {interrupted}", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"{error.filename}: {error.strerror}" if error.filename else f"{parser.prog}: {error}", file=sys.stderr)
    return 1
