"""Pictures of bytes: the formula's factors, a GPU that fills, models beside each other."""

import math
from itertools import zip_longest

import matplotlib as mpl
from matplotlib.markers import TICKDOWN
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from kvlib.figures import style
from kvlib.figures.picture import Picture, lay_out, log2_axis, spread
from kvlib.units import GiB, KiB, format_bytes

_MOST_TICKS = 11


class FactorTiles(Picture):
    """Five factors multiply into bytes per token; bars set the product beside known models."""

    width, height = 720, 430
    cover_at = 0.6, 0.33

    def build(self):
        tiles = self.figure.add_axes((0.02, 0.60, 0.96, 0.28))
        tiles.set_axis_off()
        tiles.set(xlim=(0, 104), ylim=(0, 10))
        captions = ("key and value", "layers", "KV heads", "head_dim", "bits per value")
        self._factors = [self._tile(tiles, 16 * i, text) for i, text in enumerate(captions)]
        for i in range(1, 5):
            tiles.text(16 * i - 1.5, 6.4, "×", ha="center", va="center", fontsize=13)
        tiles.text(82, 6.4, "÷ 8 =", ha="center", va="center", fontsize=12)
        self._product = self.label(95.5, 6.5, axes=tiles, ha="center", va="center", fontsize=15)
        self._product.set(color=style.CACHE, weight="bold")
        tiles.text(95.5, 1.2, "bytes per token", ha="center", color=style.CACHE)
        self._axes = self.figure.add_axes((0.30, 0.11, 0.60, 0.43))
        self._axes.set_xlabel("KV cache of one token [KiB]")
        self._axes.set(ylim=(3.6, -0.6), yticks=[])
        self._axes.grid(axis="y", visible=False)
        self._axes.spines["left"].set_visible(False)
        beside = self._axes.get_yaxis_transform()
        self._bars, self._names, self._ends = [], [], []
        for row in range(4):
            colour = style.CACHE if row == 0 else style.LIGHT
            bar = Rectangle((0, row - 0.32), 1, 0.64, fc=colour, lw=0)
            self._bars.append(self.moving(self._axes.add_patch(bar)))
            place = {"axes": self._axes, "va": "center"}
            self._names.append(self.label(-0.02, row, ha="right", transform=beside, **place))
            self._ends.append(self.label(0, row, **place))

    def _tile(self, axes, x, caption):
        axes.add_patch(Rectangle((x, 3.4), 13, 6.2, fc="#E5F1F8", ec=style.CACHE, lw=1.2))
        axes.text(x + 6.5, 1.2, caption, ha="center", color=style.SOFT)
        look = {"ha": "center", "va": "center", "fontsize": 16, "color": style.CACHE}
        return self.label(x + 6.5, 6.5, axes=axes, **look)

    def draw(self, factors, bytes_per_token, others):
        for text, factor in zip(self._factors, factors, strict=True):
            text.set_text(f"{factor:g}")
        self._product.set_text(f"{bytes_per_token:,}")
        rows = [("this shape", bytes_per_token), *others.items()]
        most = max(num_bytes for _, num_bytes in rows)
        right = max(256, 2 ** math.ceil(math.log2(most / KiB)))
        self.set_limits(self._axes, x=(0, right))
        for row, (name, num_bytes) in enumerate(rows):
            self._bars[row].set_width(num_bytes / KiB)
            self._names[row].set_text(name)
            self._ends[row].set(
                x=num_bytes / KiB + right / 90, text=self._end(name, num_bytes, others)
            )

    def _end(self, name, num_bytes, others):
        if name not in self.guess:
            return f"{num_bytes:,}"
        rank = sorted(others, key=others.get).index(name) + 1
        return f"{num_bytes:,}   no. {rank}, you said no. {self.guess.index(name) + 1}"


