"""Turn parse and verification errors into one line that names the place."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.exceptions import ParseError, VerifyException
from xdsl.utils.lexer import Input, Span

from unity_ir.messages import one_line, printable

_STRING = re.compile(r'//[^\n]*|"(?:[^"\\\n\v\f]|\\(?:["nt\\]|[0-9A-Fa-f]{2}))*+"|"')
"""Matches a comment, a terminated string, or the opening quote of an unterminated one."""


def check_strings(text: str, name: str) -> None:
    """
    Raise `ParseError` for an unterminated string or an unknown escape in `text`, before xDSL's lexer reads it, which
    would take exponential time. `name` is the file's name, for the message.
    """
    for match in _STRING.finditer(text):
        if match[0] == '"':
            raise ParseError(Span(*match.span(), Input(text, name)), "the string has no end, or an unknown escape")


def name_operation(module: ModuleOp, error: VerifyException) -> str:
    """
    Return the message of a verification error as one line that begins with the name of the operation, which messages of
    xDSL's own verifiers leave out. `module` is the module that failed to verify; the operation is found in it.
    """
    text = one_line(str(error))
    missing = re.fullmatch(r"(?:\S+: )?property '(\S+)' expected in operation '(\S+)'", text)
    if missing is not None:
        return f"{missing[2]}: property {missing[1]} is missing; add it"
    if re.match(r"\w+\.\w+: ", text):
        return text
    for op in module.walk():
        try:
            op.verify(verify_nested_ops=False)
        except VerifyException:
            return f"{op.name}: {text}"
    return text


def parse_error(error: ParseError, known: Iterable[str]) -> str:
    """
    Return a parse error as one line, `file:line:col: message`. If it is about an unknown operation, the line also
    suggests similar names from `known`, the names of all operations.
    """
    message = one_line(error.msg)
    if message == "Could not parse entire input!":
        message = "expected an operation"
    unknown = re.fullmatch(r"Operation (\S+) is not registered", message)
    if unknown is not None:
        message = f"{unknown[1]}: unknown operation{did_you_mean(unknown[1], known)}"
    # A file's name may hold a newline, which its text's lines are not.
    return f"{printable(str(error.span.get_location()))}: {message}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """
    Return the text `; did you mean A or B`, with the names in `known` that are most similar to `name`; "" if none is
    similar.
    """
    near = get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(near)}" if near else ""
