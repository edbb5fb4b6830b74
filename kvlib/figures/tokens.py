"""Pictures of dropped tokens: error curves, which positions stay, which blocks come free."""

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb

from kvlib.figures import style
from kvlib.figures.picture import Picture, log_axis, spread

BLUES = ("#08306B", style.CACHE, "#3F90C0", "#6C9FBF")  # the cache in ever fewer bits


class ErrorCurves(Picture):
    """Error against what is kept, both logarithmic; the reader's value cuts every curve."""

    width, height = 720, 440
    bounds, colours = (0.09, 0.13, 0.62, 0.75), BLUES
    x_label, x_ticks = (
        "kept keys and values of this layer [KiB]",
        (3, 6, 12, 24, 48, 96, 192, 384, 768),
    )
    y_ticks, line_widths = (0.1, 0.3, 1, 3, 10, 30, 100, 300), (3.4, 2.6, 1.9, 1.3)

    def build(self):
        axes = self._axes = self.figure.add_axes(self.bounds)
        axes.set(xlabel=self.x_label, ylabel="error of the attention output [%]")
        log_axis(axes, "x", self.x_ticks)
        log_axis(axes, "y", self.y_ticks, limits=(self.y_ticks[0], 400))
        self._here = self.moving(axes.axvline(1, color=style.LIMIT, lw=1.4, ls=":"))
        self._said = self.moving(axes.plot([], [], "D", mfc=style.PAPER, mec=style.INK, ms=7)[0])
        self._said_tag = self.label(0, 0, axes=axes, va="center", path_effects=style.HALO)
        lines = LineCollection([], colors=self.colours, linewidths=self.line_widths)
        self._lines = self.moving(axes.add_collection(lines))
        self._dots = self.moving(axes.scatter([1] * 4, [1] * 4, c=self.colours, s=36, zorder=5))
        look = {"axes": axes, "transform": axes.get_yaxis_transform(), "va": "center"}
        self._tags = [self.label(1.02, 1, color=colour, **look) for colour in self.colours]

    def draw(self, curves, points, tags, guess_at=None):
        lowest = self.y_ticks[0]
        self._lines.set_segments(
            [np.column_stack([x, np.maximum(y, lowest / 2)]) for x, y in curves]
        )
        dots = np.maximum(points, (0, lowest))
        self._dots.set_offsets(dots)
        line_height = 15 / self.height / self.bounds[3] * np.log(400 / lowest)
        heights = np.exp(spread(np.log(dots[:, 1].clip(1.2 * lowest, 370)).tolist(), line_height))
        best = min(y for _, y in points)
        for text, tag, height, (_, y) in zip(self._tags, tags, heights, points, strict=True):
            text.set(y=height, text=tag, weight="bold" if y == best else "normal")
        self._here.set_xdata([max(x for x, _ in points)] * 2)
        if self.guess and guess_at:
            x, y = guess_at, float(self.guess[0].split()[-2])
            self._said.set_data([x], [y])
            self._said_tag.set(x=1.12 * x, y=y, text=f"you said {y:g} %")


class RuleCurves(ErrorCurves):
    """One curve a rule, over the attention that positions draw and the positions that stay."""

    height, cover_at = 560, (0.40, 0.68)
    bounds, colours = (0.09, 0.45, 0.62, 0.46), style.OWNERS
    x_label, x_ticks = "keys kept [% of 1,024]", (2, 5, 10, 20, 50, 100)
    y_ticks, line_widths = (1, 3, 10, 30, 100, 300), (2,)

    def build(self):
        super().build()
        mass = self._mass = self.figure.add_axes((0.09, 0.245, 0.89, 0.095))
        mass.set_xlim(0, 1024)
        log_axis(mass, "y", [0.01, 1, 100], ["0.01", "1", "100 %"], limits=(1e-2, 400))
        mass.tick_params(axis="x", labelbottom=False, length=0)
        mass.set_title("attention that each position draws", loc="left", fontsize=9, pad=3)
        self._drawn = self.moving(mass.plot([], [], color=style.INK, lw=0.8)[0])
        self._words = [self.label(0, 1, axes=mass, va="center") for _ in range(5)]
        strip = self.figure.add_axes((0.09, 0.075, 0.89, 0.15), sharex=mass)
        strip.set(ylim=(4, 0), xlabel="position in the novel's first 1,024 tokens; dark: kept")
        strip.set_yticks([0.5, 1.5, 2.5, 3.5], "RSHO")
        strip.tick_params(axis="y", length=0)
        strip.grid(visible=False)
        for tick, colour in zip(strip.get_yticklabels(), self.colours, strict=True):
            tick.set(color=colour, weight="bold")
        self._kept = self.cells(strip, (0, 1024, 0, 4))

    def draw(self, kept, drawn, words, **curves):
        super().draw(**curves)
        self._drawn.set_data(np.arange(len(drawn)), 100 * drawn)
        for text, (position, word) in zip(self._words, [*words, *[(0, "")] * 5], strict=False):
            text.set(x=position + 5, y=100 * drawn[position], text=word)
        shade = kept.reshape(4, 512, -1).max(axis=-1)[..., None]
        ink = np.array([to_rgb(colour) for colour in self.colours])[:, None]
        self._kept.colours = np.uint8(255 * (1 - shade * (1 - ink)))


class KeptBlocks(Picture):
    """Rows of blocks: the darker, the more tokens stay; an empty block is free."""

    width, height = 720, 330

    def build(self):
        axes = self._axes = self.figure.add_axes((0.20, 0.15, 0.60, 0.70))
        axes.set(
            ylim=(5, 0),
            xlim=(0, 1024),
            yticks=[],
            xlabel="position [tokens]; one cell is one block",
        )
        axes.grid(visible=False)
        self._blocks = self.cells(axes, (0, 1024, 0, 5))
        self._edges = self.moving(axes.vlines([], 0, 5, color=style.PAPER, lw=0.7))
        for row in range(1, 5):
            self.moving(axes.axhline(row, color=style.PAPER, lw=5))
        beside = axes.get_yaxis_transform()
        self._rows = [
            [self.label(x, row + 0.5, axes=axes, transform=beside, va="center", ha=side)
             for x, side in ((-0.02, "right"), (1.02, "left"))]
            for row in range(5)
        ]  # fmt: skip

    def draw(self, stored, block_size, names, ends):
        edges = np.arange(0, stored.shape[1], block_size)
        full = np.add.reduceat(stored, edges, axis=1)[..., None] / block_size
        shade = np.where(full > 0, 0.25 + 0.75 * full, 0.03)
        self._blocks.extent = 0, block_size * len(edges), 0, 5
        self._blocks.colours = np.uint8(255 * (1 - shade * (1 - np.array(to_rgb(style.CACHE)))))
        self._edges.set_visible(block_size >= 8)  # below, there would be nothing but edges
        self._edges.set_segments([[(x, 0), (x, 5)] for x in edges])
        for texts, *words in zip(self._rows, names, ends, strict=True):
            for text, word in zip(texts, words, strict=True):
                text.set_text(word)
