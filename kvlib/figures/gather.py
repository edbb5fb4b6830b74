"""Pictures of reading a paged cache: the step's time, the scattered blocks, the bytes moved."""

import numpy as np
from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from kvlib.figures import style
from kvlib.figures.picture import Picture, log2_axis, spread

_MAX_ROWS = 5


class DecodeStep(Picture):
    """Time to read weights and caches for one decode step, against the sequences served at once."""

    width, height = 720, 400

    def build(self):
        axes = self.figure.add_axes((0.09, 0.14, 0.72, 0.73))
        log2_axis(axes, "x", 0, 8)
        log2_axis(axes, "y", -3, 9, step=2)
        axes.set_xlabel("sequences decoded together")
        axes.set_ylabel("one step, at least [ms]")
        self._lines = []
        for name, colour, width in (
            ("weights", style.WEIGHTS, 1.8),
            ("caches", style.CACHE, 2.8),
            ("both", style.INK, 1.2),
        ):
            line = self.moving(axes.plot([], [], color=colour, lw=width)[0])
            tag = self.label(2**8.15, 1, name, axes=axes, color=colour, va="center", weight="bold")
            self._lines.append((line, tag))
        self._here = self.moving(axes.plot([], [], "o", color=style.INK, ms=7, zorder=6)[0])
        self._cross = self.moving(axes.plot([], [], "o", color=style.CACHE, ms=8, zorder=5)[0])
        self._full = self.moving(axes.axvline(1, color=style.LIMIT, lw=1.4))
        self._full_tag = self.label(1, 2**8.7, axes=axes, color=style.LIMIT, va="top")
        self._guess = self.label(1, 2**-2.7, axes=axes, color=style.SOFT, ha="center")
        for tag in (self._full_tag, self._guess):
            tag.set_path_effects(style.HALO)

    def draw(self, batch, batches, weight_seconds, cache_seconds, heavier_from, most):
        caches = cache_seconds * batches
        curves = [np.full(len(batches), weight_seconds), caches, weight_seconds + caches]
        ends = [np.clip(np.log2(curve[-1] * 1e3), -3, 8.2) for curve in curves]
        ends = spread([*ends[:2], max(ends) + 0.8], gap=0.8)
        for (line, tag), curve, end in zip(self._lines, curves, ends, strict=True):
            line.set_data(batches, curve * 1e3)
            tag.set_y(2.0**end)
        self._here.set_data([batch], [(weight_seconds + batch * cache_seconds) * 1e3])
        self._cross.set_data([heavier_from], [weight_seconds * 1e3])
        self._full.set_xdata([max(most, 0.5)] * 2)
        self._full_tag.set(
            x=min(max(most, 1) * 0.95, 2**7.8) if most > 8 else max(most, 1) * 1.08,
            ha="right" if most > 8 else "left",
            text=f"memory is full at {most:,}",
        )
        self._guess.set_visible(bool(self.guess))
        if self.guess:
            self._guess.set(x=float(self.guess[0]), text=f"you said {self.guess[0]}")


