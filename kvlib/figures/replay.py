"""Pictures of replays: found blocks against capacity, costs by policy, tenants, who wins where."""

import itertools

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.patches import Polygon, Rectangle
from matplotlib.path import Path
from matplotlib.textpath import TextPath

from kvlib.figures import style
from kvlib.figures.picture import Picture, lay_out, log_axis, spread

_LRU, _LFU, _FIFO, _FAIR = style.OWNERS
# Name: colour, marker, the same mark in a label.
POLICY_LOOK = {
    "Belady": (style.INK, None, "─"),
    "LRU": (_LRU, None, "━"),
    "LFU": (_LFU, "^", "▲"),
    "FIFO": (_FIFO, "v", "▼"),
    "Fair": (_FAIR, "D", "◆"),
    "cost": (style.SOFT, "X", "✖"),
}
_TINTS = ("#DDD0EA", "#BFE7DA", "#F4D3E2", "#E9DDB8", "#E2E2E2")  # of LRU, LFU, FIFO, Fair, cost
_LOSSES = (_LRU, "#DDD0EA", "#FBE3B0", "#EFEFEF")  # found, order, memory, never seen


class HitRatio(Picture):
    """One bar of found and lost blocks: the slice, at one capacity, of the curves below it."""

    width, height = 720, 520
    cover_at = 0.45, 0.42

    def build(self):
        bar = self._bar = self.figure.add_axes((0.085, 0.825, 0.735, 0.09))
        bar.set(xlim=(0, 100), ylim=(0, 1))
        bar.set_axis_off()
        axes = self._axes = self.figure.add_axes((0.085, 0.125, 0.735, 0.635))
        axes.set_ylabel("blocks found [%]")
        ticks = [100, 1000, 10_000, 100_000]
        log_axis(axes, "x", ticks, [f"{tick:,}" for tick in ticks], limits=(100, 250_000))
        axes.set_xlabel("capacity [512-token blocks, and their bytes for this model]", labelpad=18)
        looks = list(zip(_LOSSES, (style.PAPER, *[style.INK] * 3), strict=True))
        self._parts = self.stacked_bar(bar, looks, ec=style.PAPER, lw=1.5)
        # Below LRU nothing is lost: the line is enough.
        self._areas = [
            self.moving(axes.add_patch(Polygon([(1, 0)] * 3, fc=colour, lw=0, zorder=0.5)))
            for colour in _LOSSES[1:]
        ]
        inside = {"axes": axes, "ha": "center", "va": "center", "color": style.SOFT}
        self._gaps = [self.label(1, 0, text, **inside) for text in ("better order", "more memory")]
        self._said = self.label(0, -0.12, axes=bar, ha="center", va="top", weight="bold")
        self._ceiling = self.moving(axes.axhline(0, color=style.SOFT, lw=1.2))
        self._here = self.moving(axes.axvline(1, color=style.INK, lw=1, ls=":"))
        self._gpu = self.moving(axes.axvline(1, color=style.LIMIT, lw=1.6))
        self._gpu_tag = self.label(1, 0, axes=axes, color=style.LIMIT, va="bottom")
        self._gpu_tag.set_path_effects(style.HALO)
        self._lines = {}
        for name, (colour, marker, _) in POLICY_LOOK.items():
            look = {"marker": marker, "ms": 6, "ls": "", "zorder": 3}
            if name in ("LRU", "Belady"):
                look = {"lw": 2.8 if name == "LRU" else 1.4}
            line = self.moving(axes.plot([], [], color=colour, **look)[0])
            self._lines[name] = line, self._end_label(colour)
        self._lines["ceiling"] = self._ceiling, self._end_label(style.SOFT)
        below = {"axes": axes, "ha": "center", "va": "top", "transform": axes.get_xaxis_transform()}
        self._bytes = [self.label(x, -0.065, color=style.SOFT, **below) for x in ticks]

    def _end_label(self, colour):
        place = {"va": "center", "transform": self._axes.get_yaxis_transform()}
        return self.label(1.015, 0, axes=self._axes, color=colour, **place)

    def draw(self, capacity, parts, curves, at_capacity, gpu_blocks, gpu, tick_texts):
        ceiling = at_capacity["ceiling"]
        self.set_limits(self._axes, y=(0, 10 * np.ceil(ceiling / 10 + 0.3)))
        self._ceiling.set_ydata([ceiling] * 2)
        self._here.set_xdata([capacity] * 2)
        for artist in (self._gpu, self._gpu_tag):
            artist.set_visible(gpu_blocks >= 100)
        self._gpu.set_xdata([gpu_blocks] * 2)
        is_left = gpu_blocks > 3000
        x = gpu_blocks / 1.06 if is_left else gpu_blocks * 1.06
        self._gpu_tag.set(x=x, y=ceiling / 60, text=gpu, ha="right" if is_left else "left")
        self._draw_parts(parts)
        self._shade(curves["LRU"], curves["Belady"], ceiling)
        heights = spread(list(at_capacity.values()), gap=self._axes.get_ylim()[1] / 19)
        heights = dict(zip(at_capacity, heights, strict=True))
        for name, (line, tag) in self._lines.items():
            for artist in (line, tag):
                artist.set_visible(name in at_capacity)
            if name in at_capacity:
                mark = POLICY_LOOK.get(name, ("", "", "┈"))[2]
                tag.set(y=heights[name], text=f"{mark} {name} {at_capacity[name]:.1f}")
            if name in curves:
                line.set_data(curves[name])
        for text, words in zip(self._bytes, tick_texts, strict=True):
            text.set_text(words)

    def _draw_parts(self, parts):
        self._said.set_text("")
        lay_out(self._parts, parts.values())
        for (_, text), (name, share) in zip(self._parts, parts.items(), strict=True):
            lines = [*name.split(", "), f"{share:.1f} %"]
            fits = share > 1.2 * max(map(len, lines))
            words = "\n".join(lines) if fits else f"{share:.1f}"
            text.set_text(words if share > 3 else "")
            if self.guess and name.startswith(self.guess[0]):
                self._said.set(x=min(max(text.get_position()[0], 6), 94), text="▲ you said")

    def _shade(self, lru, belady, ceiling):
        """Colour what the bar counts: between the curves, and up to the ceiling."""
        x = np.geomspace(100, 250_000, 120)
        edges = [*(np.interp(x, *curve) for curve in (lru, belady)), 0 * x + ceiling, 0 * x + 100]
        for area, low, high in zip(self._areas, edges, edges[1:], strict=False):
            area.set_xy(np.vstack([np.column_stack([x, low]), np.column_stack([x, high])[::-1]]))
        for text, low, high in zip(self._gaps, edges, edges[1:], strict=False):
            widest = 15 + int(np.argmax((high - low)[15:-15]))
            text.set_visible(high[widest] - low[widest] > self._axes.get_ylim()[1] / 8)
            text.set(x=x[widest], y=(low[widest] + high[widest]) / 2)


