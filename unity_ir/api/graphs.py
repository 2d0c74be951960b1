"""Read graphs from files, or from the zoo."""

from __future__ import annotations

from unity_ir.errors import UnityError
from unity_ir.pcg.graph import Graph

SUFFIXES = (".pcg", ".mlir")
"""How the names of files of graphs end."""


def read_graphs(name: str) -> list[Graph]:
    """
    Return the graphs of all functions in a file, if `name` ends in `.pcg` or `.mlir`; else the graph of the model of
    the zoo that it names, such as `bert_large,layers=1`.

    Raises `UnityError` for wrong text, an unknown model, and a file without functions; `OSError` if the file cannot be
    read.
    """
    if not name.endswith(SUFFIXES):
        from unity_ir.models import from_text

        return [from_text(name)]
    from unity_ir.api.modules import as_unity_errors, read_file
    from unity_ir.dialects.convert import pcg_functions, to_graph

    module = read_file(name)
    with as_unity_errors(name, module):
        graphs = [to_graph(f) for f in pcg_functions(module)]
    if not graphs:
        raise UnityError(f"{name}: it has no function of pcg operations")
    return graphs
