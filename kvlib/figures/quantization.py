"""Pictures of rounding: where the error lies, one channel on its grid, bytes against error."""

import math

import numpy as np
from matplotlib.collections import LineCollection

from kvlib.figures import style
from kvlib.figures.picture import Picture, log_axis

_BY_CHANNEL, _BY_TOKEN = style.OWNERS[:2]


class ErrorMaps(Picture):
    """Magnitudes of two tensors, and beside them the error of each channel and of each token.

    Parameters
    ----------
    maps : dict of str to numpy.ndarray
        By name, ``(views, channels, columns)`` in multiples of the tensor's root mean square.
    num_tokens : int
        Tokens that the columns stand for.
    """

    width, height = 720, 490
    cover_at = 0.5, 0.95

    def __init__(self, maps, num_tokens):
        self._maps, self._num_tokens = maps, num_tokens
        super().__init__()

    def build(self):
        self._said = self.label(0.97, 0.012, ha="right", color=style.SOFT)
        halves = enumerate(self._maps.items())
        self._halves = [self._half(0.085 + 0.5 * i, *item) for i, item in halves]

    def _half(self, left, name, views):
        self.figure.text(left, 0.885, name, weight="bold")
        image = self.figure.add_axes((left, 0.47, 0.27, 0.33))
        self._num_channels = views.shape[1]
        image.imshow(np.concatenate(views), cmap="Blues", vmin=0, vmax=4, aspect="auto")
        ticks = range(0, self._num_channels, 20)
        rows = [view * self._num_channels + tick for view in range(len(views)) for tick in ticks]
        image.set(xticks=[], ylabel="channel")
        image.set_yticks(rows, [*ticks] * len(views))
        image.grid(visible=False)
        beside = self.figure.add_axes((left + 0.28, 0.47, 0.10, 0.33))
        beside.set(ylim=(views.shape[1] - 0.5, -0.5), yticks=[])
        below = self.figure.add_axes((left, 0.14, 0.27, 0.29))
        below.set(xlim=(0, self._num_tokens), xlabel="token", ylabel="error [%]")
        for axes, which, ticks in ((beside, "x", [1, 100]), (below, "y", [0.1, 1, 10, 100])):
            log_axis(axes, which, ticks, limits=(0.1, 200))
        beside.set_xlabel("error [%]")
        ways = []
        for row, (colour, dash) in enumerate(((_BY_CHANNEL, "-"), (_BY_TOKEN, (0, (3, 1))))):
            look = {"color": colour, "ls": dash, "lw": 1.6}
            lines = [self.moving(axes.plot([], [], **look)[0]) for axes in (beside, below)]
            ways.append((*lines, self.label(left, 0.848 - 0.034 * row, color=colour)))
        return image, ways

    def draw(self, view, errors, answer):
        """Show errors[name][way]: label, error of each channel, of each token."""
        for (image, ways), numbers in zip(self._halves, errors.values(), strict=True):
            top = view * self._num_channels - 0.5
            self.set_limits(image, y=(top + self._num_channels, top))
            for (beside, below, text), (words, by_channel, by_token) in zip(
                ways, numbers, strict=True
            ):
                beside.set_data(by_channel, np.arange(len(by_channel)))
                step = self._num_tokens / len(by_token)
                below.set_data((np.arange(len(by_token)) + 0.5) * step, by_token)
                text.set_text(words)
        self._said.set_text(f"you said {self.guess[0]}; here: {answer}" if self.guess else "")


