"""Hypothesis strategies over cases. They shrink to few tokens and routes, and plain options."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from moetail.conformance.cases import Case
from moetail.conformance.cases.space import CaseSpace


def case_strategy(*bounds: Any, **more: Any) -> st.SearchStrategy[Case]:
    """Cases of a :class:`CaseSpace` with those bounds."""
    space = CaseSpace(*bounds, **more)

    @st.composite
    def drawn(draw: st.DrawFn) -> Case:
        return space.draw(lambda values: draw(st.sampled_from(values)))

    return drawn()
