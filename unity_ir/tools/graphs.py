"""Read graphs for tools."""

from __future__ import annotations

from pathlib import Path

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph


def read_graphs(name: str) -> list[Graph]:
    """
    Return the graphs of the functions in the file called `name`, if that ends in `.pcg` or `.mlir`; else the one graph
    of the model of the zoo that it names, such as `bert_large,layers=1`.

    Raises `UnityError` for wrong text or another name, and for a file without functions; `OSError` if it cannot be
    read.
    """
    if not name.endswith((".pcg", ".mlir")):
        from unity_ir.models import from_text

        return [from_text(name)]
    from xdsl.context import Context
    from xdsl.dialects import get_all_dialects
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.utils.exceptions import DiagnosticException, ParseError, VerifyException

    from unity_ir.dialects.convert import pcg_functions, to_graph
    from unity_ir.tools.opt_messages import name_operation, parse_error
    from unity_ir.tools.read_text import as_xdsl, check_structure, read_module
    from unity_ir.universe import UNITY_UNIVERSE

    context = Context()
    for dialect, factory in {**get_all_dialects(), **UNITY_UNIVERSE.all_dialects}.items():
        context.register_dialect(dialect, factory)
    module = ModuleOp([])
    try:
        module = read_module(context, Path(name).read_bytes(), name)
        check_structure(module)
        with as_xdsl("verified"):
            module.verify()
        graphs = [to_graph(f) for f in pcg_functions(module)]
    except ParseError as error:
        raise UnityError(parse_error(error, [op.name for op in context.loaded_ops])) from error
    except VerifyException as error:
        raise UnityError(f"{name}: {name_operation(module, error)}") from error
    except DiagnosticException as error:
        raise UnityError(f"{name}: {error}") from error
    if not graphs:
        raise UnityError(f"{name}: it has no function of pcg operations")
    return graphs