class PolicyBars(Picture):
    """A bar and a dot for each policy.

    Parameters
    ----------
    quantity : str
        What the axis shows, with its unit.
    bar, dot : str
        What bar and dot mean.
    """

    width, height = 720, 330

    def __init__(self, quantity, bar, dot):
        self._words = quantity, bar, dot
        super().__init__()

    def build(self):
        quantity, bar, dot = self._words
        axes = self._axes = self.figure.add_axes((0.10, 0.15, 0.74, 0.70))
        axes.set(ylim=(5.6, -0.6), yticks=[], xlabel=f"{quantity}   (bar: {bar}, ●: {dot})")
        axes.grid(axis="y", visible=False)
        self._rows = []
        beside = axes.get_yaxis_transform()
        for row, (name, (colour, _, mark)) in enumerate(POLICY_LOOK.items()):
            patch = axes.add_patch(Rectangle((0, row - 0.3), 0, 0.6, fc=colour, lw=0, alpha=0.55))
            point = axes.plot([0], [row], "o", color=style.INK, ms=6, zorder=4)[0]
            end = self.label(1.01, row, axes=axes, va="center", transform=beside)
            look = {"axes": axes, "ha": "right", "va": "center", "transform": beside}
            self.label(-0.015, row, f"{mark} {name}", color=colour, **look)
            self._rows.append((self.moving(patch), self.moving(point), end))

    def draw(self, rows, right):
        self.set_limits(self._axes, x=(0, right))
        for name, (patch, point, end) in zip(POLICY_LOOK, self._rows, strict=True):
            bar, dot = rows.get(name, (None, None))
            patch.set_width(bar or 0)
            point.set_visible(dot is not None)
            point.set_xdata([dot])
            text = "not replayed" if bar is None else f"{bar:.2f}"
            end.set_text(text if dot is None else f"{text} ● {dot:.2f}")


