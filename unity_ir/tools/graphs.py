"""What tools read graphs from."""

from __future__ import annotations

from pathlib import Path

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph


def read_graphs(name: str) -> list[Graph]:
    """The functions of a file, or a model of the zoo. Raises `UnityError`."""
    if not name.endswith((".pcg", ".mlir")):
        from unity_ir.models import from_text

        return [from_text(name)]
    from xdsl.context import Context
    from xdsl.dialects import get_all_dialects
    from xdsl.parser import Parser
    from xdsl.utils.exceptions import DiagnosticException, ParseError

    from unity_ir.dialects.convert import pcg_functions, to_graph
    from unity_ir.universe import UNITY_UNIVERSE

    context = Context()
    for dialect, factory in {**get_all_dialects(), **UNITY_UNIVERSE.all_dialects}.items():
        context.register_dialect(dialect, factory)
    try:
        module = Parser(context, Path(name).read_text(encoding="utf-8"), name).parse_module()
        module.verify()
        return [to_graph(f) for f in pcg_functions(module)]
    except ParseError as error:
        raise UnityError(f"{error.span.get_location()}: {' '.join(error.msg.split())}") from error
    except RecursionError as error:
        raise UnityError(f"{name}: nested too deeply") from error
    except (DiagnosticException, OverflowError, ValueError) as error:
        # ValueError: text that is not UTF-8, and Python's limit on the digits of an integer.
        raise UnityError(f"{name}: {' '.join(str(error).split())}") from error
