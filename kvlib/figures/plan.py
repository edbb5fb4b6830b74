"""Pictures of a plan: where a GPU's bytes go, which lever gains most, what eviction costs."""

import math

from matplotlib.patches import Rectangle

from kvlib.figures import style
from kvlib.figures.picture import Picture, lay_out
from kvlib.units import GiB, format_bytes

_GAIN = style.OWNERS[1]


class Waterfall(Picture):
    """Every use takes its bytes off what is left, down to the cache; three totals below."""

    width, height = 720, 430
    cover_at = 0.5, 0.55

    def build(self):
        axes = self._axes = self.figure.add_axes((0.28, 0.32, 0.56, 0.58))
        axes.set(ylim=(6.6, -0.6), yticks=[], xlabel="one GPU [GiB]")
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        beside = axes.get_yaxis_transform()
        colours = [style.SHARED, style.WEIGHTS, *[style.OTHER] * 3, style.PAPER, style.CACHE]
        self._rows = []
        for row, colour in enumerate(colours):
            bar = Rectangle((0, row - 0.34), 0, 0.68, fc=colour, ec=style.SOFT, lw=0.8)
            place = {"axes": axes, "va": "center", "transform": beside}
            name = self.label(-0.02, row, ha="right", **place)
            number = self.label(1.02, row, weight="bold" if row in (0, 6) else "normal", **place)
            self._rows.append((self.moving(axes.add_patch(bar)), name, number))
        self._steps = self.moving(axes.plot([], [], color=style.SOFT, lw=0.8, zorder=3)[0])
        self._empty = self.moving(axes.axvline(0, color=style.LIMIT, lw=2, zorder=4))
        self._totals = [
            (self.label(x, 0.1, fontsize=17, color=ink), self.label(x, 0.03, color=ink))
            for x, ink in ((0.03, style.CACHE), (0.25, style.INK), (0.65, style.LIMIT))
        ]

    def draw(self, rows, totals):
        gpu_bytes = rows[0][1]
        left, steps = gpu_bytes, []
        for row, (artists, (name, num_bytes)) in enumerate(zip(self._rows, rows, strict=True)):
            left -= num_bytes if row else 0
            start = left if row else 0
            bar, label, number = artists
            bar.set(x=start / GiB, width=num_bytes / GiB)
            label.set_text(name)
            number.set_text(format_bytes(num_bytes))
            edge = gpu_bytes if row == 0 else start
            steps += [(edge / GiB, row), (edge / GiB, row + 1), (math.nan, row)]
        self._steps.set_data(*zip(*steps[:-3], strict=True))
        beyond = max(0, rows[1][1] + rows[2][1] - gpu_bytes) / GiB
        low = -(2 ** math.ceil(math.log2(beyond))) if beyond else 0
        self.set_limits(self._axes, x=(low, gpu_bytes / GiB * 1.005))
        self._empty.set_visible(beyond > 0)
        for k, ((number, caption), (value, words)) in enumerate(
            zip(self._totals, totals, strict=True)
        ):
            number.set_text(value)
            caption.set_text(words)
            if k == 1 and self.guess:
                caption.set_text(f"{words} (you guessed {self.guess[0]})")