class TenantUsage(Picture):
    """Blocks of two tenants over time, with their quotas."""

    width, height = 720, 360

    def build(self):
        axes = self._axes = self.figure.add_axes((0.115, 0.14, 0.695, 0.74))
        axes.set(xlim=(0, 60), xlabel="time [min]", ylabel="blocks held")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        self._here = self.moving(axes.axvline(0, color=style.INK, lw=1, ls=":"))
        self._end = self.moving(axes.axvline(0, color=style.SOFT, lw=1))
        self._end_tag = self.label(0, 0, axes=axes, color=style.SOFT, va="top")
        self._lines = []
        for colour, width in zip(style.OWNERS, (4.2, 1.8), strict=False):
            line = self.moving(axes.plot([], [], color=colour, lw=width)[0])
            place = {"va": "center", "transform": axes.get_yaxis_transform()}
            self._lines.append((line, self.label(1.015, 0, axes=axes, color=colour, **place)))
        self._quota = self.moving(axes.axhline(0, color=style.LIMIT, lw=1.4, ls="--"))
        self._quota_tag = self.label(1.015, 0, axes=axes, color=style.LIMIT, **place)

    def draw(self, minutes, usage, quota, minute, end):
        top = 1.14 * 2 * quota
        self.set_limits(self._axes, y=(0, top))
        self._here.set_xdata([minute] * 2)
        self._end.set_xdata([end[0]] * 2)
        self._end_tag.set(x=end[0] + 0.5, y=0.985 * top, text=end[1])
        self._quota.set_ydata([quota] * 2)
        at = np.searchsorted(minutes, minute, side="right") - 1
        *heights, y = spread([*(held[at] for held in usage.values()), quota], gap=top / 8)
        self._quota_tag.set(y=y, text=f"- - quota of each\n      {quota:,}")
        for (line, tag), letter, (name, held), y in zip(
            self._lines, "AB", usage.items(), heights, strict=True
        ):
            line.set_data(minutes, held)
            tag.set(y=y, text=f"{letter} {name}\n   {held[at]:,}")


class PolicyMap(Picture):
    """Which policy wins, capacity against the weight of unfairness."""

    width, height = 720, 420

    def build(self):
        axes = self._axes = self.figure.add_axes((0.10, 0.15, 0.87, 0.72))
        axes.grid(visible=False)
        axes.set(xlabel="capacity [512-token blocks]", ylabel="weight of unfairness [%]")
        # An image would take half the time of a frame.
        cells = PolyCollection([], antialiased=False)
        self._cells = self.moving(axes.add_collection(cells))
        self._words = []
        for name in list(POLICY_LOOK)[1:]:
            word = TextPath((0, 0), name, size=10)
            middle = word.get_extents().get_points().mean(axis=0)
            look = {"marker": Path(word.vertices - middle, word.codes), "ms": 18, "mew": 0}
            colour = style.INK if name == "cost" else POLICY_LOOK[name][0]
            self._words.append(self.moving(axes.plot([], [], color=colour, ls="", **look)[0]))
        look = {"ms": 11, "mfc": style.INK, "mec": style.PAPER, "mew": 2, "zorder": 5}
        self._here = self.moving(axes.plot([], [], "o", **look)[0])

    def draw(self, columns, rows, winners, here):
        """Take winners row by row, an odd number of them for each of the labelled `rows`."""
        if len(self._axes.get_xticks()) != len(columns):
            self._axes.set_xticks(range(len(columns)), columns, fontsize=7)
            self._axes.set_yticks(range(len(rows)), rows)
        self.set_limits(self._axes, x=(-0.5, len(columns) - 0.5), y=(-0.5, len(rows) - 0.5))
        fine, cells, colours = len(winners) // len(rows), [], []
        for x, column in enumerate(winners.T):
            ends = [0, *(np.flatnonzero(np.diff(column)) + 1), len(column)]
            for ends_of_run in itertools.pairwise(ends):
                low, high = (end / fine - 0.5 for end in ends_of_run)
                corners = (-0.5, low), (0.5, low), (0.5, high), (-0.5, high)
                cells.append([(x + side, y) for side, y in corners])
                colours.append(_TINTS[column[ends_of_run[0]]])
        self._cells.set_verts(cells)
        self._cells.set_facecolor(colours)
        for k, line in enumerate(self._words):
            line.set_data(*np.nonzero(winners[fine // 2 :: fine] == k)[::-1])
        self._here.set_data([here[0]], [here[1]])