class MemoryCurve(Picture):
    """Cache against context length with the budget line, over one bar that fills a GPU."""

    width, height = 720, 470

    def build(self):
        axes = self._axes = self.figure.add_axes((0.09, 0.36, 0.72, 0.55))
        log2_axis(axes, "x", 10, 20)
        axes.set_xlabel("context length [tokens per sequence]")
        axes.set_ylabel("KV cache of all sequences [GiB]")
        self._top = None
        self._lines = []
        for row in range(4):
            look = {"color": style.SOFT, "lw": 1.1} if row else {"color": style.CACHE, "lw": 2.8}
            line = self.moving(axes.plot([], [], **look)[0])
            tag = self.label(2**20.2, 0, axes=axes, color=look["color"], va="center")
            tag.set_weight("normal" if row else "bold")
            self._lines.append((line, tag))
        self._limit = self.moving(axes.axhline(1, color=style.LIMIT, lw=1.4))
        self._limit_tag = self.label(2**10.08, 1, axes=axes, color=style.LIMIT, va="bottom")
        self._here = self.moving(axes.plot([], [], "o", color=style.INK, ms=5, zorder=5)[0])
        self._cross = self.moving(axes.plot([], [], "o", color=style.CACHE, ms=8, zorder=6)[0])
        self._cross_tag = self.label(0, 0, axes=axes, color=style.CACHE, weight="bold", va="top")
        self._cross_tag.set_path_effects(style.HALO)
        bar = self.figure.add_axes((0.09, 0.12, 0.72, 0.10))
        bar.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
        bar.spines["left"].set_visible(False)
        # Its scale changes at every step: numbers that move cost less than an axis drawn anew.
        look = {"color": style.SOFT, "ms": 3.5, "mew": 0.8, "clip_on": False}
        self._ticks = self.moving(bar.plot([], [], ls="", marker=TICKDOWN, **look)[0])
        place = {"axes": bar, "ha": "center", "va": "top", "color": style.SOFT}
        self._numbers = [self.label(0, -0.2, **place) for _ in range(_MOST_TICKS)]
        self._end = self.moving(bar.axvline(1, color=style.LIMIT, lw=2))
        self._caption = self.label(0.09, 0.015, color=style.SOFT)
        looks = (
            (style.WEIGHTS, style.PAPER),
            (style.OTHER, style.INK),
            (style.CACHE, style.PAPER),
            (style.PAPER, style.INK),
        )
        self._parts = self.stacked_bar(bar, looks, fontsize=8, ec=style.SOFT, lw=0.8)

    def draw(self, gpu, parts, context, cache_bytes, contexts, curves, longest):
        budget = parts[0] - parts[1] - parts[2]
        this = next(iter(curves.values()))
        self._scale_to(max(this[-1], budget) / GiB)
        self._draw_curves(contexts, curves)
        self._here.set_data([context], [cache_bytes / GiB])
        for artist in (self._limit, self._limit_tag):
            artist.set_visible(budget > 0)
        self._limit.set_ydata([budget / GiB] * 2)
        self._limit_tag.set(y=budget / GiB * 1.15, text=f"free for cache: {format_bytes(budget)}")
        self._mark_crossing(longest, budget)
        self._fill_bar(gpu, *parts, cache_bytes)

    def _scale_to(self, most):
        """Move the axis in steps of eight, so that a drag rarely redraws it."""
        top = 3 * math.ceil(math.log2(most * 1.3) / 3)
        if top != self._top:
            self._top = top
            with mpl.rc_context(style.STYLE):
                log2_axis(self._axes, "y", top - 15, top, step=3)

    def _draw_curves(self, contexts, curves):
        heights = spread([math.log2(curve[-1] / GiB) for curve in curves.values()], gap=0.9)
        for row, (line, tag) in enumerate(self._lines):
            line.set_visible(row < len(curves))
            tag.set_visible(row < len(curves) and heights[row] <= self._top)
        for (line, tag), (name, curve), y in zip(
            self._lines, curves.items(), heights, strict=False
        ):
            line.set_data(contexts, curve / GiB)
            tag.set(y=2.0**y, text=name)

    def _mark_crossing(self, longest, budget):
        visible = 2**10 <= longest <= 2**20
        self._cross.set_visible(visible)
        self._cross_tag.set_visible(longest > 0)
        self._cross.set_data([longest], [budget / GiB])
        is_right = longest > 2**17.5
        beyond = " (off the axis)" if longest > 2**20 else ""
        self._cross_tag.set(
            x=min(max(longest, 2**10), 2**20) * (0.96 if is_right else 1.1),
            y=max(budget, 1) / GiB * (1.15 if is_right else 0.85),
            ha="right" if is_right else "left",
            va="bottom" if is_right else "top",
            text=f"{longest:,} tokens each{beyond}",
        )

    def _fill_bar(self, gpu, gpu_bytes, weight_bytes, reserve_bytes, cache_bytes):
        taken = weight_bytes + reserve_bytes + cache_bytes
        span = max(gpu_bytes, taken)
        self._end.set_xdata([gpu_bytes / span] * 2)
        parts = {"weights": weight_bytes, "reserve": reserve_bytes, "cache": cache_bytes}
        parts["free"] = span - taken
        lay_out(self._parts, (part / span for part in parts.values()))
        for (_, text), (name, part) in zip(self._parts, parts.items(), strict=True):
            text.set_text(f"{name}\n{part / GiB:,.1f}")
            text.set_visible(part > 0.06 * span)
        # The cache's name stands beside the GPU's end, not on it.
        start = weight_bytes + reserve_bytes
        split = min(max(gpu_bytes, start), taken)
        low, high = max((start, split), (split, taken), key=lambda piece: piece[1] - piece[0])
        self._parts[2][1].set_x((low + high) / 2 / span)
        ticks = MaxNLocator(_MOST_TICKS - 2, steps=[1, 2, 5, 10]).tick_values(0, span / GiB)
        ticks = [tick for tick in ticks if tick * GiB <= span]
        self._ticks.set_data([tick * GiB / span for tick in ticks], [0] * len(ticks))
        for number, tick in zip_longest(self._numbers, ticks):
            number.set_visible(tick is not None)
            if tick is not None:
                number.set(x=tick * GiB / span, text=f"{tick:,g}")
        self._caption.set_text(f"one {gpu} as programs see it: {format_bytes(gpu_bytes)}")