class Levers(Picture):
    """What fits now, and what each lever, pulled alone, adds to it."""

    width, height = 720, 350
    cover_at = 0.62, 0.5
    num_levers = 6

    def build(self):
        axes = self._axes = self.figure.add_axes((0.33, 0.15, 0.57, 0.68))
        axes.set(ylim=(self.num_levers - 0.4, -0.6), yticks=[], xlabel="sequences that fit")
        axes.grid(axis="y", visible=False)
        self._now = self.moving(axes.add_patch(Rectangle((0, -0.6), 0, 9, fc=style.GRID, lw=0)))
        self._now_tag = self.label(0, -0.68, axes=axes, color=style.SOFT)
        self._rows = []
        for row in range(self.num_levers):
            bar = self.moving(axes.add_patch(Rectangle((0, row - 0.3), 0, 0.6, lw=0, zorder=3)))
            place = {"axes": axes, "va": "center"}
            name = self.label(-0.02, row, ha="right", transform=axes.get_yaxis_transform(), **place)
            self._rows.append((bar, name, self.label(0, row, **place)))

    def draw(self, now, levers):
        most = max(now, *(after for _, after in levers.values()), 1)
        right = 2 ** math.ceil(math.log2(most))
        self.set_limits(self._axes, x=(0, right))
        self._now.set_width(now)
        self._now_tag.set_text(f"{now:,} fit now")
        for (bar, label, end), name in zip(self._rows, self.ranked(levers), strict=True):
            words, after = levers[name]
            bar.set(x=now, width=after - now, fc=_GAIN if after >= now else style.LIMIT)
            label.set_text(words)
            if name in self.guess:
                label.set_text(f"{words}\nyour guess")
            end.set(x=max(now, after) + right / 60, text=f"{after - now:+,}")

    @staticmethod
    def ranked(levers):
        """Order levers by what they gain, most first.

        Parameters
        ----------
        levers : dict of str to (str, int)
            Words, and sequences after pulling it, by name.

        Returns
        -------
        list of str
            The names.
        """
        return sorted(levers, key=lambda name: -levers[name][1])


class EvictionCost(Picture):
    """Prefill that evictions cause, for three plans; whom the last one keeps."""

    width, height = 720, 490
    cover_at = 0.53, 0.55

    def build(self):
        axes = self._axes = self.figure.add_axes((0.09, 0.33, 0.88, 0.46))
        axes.set(ylim=(0, 120), xlabel="conversations wanted at a time")
        axes.set_ylabel("prefill for evicted [s/min]")
        axes.axhline(60, color=style.LIMIT, lw=1.4)
        place = {"axes": axes, "transform": axes.get_yaxis_transform(), "va": "bottom"}
        self.label(0.01, 60, "60 s: nothing but prefill", color=style.LIMIT, **place)
        self._plans = []
        colours = style.SOFT, style.OWNERS[3], style.OWNERS[1]
        for k, (colour, dashes) in enumerate(zip(colours, (":", "--", "-"), strict=True)):
            line = self.moving(axes.plot([], [], dashes, color=colour, lw=2.4)[0])
            dot = axes.plot([], [], "o", color=colour, ms=7, zorder=5, clip_on=False)[0]
            tag = self.label(0.09, 0.895 - 0.038 * k, color=colour, weight="bold")
            self._plans.append((line, self.moving(dot), tag))
        bar = self.figure.add_axes((0.09, 0.12, 0.88, 0.08))
        bar.set(ylim=(0, 1), yticks=[], xlim=(0, 100))
        bar.set_xlabel("conversations of tenants A and B under the last plan [%]")
        bar.grid(visible=False)
        bar.spines["left"].set_visible(False)
        faces = style.OWNERS[0], style.OWNERS[2], style.PAPER
        inks = style.PAPER, style.PAPER, style.INK
        looks = zip(faces, inks, strict=True)
        self._parts = self.stacked_bar(bar, looks, ec=style.SOFT, lw=0.8)

    def draw(self, asked, plans, per_sequence, parts):
        right = 2 ** math.ceil(math.log2(max(asked * 1.2, 32)))
        most = max(60, *(cost for _, _, cost in plans))
        top = 120 * 4 ** max(0, math.ceil(math.log(most / 110, 4)))
        self.set_limits(self._axes, x=(0, right), y=(0, top))
        for (line, dot, tag), (words, fitting, cost) in zip(self._plans, plans, strict=True):
            end = max(right, fitting)
            line.set_data([0, fitting, end], [0, 0, per_sequence * (end - fitting)])
            dot.set_data([asked], [cost])
            tag.set_text(words)
        shares = [100 * count / asked for _, count in parts]
        lay_out(self._parts, shares)
        for (_, text), (words, _), share in zip(self._parts, parts, shares, strict=True):
            text.set_text(words if share > 17 else words[:1])
            text.set_visible(share > 3)
