"""
False equations that a checker of certificates accepts as soon as one condition is taken out of it: at least one for
every side condition of its laws.
"""

from __future__ import annotations

from false_equations import comparisons, extremes, functions, products, quotients, sums, whole_forms
from false_equations.said import False_

EVERY: dict[str, False_] = {
    **sums.FALSE,
    **products.FALSE,
    **whole_forms.FALSE,
    **functions.FALSE,
    **extremes.FALSE,
    **comparisons.FALSE,
    **quotients.FALSE,
}