class ModelCurves(Picture):
    """One curve a model, and what each kind of layer of the selected one holds."""

    width, height = 720, 440

    def build(self):
        axes = self._axes = self.figure.add_axes((0.10, 0.13, 0.35, 0.75))
        log2_axis(axes, "x", 10, 20, step=2)
        log2_axis(axes, "y", -8, 8, step=2)
        axes.set_xlabel("context length [tokens]")
        axes.set_ylabel("one sequence, one rank [GiB]")
        self._lines = []
        for _ in range(6):
            line = self.moving(axes.plot([], [], color=style.SOFT, lw=1.1)[0])
            self._lines.append((line, self.label(2**20.25, 1, axes=axes, va="center")))
        self._here = self.moving(axes.plot([], [], "o", color=style.INK, ms=6, zorder=5)[0])
        groups = self._groups = self.figure.add_axes((0.63, 0.13, 0.35, 0.75))
        groups.set(ylim=(3, 0), xlim=(0, 1.02), yticks=[])
        groups.set_xticks([0, 0.5, 1], ["0", "50", "100"])
        groups.set_xlabel("share of the longest bar [%]")
        groups.grid(axis="y", visible=False)
        self._rows = []
        for row in range(3):
            patch = Rectangle((0, row + 0.40), 0, 0.40, fc=style.CACHE, ec=style.SOFT, lw=0.8)
            text = self.label(0.01, row + 0.34, axes=groups, va="bottom")
            text.set(transform=groups.get_yaxis_transform(), path_effects=style.HALO)
            self._rows.append((self.moving(groups.add_patch(patch)), text))

    def draw(self, selected, contexts, curves, context, rows):
        heights = spread([math.log2(curve[-1] / GiB) for curve in curves.values()], gap=0.62)
        for (line, tag), (name, curve), y in zip(self._lines, curves.items(), heights, strict=True):
            chosen = name == selected
            colour = style.CACHE if chosen else style.SOFT
            line.set_data(contexts, curve / GiB)
            line.set(color=colour, lw=2.8 if chosen else 1.1, zorder=4 if chosen else 2)
            tag.set(y=2.0**y, text=name, color=colour, weight="bold" if chosen else "normal")
        total = sum(num_bytes for label, num_bytes in rows if not label.startswith("if"))
        self._here.set_data([context], [total / GiB])
        most = max(num_bytes for _, num_bytes in rows)
        for (patch, text), row in zip(self._rows, [*rows, None, None][:3], strict=True):
            patch.set_visible(row is not None)
            text.set_visible(row is not None)
            if row is not None:
                patch.set(
                    width=row[1] / most, fc=style.PAPER if row[0].startswith("if") else style.CACHE
                )
                text.set_text(f"{row[0]}: {format_bytes(row[1])}")
