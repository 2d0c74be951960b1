"""Steps on a whole form: terms that cancel, and cases to tell apart."""

from __future__ import annotations

from false_equations.said import (
    BOX,
    CANCEL,
    False_,
    X,
    Y,
    at_least,
    cancel,
    d,
    equals,
    i,
    j,
    k,
    n,
    read,
    step,
    total,
    without,
)
from unity_ir.rules.certificate import laws, replay, terms
from unity_ir.rules.certificate.terms import box, scaled
from unity_ir.rules.certificate.write import said_constraint
from unity_ir.rules.poly import number

FALSE = {
    "cancel, twice": False_(
        laws,
        "cancel",
        'len(set(said["these"])) < len(chosen)',
        "False",
        (*scaled(total("", (), Y), 2), *scaled(total("", (), Y), -1)),
        [cancel(0, 1, 1)],
    ),
    "cancel, other indices": False_(
        laws,
        "cancel",
        "set(renamed.binders) != set(first.binders) or",
        "",
        without(total("k", BOX, Y), total("", BOX, Y)),
        [CANCEL],
    ),
    "cancel, facts of another index": False_(
        laws,
        "cancel",
        "or set(first.binders) & symbols_of(facts)",
        "",
        without(total("k", BOX, Y), total("k", (*BOX, at_least(k, 5)), Y)),
        [CANCEL],
        (at_least(k, 5),),
    ),
    "cancel, other factors": False_(
        laws,
        "cancel",
        "not same_factors(first.factors, renamed.factors, facts | renamed.domain)",
        "False",
        without(total("k", BOX, X), total("k", BOX, read("v", k))),
        [CANCEL],
    ),
    "cancel, other weights": False_(
        laws,
        "cancel",
        "not _unsatisfiable([z3.Sum(held) != 0, *map(_condition, sorted(facts, key=str))])",
        "False",
        (*total("", (), Y), *total("", (), Y)),
        [CANCEL],
    ),
    "cancel, names taken": False_(
        terms,
        "rebound",
        "len(set(new)) < len(new) or set(new) & mono.free",
        "False",
        without(total("j", box("j", n), read("x", j, j)), total("k", BOX, read("x", k, j))),
        [cancel(0, 1, names=[{}, {"k": "j"}])],
    ),
    "cases, one left out": False_(
        replay,
        "_check",
        'len(step["then"]) != len(alternatives)',
        "False",
        total("", (at_least(number(4), n),), Y),
        [step("cases", on=said_constraint(at_least(n, 5)), then=[[step("empty")]])],
    ),
    "digits, no box": False_(
        replay,
        "apply_digits",
        "or not set(box(index, d * m)) <= facts",
        "",
        total("", (at_least(i, d * 2),), Y),
        [step("digits", index="i", outer="s", inner="j", d=d, m=number(2)), step("empty")],
        (*box("i", n), at_least(d, 1)),
    ),
    "digits, not new": False_(
        replay,
        "apply_digits",
        "{outer, inner} & known or",
        "",
        total("", (equals(j, 5),), Y),
        [step("digits", index="i", outer="s", inner="j", d=d, m=number(2)), step("empty")],
        (*box("i", d * 2),),
    ),
    "no number of them": False_(
        terms,
        "one_of",
        "not isinstance(at, int) or not 0 <= at < len(items)",
        "False",
        (*scaled(total("", (), Y), 2), *scaled(total("", (), Y), -1)),
        [cancel(0, 1, -1)],
    ),
}
