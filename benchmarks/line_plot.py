"""Line plots as SVG text, a few kilobytes each, so that documents can hold them: panels side by side with one legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

# Okabe and Ito's palette, which people with any kind of colour vision can tell apart.
COLOURS = ("#7f7f7f", "#0072b2", "#009e73", "#d55e00", "#e69f00", "#cc79a7", "#56b4e9", "#000000")
WIDTH, HEIGHT, GAP, LEFT, TOP, BOTTOM = 190, 180, 16, 46, 30, 62
FONT = "font-family='system-ui, sans-serif' font-size='11'"


@dataclass(kw_only=True, slots=True, frozen=True)
class Line:
    """Its mean is drawn thick, each of its series thin."""

    name: str
    xs: Sequence[float]
    each: Sequence[Sequence[float]]


@dataclass(kw_only=True, slots=True, frozen=True)
class Panel:
    """One plot; lines of one name have one colour in all panels."""

    title: str
    lines: Sequence[Line]


def line_plot(panels: Sequence[Panel], *, x_title: str, y_title: str, y_range: tuple[float, float]) -> str:
    """The SVG file's text; the panels share both axes."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    low = min(min(line.xs) for panel in panels for line in panel.lines)
    high = max(max(line.xs) for panel in panels for line in panel.lines)
    low = 0.0 if 0 < low < 0.05 * high else low  # a rounder end of the axis
    width = LEFT + len(panels) * (WIDTH + GAP)
    parts = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {TOP + HEIGHT + BOTTOM}'>"]
    parts.append(f"<rect width='{width}' height='{TOP + HEIGHT + BOTTOM}' fill='white'/>")
    for index, panel in enumerate(panels):
        left = LEFT + index * (WIDTH + GAP)
        parts += _axes(panel, left, (low, high), y_range, x_title, labelled=index == 0)
        for line in panel.lines:
            colour = COLOURS[names.index(line.name) % len(COLOURS)]
            for ys in line.each:
                parts.append(_polyline(line.xs, ys, left, (low, high), y_range, f"stroke='{colour}' opacity='0.3'"))
            mean = np.mean(line.each, axis=0).tolist()
            parts.append(_polyline(line.xs, mean, left, (low, high), y_range, f"stroke='{colour}' stroke-width='2'"))
    parts.append(
        f"<text x='12' y='{TOP + HEIGHT / 2}' {FONT} transform='rotate(-90 12 {TOP + HEIGHT / 2})'>{y_title}</text>"
    )
    for index, name in enumerate(names):
        x, y = LEFT + index * 140, TOP + HEIGHT + BOTTOM - 10
        parts.append(f"<rect x='{x}' y='{y - 8}' width='18' height='4' fill='{COLOURS[index % len(COLOURS)]}'/>")
        parts.append(f"<text x='{x + 24}' y='{y}' {FONT}>{escape(name)}</text>")
    return "\n".join([*parts, "</svg>", ""])


def _axes(
    panel: Panel, left: float, xs: tuple[float, float], ys: tuple[float, float], x_title: str, *, labelled: bool
) -> list[str]:
    parts = [f"<text x='{left + WIDTH / 2}' y='{TOP - 10}' {FONT} text-anchor='middle'>{escape(panel.title)}</text>"]
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + HEIGHT * (1 - fraction)
        parts.append(f"<line x1='{left}' x2='{left + WIDTH}' y1='{y}' y2='{y}' stroke='#dddddd'/>")
        if labelled:
            value = ys[0] + fraction * (ys[1] - ys[0])
            parts.append(f"<text x='{left - 6}' y='{y + 4}' {FONT} text-anchor='end'>{value:g}</text>")
    for fraction in (0.0, 0.5, 1.0):
        value = xs[0] + fraction * (xs[1] - xs[0])
        x, y = left + fraction * WIDTH, TOP + HEIGHT + 16
        parts.append(f"<text x='{x}' y='{y}' {FONT} text-anchor='middle'>{value:g}</text>")
    parts.append(
        f"<text x='{left + WIDTH / 2}' y='{TOP + HEIGHT + 32}' {FONT} text-anchor='middle'>{escape(x_title)}</text>"
    )
    return parts


def _polyline(
    xs: Sequence[float],
    ys: Sequence[float],
    left: float,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    style: str,
) -> str:
    points = " ".join(
        f"{left + WIDTH * (x - x_range[0]) / (x_range[1] - x_range[0]):.1f},"
        f"{TOP + HEIGHT * (1 - (y - y_range[0]) / (y_range[1] - y_range[0])):.1f}"
        for x, y in zip(xs, ys, strict=True)
    )
    return f"<polyline points='{points}' fill='none' {style}/>"
