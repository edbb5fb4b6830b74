"""Pictures of evictions: who leaves under each policy, and the two ways back."""

import math

from matplotlib.collections import LineCollection, PolyCollection

from kvlib.figures import style
from kvlib.figures.picture import Picture, log2_axis, log_axis, spread

_NUM_ROWS = 8  # residents the table has room for
_COLUMNS = (466, 532, 598, 664)  # one for each policy
_FLOOR, _HIGHEST = 460, 100  # of the bars under the columns


class EvictionTable(Picture):
    """Residents as rows, policies as columns that number who leaves; quotas and costs below."""

    width, height = 720, 512
    cover_at = 0.5, 0.6

    def build(self):
        axes = self._axes = self.figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.set_axis_off()
        for x, y, words, ha in (
            (14, 72, "sequence", "left"),
            (134, 72, "last use", "right"),
            (172, 72, "uses", "right"),
            (186, 72, "blocks (grey: shared)", "left"),
            (690, 50, "who leaves, in this order", "right"),
            (14, 322, "blocks of each tenant; the mark is its quota", "left"),
            (420, _FLOOR + 17, "freed", "right"),
            (420, _FLOOR + 35, "recompute", "right"),
        ):
            axes.text(x, y, words, ha=ha, color=style.SOFT)
        axes.plot([436, 700], [_FLOOR] * 2, color=style.SOFT, lw=0.8)
        boxes = PolyCollection([], lw=0)
        self._boxes = self.moving(axes.add_collection(boxes, autolim=False))
        marks = LineCollection([], color=style.LIMIT, lw=2, zorder=3)
        self._marks = self.moving(axes.add_collection(marks, autolim=False))
        places = [(x, _row_y(row)) for row in range(_NUM_ROWS) for x in _COLUMNS]
        self._dots = self.moving(axes.scatter(*zip(*places, strict=True), lw=0, zorder=3))

    def draw(self, rows, outcomes, missing, tenants):
        self._colours = dict(zip(tenants, style.OWNERS, strict=False))
        self._draw_orders(rows, outcomes)
        bars, marks = self._draw_tenants(tenants)
        freed, needed = self._draw_freed(outcomes, missing)
        boxes = self._draw_rows(rows) + bars + freed
        self._boxes.set_verts([box for box, _ in boxes])
        self._boxes.set_facecolor([colour for _, colour in boxes])
        self._marks.set_segments(marks + needed)
        if self.guess:
            self.say(14, _FLOOR + 32, f"you said: {', '.join(self.guess)}", weight="bold")

    def _draw_rows(self, rows):
        most, boxes = max(row[-2] for row in rows), []
        for i, (name, tenant, last_use, uses, blocks, shared) in enumerate(rows):
            y, own, common = _row_y(i), *(200 * part / most for part in (blocks - shared, shared))
            boxes.append((_box(186, y - 7, own, 14), self._colours[tenant]))
            boxes.append((_box(186 + own, y - 7, common, 14), style.SHARED))
            self.say(14, y, name, ink=self._colours[tenant], weight="bold")
            self.say(134, y, f"{last_use:,}", anchor="rm")
            self.say(172, y, f"{uses:,}", anchor="rm")
            words = f"{blocks:,}" + (f", {shared:,} of them shared" if shared else "")
            self.say(191 + own + common, y, words)
        return boxes

    def _draw_orders(self, rows, outcomes):
        sizes, colours = [0] * 4 * _NUM_ROWS, [style.SHARED] * 4 * _NUM_ROWS
        for column, (policy, (order, *_)) in enumerate(outcomes.items()):
            self.say(_COLUMNS[column], 68, policy, weight="bold", anchor="mm")
            for row, (name, tenant, *_) in enumerate(rows):
                here = 4 * row + column
                sizes[here], leaves = 18, name in order
                if leaves:
                    sizes[here], colours[here] = 290, self._colours[tenant]
                    x, place = _COLUMNS[column], str(order.index(name) + 1)
                    self.say(x, _row_y(row), place, 9, style.PAPER, "bold", "mm")
        self._dots.set_sizes(sizes)
        self._dots.set_facecolor(colours)

    def _draw_tenants(self, tenants):
        most, bars, marks = max(max(pair) for pair in tenants.values()), [], []
        for row, (tenant, (usage, quota)) in enumerate(tenants.items()):
            y, colour = 345 + 33 * row, self._colours[tenant]
            bars.append((_box(40, y - 8, 225 * usage / most, 16), colour))
            marks.append([(40 + 225 * quota / most, y + side) for side in (-13, 13)])
            self.say(14, y, tenant, ink=colour, weight="bold")
            self.say(378, y, f"{usage:,} of {quota:,.0f}", anchor="rm")
        return bars, marks

    def _draw_freed(self, outcomes, missing):
        most, boxes = max([missing, 1, *(freed for _, freed, _ in outcomes.values())]), []
        for x, (_, freed, seconds) in zip(_COLUMNS, outcomes.values(), strict=True):
            useful, total = (_HIGHEST * part / most for part in (min(freed, missing), freed))
            # Light: freed, though nobody needed it.
            boxes.append((_box(x - 17, _FLOOR - total, 34, total - useful), style.LIGHT))
            boxes.append((_box(x - 17, _FLOOR - useful, 34, useful), style.CACHE))
            self.say(x, _FLOOR + 13, f"{freed:,}", anchor="mm")
            price = f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"
            self.say(x, _FLOOR + 31, price, weight="bold", anchor="mm")
        y = _FLOOR - _HIGHEST * missing / most
        words = f"blocks freed; {missing:,} are needed"
        self.say(690, 318, words, ink=style.LIMIT, anchor="rm")
        return boxes, [[(436, y), (700, y)]]


