"""
Casts between element types as forms (the prover's sums of monomials): those that may change a number are uninterpreted
functions.
"""

from __future__ import annotations

from unity_ir.rules.proof.forms import UNIT, Apply, Form, Mono
from unity_ir.rules.proof.tensors import ElementPosition, TensorForm
from unity_ir.tdl.element_types import holds_all
from unity_ir.tdl.syntax import NOT_FLOATING


def converted(of: TensorForm, dtype: str, rounds: bool = True) -> TensorForm:
    """
    Cast a symbolic tensor to the element type `dtype`.

    A cast that may change a number becomes a function about which the proof knows nothing, so that rounding, wrapping
    and truncation are never taken for the identity. If the elements of `of` are exact results, not yet rounded to its
    own element type (`of.stored` is False), and `dtype` is another type, they are first rounded to their own.

    `rounds` is `ProofContext.rounds`. If it is False, casts to floating point types are the identity, and others do not
    round first.
    """
    steps = [] if of.stored or of.dtype == dtype else [of.dtype]
    narrow = of.held if of.stored and of.held else of.dtype
    if not holds_all(narrow, dtype):
        steps.append(dtype)
    if not rounds:
        steps = [dtype] if dtype in NOT_FLOATING and not holds_all(narrow, dtype) else []

    def element(at: ElementPosition) -> Form:
        form = of.element(at)
        for step in steps:
            form = (Mono(UNIT, (), frozenset(), (Apply(f"as {step}", (form,)),)),)
        return form

    held = narrow if of.stored and holds_all(narrow, dtype) else ""
    return TensorForm(of.shape, element, dtype, stored=of.stored or of.dtype != dtype, held=held)
