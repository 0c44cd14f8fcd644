"""The figure of `snapshot bench --async`: each training step as a stroke, one panel for each system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 92
"""Of the figure, and of one panel."""
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 54, 40
PLOT = 56
"""Height of what is drawn in a panel; its name stands above."""
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)

STYLE = """\
.paper { fill: #ffffff } .text { fill: #24292f; font: 13px system-ui, sans-serif }
.title { font-weight: 600; font-size: 15px } .small { fill: #57606a; font-size: 11px }
.step { stroke: #0969da; stroke-width: 1.2 } .under { stroke: #bc4c00; stroke-width: 1.2 }
.call { fill: #cf222e; fill-opacity: 0.22 } .mark { stroke: #cf222e; stroke-width: 1 }
.end { stroke: #1a7f37; stroke-width: 1; stroke-dasharray: 3 2 } .axis { stroke: #8c959f; stroke-width: 0.6 }
@media (prefers-color-scheme: dark) {
.paper { fill: #131416 } .text { fill: #e6edf3 } .small { fill: #9da7b3 }
.step { stroke: #58a6ff } .under { stroke: #f0883e } .call { fill: #ff7b72; fill-opacity: 0.3 }
.mark { stroke: #ff7b72 } .end { stroke: #56d364 } .axis { stroke: #6e7681 }
}"""


@dataclass(frozen=True, slots=True)
class Panel:
    """One save in the middle of training; all times are seconds after the call began."""

    name: str
    returned: float
    done: float
    steps: Sequence[tuple[float, float]]
    """When each began and ended."""


def draw(title: str, panels: Sequence[Panel]) -> str:
    """The figure, as SVG. All panels have the same scales."""
    first = min((began for panel in panels for began, _ in panel.steps), default=0.0)
    last = max((ended for panel in panels for _, ended in panel.steps), default=1.0)
    most = max((ended - began for panel in panels for began, ended in panel.steps), default=1.0)
    scales = _Scales(first, max(last, first + 1e-6), most)
    height = TOP + HEIGHT * len(panels) + BOTTOM
    body = [line for number, panel in enumerate(panels) for line in _panel(panel, TOP + HEIGHT * number, scales)]
    axis = _axis(scales, TOP + HEIGHT * len(panels))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-label="{escape(title)}">',
            f"<style>\n{STYLE}\n</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>',
            f'<text class="text title" x="{LEFT}" y="22">{escape(title)}</text>',
            *_legend(),
            *body,
            *axis,
            "</svg>\n",
        ]
    )


class _Scales:
    def __init__(self, first: float, last: float, most: float) -> None:
        self.first, self.last, self.most = first, last, most

    def x(self, seconds: float) -> float:
        return LEFT + (seconds - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def tall(self, seconds: float) -> float:
        """The height of a stroke."""
        return seconds / self.most * PLOT


def _legend() -> Iterator[str]:
    """What the strokes and marks mean."""
    at = LEFT
    for kind, text, wide in (
        ("step", "a step", 70),
        ("under", "a step with the save under way", 206),
        ("call", "the call", 78),
        ("end", "all is written and synced, as far as it syncs", 0),
    ):
        if kind == "call":
            yield f'<rect class="call" x="{at}" y="32" width="10" height="12"/>'
        else:
            yield f'<line class="{kind}" x1="{at + 5}" y1="32" x2="{at + 5}" y2="44"/>'
        yield f'<text class="text small" x="{at + 14}" y="42">{text}</text>'
        at += wide


def _panel(panel: Panel, top: int, scales: _Scales) -> Iterator[str]:
    """A system's steps above its base line."""
    base = top + HEIGHT - 8
    yield f'<text class="text" x="{LEFT}" y="{base - PLOT - 8}">{escape(panel.name)}</text>'
    yield f'<text class="text small" x="{WIDTH - RIGHT}" y="{base - PLOT - 8}" text-anchor="end">{_sum(panel)}</text>'
    yield f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>'
    for seconds in (tick for tick in TICKS if scales.most / 3 < tick <= scales.most):
        y = base - scales.tall(seconds)
        yield f'<text class="text small" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{seconds:g} s</text>'
        yield f'<line class="axis" x1="{LEFT - 3}" y1="{y:.1f}" x2="{LEFT}" y2="{y:.1f}"/>'
    call, end = scales.x(0.0), scales.x(panel.done)
    width = max(1.0, scales.x(panel.returned) - call)
    yield f'<rect class="call" x="{call:.1f}" y="{base - PLOT}" width="{width:.1f}" height="{PLOT}"/>'
    yield f'<line class="mark" x1="{call:.1f}" y1="{base - PLOT}" x2="{call:.1f}" y2="{base}"/>'
    yield f'<line class="end" x1="{end:.1f}" y1="{base - PLOT}" x2="{end:.1f}" y2="{base}"/>'
    for kind, chosen in (("step", False), ("under", True)):
        strokes = [
            f"M{scales.x(ended):.1f} {base}v-{scales.tall(ended - began):.1f}"
            for began, ended in panel.steps
            if (began >= 0 and began < panel.done) == chosen
        ]
        if strokes:
            yield f'<path class="{kind}" fill="none" d="{"".join(strokes)}"/>'


def _sum(panel: Panel) -> str:
    return f"call {panel.returned * 1e3:,.0f} ms, written after {panel.done:.2f} s"


def _axis(scales: _Scales, top: int) -> Iterator[str]:
    """Seconds since the call."""
    step = next((tick for tick in TICKS if (scales.last - scales.first) / tick <= 12), TICKS[-1])
    number = int(scales.first / step)
    while number * step <= scales.last:
        x = scales.x(number * step)
        yield f'<line class="axis" x1="{x:.1f}" y1="{top - 8}" x2="{x:.1f}" y2="{top - 4}"/>'
        yield f'<text class="text small" x="{x:.1f}" y="{top + 8}" text-anchor="middle">{number * step:g}</text>'
        number += 1
    at = f'x="{(LEFT + WIDTH) / 2}" y="{top + 26}"'
    yield f'<text class="text small" {at} text-anchor="middle">seconds after the call</text>'
