"""Figures of the paper and of a study as short texts, the same on the terminal and on the page."""

from __future__ import annotations

from laminar.simulation.study.paper_figures import Comparison, PaperFigure

CLAIMS = {"equal": "", "at_most": "≤ ", "at_least": "≥ "}


def figure_value(figure: PaperFigure, value: float) -> str:
    """A value of this figure with its unit: 2.56x, 53.7 %, 0.64 s."""
    if figure.unit == "x":
        return f"{value:.2f}x"
    if figure.unit == "%":
        return f"{value:.1f} %"
    return f"{value:.3g} s" if figure.unit == "s" else f"{value:g}"


def claim_text(figure: PaperFigure) -> str:
    """What the paper says: a value, or a bound."""
    return CLAIMS[figure.claim] + figure_value(figure, figure.value)


def ratio_text(one: Comparison) -> str:
    """Ours over the paper's, marked if they differ."""
    if one.ratio is None:
        return "-"
    return f"{one.ratio:.2f}" + (" !" if one.differs else "")