class WaysBack(Picture):
    """Seconds to recompute an evicted context, and to copy it back, against its length."""

    width, height = 720, 400

    def build(self):
        axes = self._axes = self.figure.add_axes((0.125, 0.14, 0.70, 0.74))
        log2_axis(axes, "x", 10, 20)
        axes.set(xlabel="context length [tokens]", ylabel="time until it is back [s]")
        ticks = ["1 ms", "10 ms", "0.1 s", "1 s", "10 s", "100 s", "1,000 s", "10,000 s"]
        log_axis(axes, "y", [10.0**k for k in range(-3, 5)], ticks)
        self._lines = []
        for colour in (style.INK, style.CACHE):
            line = self.moving(axes.plot([], [], color=colour, lw=2.4)[0])
            dot = self.moving(axes.plot([], [], "o", color=colour, ms=6, zorder=5)[0])
            tag = self.label(2**20.15, 1, axes=axes, color=colour, weight="bold", va="center")
            self._lines.append((line, dot, tag))
        self._even = self.moving(axes.axvline(1, color=style.LIMIT, lw=1.4, zorder=1))
        self._even_tag = self.label(1, 3e3, axes=axes, color=style.LIMIT, va="center")

    def draw(self, context, contexts, curves, here, break_even):
        for (line, dot, tag), (name, curve) in zip(self._lines, curves.items(), strict=True):
            line.set_data(contexts, curve)
            dot.set_data([context], [here[name]])
            tag.set(text=name)
        ends = [math.log10(min(max(curve[-1], 1.5e-3), 7e3)) for curve in curves.values()]
        for (*_, tag), y in zip(self._lines, spread(ends, gap=0.4), strict=True):
            tag.set_y(10**y)
        is_right = break_even > 2**15
        for artist in (self._even, self._even_tag):
            artist.set_visible(2**10 < break_even < 2**20)
        self._even.set_xdata([break_even] * 2)
        self._even_tag.set(x=break_even * (0.95 if is_right else 1.06))
        self._even_tag.set(ha="right" if is_right else "left", text=f"even at {break_even:,.0f}")


def _row_y(row):
    return 96 + 26 * row


def _box(x, y, width, height):
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