class IntegerGrid(Picture):
    """Values of one channel, the grid they are rounded to, and how many of all share a code."""

    width, height = 720, 420
    cover_at = 0.4, 0.5

    def build(self):
        self._axes = self.figure.add_axes((0.10, 0.12, 0.57, 0.73))
        self._side = self.figure.add_axes((0.69, 0.12, 0.22, 0.73))
        self.figure.text(0.10, 0.885, "dots: real values", color=style.CACHE)
        self.figure.text(0.28, 0.885, "line: read back", color=style.LIMIT)
        self.figure.text(0.915, 0.885, "code", color=style.INK)
        self._axes.set(xlim=(0, 128), xlabel="token", ylabel="value")
        self._side.set(xlim=(0, 1), xticks=[], yticklabels=[], xlabel="how often")
        self._grids = []
        for axes in (self._axes, self._side):
            axes.grid(visible=False)
            lines = LineCollection([], colors=style.GRID, linewidths=0.9, zorder=0)
            self._grids.append(self.moving(axes.add_collection(lines, autolim=False)))
        look = {"ls": "", "marker": "o", "ms": 3, "color": style.CACHE}
        self._real = self.moving(self._axes.plot([], [], **look)[0])
        look = {"lw": 1.2, "color": style.LIMIT, "drawstyle": "steps-mid"}
        self._read = self.moving(self._axes.plot([], [], **look)[0])
        self._often = LineCollection([], colors=style.LIMIT, linewidths=3)
        self.moving(self._side.add_collection(self._often, autolim=False))
        self._extra = self.label(0.665, 0.885, ha="right", weight="bold")
        look = {"ls": "", "marker": "D", "ms": 7, "mfc": style.PAPER, "mec": style.INK, "mew": 2}
        self._one_more = self.moving(self._axes.plot([], [], **look)[0])
        across = self._side.get_yaxis_transform()
        self._codes = [
            self.label(1.03, 0, axes=self._side, transform=across, va="center") for _ in range(16)
        ]

    def draw(self, values, indices, levels, codes, extra):
        """Show values and the levels they are rounded to, `levels[indices]`; codes name these."""
        low, high = 4 * math.floor(values.min() / 4), 4 * math.ceil(values.max() / 4)
        for axes in (self._axes, self._side):
            self.set_limits(axes, y=(low, high))
        self._one_more.set_data([125], [extra])
        where = " ↑" if extra > high else " ↓" if extra < low else ""
        self._extra.set_text(f"◇ one more at {extra}{where}")
        inside = np.flatnonzero((levels >= low) & (levels <= high))
        drawn = inside if len(inside) <= 64 else []  # more would be a grey wall
        for grid, right in zip(self._grids, (128, 1), strict=True):
            grid.set_segments([[(0, levels[i]), (right, levels[i])] for i in drawn])
        self._real.set_data(np.arange(128), values[:128])
        self._read.set_data(np.arange(128), levels[indices[:128]])
        counts = np.bincount(indices, minlength=levels.size)
        often = zip(levels, counts / counts.max(), strict=True)
        self._often.set_segments([[(0, y), (n, y)] for y, n in often if n])
        named = inside if len(inside) <= len(self._codes) else []
        for row, text in enumerate(self._codes):
            text.set_visible(row < len(named))
            if row < len(named):
                text.set(y=levels[named[row]], text=f"{codes[named[row]]}")


class Tradeoff(Picture):
    """Points of named groups between two costs, the best of them joined, and one picked out.

    Parameters
    ----------
    x_label, y_label : str
        Axis labels.
    x_limits : tuple of float
        Ends of the linear x axis.
    y_ticks : sequence of float
        Ticks of the logarithmic y axis, its ends included; values beyond are drawn at its ends.
    groups : sequence of str
        Names of at most five groups.
    """

    width, height = 720, 440

    def __init__(self, x_label, y_label, x_limits, y_ticks, groups):
        self._words, self._limits, self._ticks, self._names = (
            (x_label, y_label),
            x_limits,
            y_ticks,
            groups,
        )
        super().__init__()

    def build(self):
        axes = self._axes = self.figure.add_axes((0.09, 0.12, 0.62, 0.76))
        axes.set(xlim=self._limits, xlabel=self._words[0], ylabel=self._words[1])
        log_axis(axes, "y", self._ticks)
        self._best = self.moving(
            axes.plot([], [], color=style.SOFT, lw=1, drawstyle="steps-post")[0]
        )
        self._groups = []
        for row, name in enumerate(self._names):
            colour = (*style.OWNERS, style.WEIGHTS)[row]
            look = {"marker": "osD^v"[row], "color": colour, "ls": "", "ms": 5, "mew": 0}
            self._groups.append(self.moving(axes.plot([], [], **look)[0]))
            place = {"transform": axes.transAxes, "clip_on": False}
            axes.plot([1.04], [0.93 - 0.12 * row], **look, **place)
            axes.text(1.07, 0.93 - 0.12 * row, name, color=colour, va="center", **place)
        look = {"ms": 13, "mfc": "none", "mec": style.INK, "mew": 2}
        self._here = self.moving(axes.plot([], [], "o", **look)[0])
        # Cheap and exact at once is what nothing is: that corner stays free.
        self._tag = self.label(0.03, 0.04, axes=axes, transform=axes.transAxes, weight="bold")

    def draw(self, points, chosen, tag):
        """Show points[group], an array of (x, y) rows each, and the chosen (x, y) with its tag."""
        low, high = self._ticks[0], self._ticks[-1]
        for line, rows in zip(self._groups, points, strict=True):
            line.set_data(rows[:, 0], rows[:, 1].clip(low, high))
        every = np.concatenate(points)
        every = every[np.lexsort(every.T[::-1])]
        best = every[every[:, 1] < np.append(np.inf, np.minimum.accumulate(every[:, 1])[:-1])]
        self._best.set_data(best[:, 0], best[:, 1].clip(low, high))
        self._here.set_data([chosen[0]], [min(max(chosen[1], low), high)])
        self._tag.set_text(f"○ {tag}")
