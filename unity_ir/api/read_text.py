"""
Parse and verify modules; any fault of the text raises `ParseError`, `VerifyException` or `UnityError`.

xDSL raises other exceptions, too, for inconsistent text that its dialects do not check; they are turned into errors of
the text here. Other exceptions that this package itself raises are bugs, and stay exceptions.
"""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress

import xdsl
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, UnregisteredOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation
from xdsl.irdl import IRDLOperation
from xdsl.parser import Parser
from xdsl.parser.generic_parser import ParserState
from xdsl.utils.exceptions import DiagnosticException, ParseError, VerifyException
from xdsl.utils.lexer import Input, Token
from xdsl.utils.mlir_lexer import MLIRLexer, MLIRToken, MLIRTokenKind, StringLiteral

from unity_ir.api.text_errors import check_strings
from unity_ir.dialects.names import own_name
from unity_ir.errors import UnityError


class _Lexer(MLIRLexer):
    r"""
    Lexer that decodes escaped strings as UTF-8 where possible.

    xDSL prints `"é"` as `"\C3\A9"` and reads that back as bytes, which are invalid in names and keys of attributes.
    """

    def lex(self) -> MLIRToken:
        token = super().lex()
        if token.kind is MLIRTokenKind.BYTES_LIT:
            with suppress(UnicodeDecodeError):
                _ = StringLiteral.from_span(token.span).string_contents
                return Token(MLIRTokenKind.STRING_LIT, token.span)
        return token


class _Parser(Parser):
    def __init__(self, context: Context, text: str, name: str):
        super().__init__(context, text, name)
        super(Parser, self).__init__(ParserState(_Lexer(Input(text, name))), context)

    def _get_op_by_name(self, name: str) -> type[Operation]:
        """Return the class of an operation, named as in its dialect, or as `-t irdl` names it."""
        own = own_name(name)
        found = None if own == name else self.ctx.get_optional_op(own)
        return super()._get_op_by_name(name) if found is None or issubclass(found, UnregisteredOp) else found


_XDSL = os.path.dirname(xdsl.__file__)


def read_module(
    context: Context, data: bytes, name: str, implicit: bool = True, raise_verify: bool = False
) -> ModuleOp:
    """
    Return the module in the UTF-8 text `data`, parsed but not verified. `name` is the file name for error messages.

    `implicit` allows operations without a module around them. Raises `UnityError` for an empty text or one that is not
    UTF-8, and `ParseError` for a wrong one; with `raise_verify`, `VerifyException` for attributes that do not verify.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UnityError(f"{name}: byte {error.start} is not UTF-8 text") from error
    if not text.strip():
        raise UnityError(f"{name}: the file is empty; the empty module is `builtin.module {{}}`")
    check_strings(text, name)
    parser = _Parser(context, text, name)
    try:
        return parser.parse_module(implicit)
    except VerifyException as error:
        # An attribute that does not hold together; it has no place of its own.
        if raise_verify:
            raise
        parser.raise_error(str(error))
    except RecursionError:
        parser.raise_error("nested too deeply")
    except (NotImplementedError, OverflowError, ValueError, struct.error) as error:
        # Python's limit on the digits of an integer, and widths xDSL cannot pack into bytes.
        parser.raise_error(f"not a value of its type: {error}")
    except (UnityError, ParseError, DiagnosticException):
        raise
    except Exception as error:
        if not _of_xdsl(error):
            raise
        parser.raise_error(f"xDSL cannot read it: {described(error)}")


def check_structure(module: ModuleOp) -> None:
    """
    Raise `VerifyException` unless every operation of the module has the operands, results, regions and properties that
    its definition asks for.

    Call it before `module.verify`: that verifies inner operations first, and their verifiers rely on the operations
    around them.
    """
    with as_xdsl("verified"):
        for op in module.walk():
            if isinstance(op, IRDLOperation):
                try:
                    op.get_irdl_definition().verify(op)
                    if isinstance(op, FuncOp):
                        _check_attributes(op)
                except VerifyException as error:
                    raise VerifyException(f"{op.name}: {error}") from error


def _check_attributes(func: FuncOp) -> None:
    """Raise `VerifyException` unless a function has as many attributes of arguments and results as of these."""
    type = func.function_type
    for name, found, count in (
        ("arg_attrs", func.arg_attrs, len(type.inputs)),
        ("res_attrs", func.res_attrs, len(type.outputs)),
    ):
        if found is not None and len(found) != count:
            raise VerifyException(
                f"{name} has {len(found)} dictionaries, but the function's type has {count} such values"
            )


@contextmanager
def as_xdsl(done: str) -> Generator[None]:
    """
    Turn exceptions of xDSL's own code, raised in the `with` statement, into a `DiagnosticException`, and hide warnings.

    `done` is a participle for the message, of what is done to the module, such as `verified`. Errors that have a
    message for users already (`UnityError`, `ParseError`, `OSError`), and those of this package's code, are raised as
    they are.
    """
    try:
        with warnings.catch_warnings():
            # They would be lines beside the message.
            warnings.simplefilter("ignore")
            yield
    except (UnityError, ParseError, DiagnosticException, OSError):
        raise
    except RecursionError as error:
        raise DiagnosticException("nested too deeply") from error
    except ImportError as error:
        raise DiagnosticException(f"it cannot be {done}: {error}; install that first") from error
    except Exception as error:
        if not _of_xdsl(error):
            raise
        raise DiagnosticException(f"it cannot be {done} by xDSL: {described(error)}") from error


def _of_xdsl(error: Exception) -> bool:
    """
    Return whether a raised exception comes from xDSL's code, or a library that it called, rather than from this
    package's.
    """
    trace, ours = error.__traceback__, False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(_XDSL):
            ours = False
        elif f"{os.sep}unity_ir{os.sep}" in file:
            ours = True
        trace = trace.tb_next
    return not ours


def described(error: Exception) -> str:
    """
    Return an exception as text, type and message: `KeyError: 'x'`. Of an assertion, only the type, since its message
    may hold a whole module.
    """
    text = "" if isinstance(error, AssertionError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