class PageScatter(Picture):
    """One sequence's blocks where they lie in the pool, and in the order attention needs."""

    width, height = 720, 400
    num_columns, num_blocks = 16, 96

    def build(self):
        axes = self.figure.add_axes((0.02, 0.02, 0.96, 0.86))
        axes.set(xlim=(0, self.num_columns), ylim=(11.0, -0.6))
        axes.set_axis_off()
        axes.text(0, -0.15, "the pool: every square is a block", color=style.SOFT)
        axes.text(0, 10.75, "gathered, in token order", color=style.SOFT, va="center")
        places = (divmod(k, self.num_columns) for k in range(self.num_blocks))
        squares = [Rectangle((x + 0.06, y + 0.08), 0.88, 0.84) for y, x in places]
        self._pool = self.moving(
            axes.add_collection(PatchCollection(squares, ec=style.SOFT, lw=0.6, zorder=2))
        )
        self._strip = self.moving(
            axes.add_collection(PatchCollection([Rectangle((0, 0), 1, 1)], lw=0.6, zorder=2))
        )
        self._ways = self.moving(axes.add_collection(LineCollection([], lw=0.8, zorder=3)))
        self._numbers = [self.label(0, 0, axes=axes, ha="center", va="center") for _ in range(32)]

    def draw(self, table, others, order, last_share):
        shades = self._shades(len(table))
        colours = np.full((self.num_blocks, 3), 1.0)
        colours[sorted(others)] = to_rgb(style.SHARED)
        colours[table] = shades
        self._pool.set_facecolor(colours)
        wide = self.num_columns / max(len(order), self.num_columns)
        left = np.arange(len(order)) * wide
        fill = [wide * 0.94] * (len(order) - 1) + [wide * 0.94 * last_share]
        self._strip.set_paths(
            [Rectangle((x, 8.9), w, 1.3) for x, w in zip(left, fill, strict=True)]
        )
        ranks = np.argsort(table)[np.searchsorted(np.sort(table), order)]
        self._strip.set(facecolor=shades[ranks], edgecolor=style.SOFT)
        row, column = np.divmod(order, self.num_columns)
        at = np.stack([column + 0.5, row + 0.92], axis=1)
        to = np.stack([left + np.array(fill) / 2, np.full(len(order), 8.9)], axis=1)
        self._ways.set(segments=np.stack([at, to], axis=1), color=shades[ranks])
        step = -(-len(order) // 16)
        for k, text in enumerate(self._numbers):
            place = k // 2 * step
            text.set_visible(place < len(order))
            if place >= len(order):
                continue
            ink = style.PAPER if place > len(order) / 3 else style.INK
            x, y = (at[place] - (0, 0.42)) if k % 2 else (to[place][0], 9.55)
            text.set(x=x, y=y, text=str(place + 1), color=ink)

    @staticmethod
    def _shades(number):
        """Return one blue per block, from light for the first to full for the last."""
        share = np.linspace(0.25, 1, number)[:, None]
        return 1 + (np.array(to_rgb(style.CACHE)) - 1) * np.round(share * 16) / 16


class ReadPaths(Picture):
    """Ways to feed attention: bytes each moves, as time, beside what was measured."""

    width, height = 720, 360

    def build(self):
        axes = self._axes = self.figure.add_axes((0.29, 0.14, 0.50, 0.68))
        axes.set(ylim=(_MAX_ROWS - 0.4, -0.6), yticks=[])
        axes.set_xlabel("time at this bandwidth [ms]")
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        beside = axes.get_yaxis_transform()
        for x, words, colour in (
            (0, "moved by the gather", style.OTHER),
            (0.46, "read by attention", style.CACHE),
        ):
            axes.text(x, -0.75, words, color=colour, weight="bold", transform=beside)
        self._heads = self.label(1.04, -0.72, axes=axes, transform=beside, color=style.SOFT)
        place = {"axes": axes, "va": "center", "transform": beside}
        self._rows = []
        for row in range(_MAX_ROWS):
            bars = [
                self.moving(axes.add_patch(Rectangle((0, row - 0.32), 1, 0.64, lw=0.8, **look)))
                for look in (
                    {"fc": style.OTHER, "ec": style.OTHER},
                    {"fc": style.CACHE, "ec": style.CACHE},
                )
            ]
            name = self.label(-0.03, row, ha="right", **place)
            end = self.label(0, row, axes=axes, va="center", path_effects=style.HALO)
            self._rows.append((bars, name, end, self.label(1.04, row, **place)))

    def draw(self, paths, bytes_per_second, measured, device):
        most = max(gathered + read for gathered, read in paths.values()) / bytes_per_second * 1e3
        self.set_limits(self._axes, x=(0, 2.0 ** np.ceil(np.log2(most * 1.02))))
        self._heads.set_text(device)
        for (bars, name, end, beside), (path, parts) in zip(self._rows, paths.items(), strict=True):
            left = 0.0
            for bar, num_bytes in zip(bars, parts, strict=True):
                bar.set(x=left, width=num_bytes / bytes_per_second * 1e3)
                left += bar.get_width()
            name.set_text(path)
            end.set(x=left, text=f" {left:.3g} ms")
            seconds = measured.get(path)
            beside.set_text(f"{seconds * 1e3:,.3g} ms" if seconds else "not measured")
