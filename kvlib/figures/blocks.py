"""Pictures of blocks: what requests reserve and use, one sequence's tail, small curves."""

import numpy as np
from matplotlib.collections import PolyCollection

from kvlib.figures import style
from kvlib.figures.picture import Picture, log2_axis


class RequestRows(Picture):
    """Requests as rows of slots: what each holds and its last block adds, of a reservation."""

    width, height = 720, 400

    def build(self):
        axes = self.figure.add_axes((0.09, 0.12, 0.88, 0.78))
        axes.set(xlim=(0, 103), ylim=(100, 0), ylabel="requests, shortest first [%]")
        axes.set_xlabel("share of one reservation [%]")
        axes.grid(visible=False)
        axes.axvspan(0, 100, color="#F0F0F0", lw=0)
        self._tails, self._held = (_boxes(self, axes, c) for c in (style.OTHER, style.CACHE))
        self._marks = [
            (self.moving(axes.axvline(0, 0, top, color=ink, ls=ls)), self.label(0, y, axes=axes))
            for top, ink, ls, y in ((1, style.INK, "-", 6), (0.55, style.LIMIT, "--", 62))
        ]
        self._notes = [
            self.label(38, y, axes=axes, fontsize=size) for y, size in ((22, 13), (36, 11))
        ]

    def draw(self, lengths, slots, reserved, mean, notes):
        edges = np.linspace(0, 100, len(lengths) + 1)
        for boxes, ends in ((self._tails, slots), (self._held, lengths)):
            boxes.set_verts(_corners(0, 100 * ends / reserved, edges[:-1] + 0.3, edges[1:] - 0.3))
        for text, words in zip(self._notes, notes, strict=True):
            text.set_text(words)
        said = self.guess[0] if self.guess else ""
        shares = 100 * mean / reserved, 100 - float(said.strip(" %") or 200)  # no guess: no line
        words = f"on average {shares[0]:.1f} % is used", f"you said {said} empty" if said else ""
        for (line, tag), x, text in zip(self._marks, shares, words, strict=True):
            line.set_xdata([x, x])
            tag.set(x=x + 1 if x < 80 else x - 1, ha="left" if x < 80 else "right", text=text)


class SequenceBlocks(Picture):
    """One sequence cut into blocks, over the stairs of slots that it climbs as it grows."""

    width, height = 720, 420

    def build(self):
        strip = self.figure.add_axes((0.09, 0.73, 0.88, 0.11))
        strip.set(xlim=(0, 160), ylim=(0, 1))
        strip.set_axis_off()
        self._fill = _boxes(self, strip, (style.CACHE, style.OTHER))
        self._cuts = _boxes(self, strip, "none")
        self._cuts.set(edgecolor=style.PAPER, linewidth=1)
        axes = self.figure.add_axes((0.09, 0.12, 0.88, 0.56))
        axes.set(xlim=(0, 160), ylim=(0, 160), xticks=range(0, 161, 32), yticks=range(0, 161, 32))
        axes.set(xlabel="tokens of the sequence", ylabel="slots of its blocks")
        self._stairs = _boxes(self, axes, style.OTHER)
        axes.plot([0, 160], [0, 160], color=style.CACHE, lw=2, zorder=4)
        axes.text(156, 132, "tokens held", color=style.CACHE, ha="right", va="top")
        self._mean, self._guess, self._waste = (
            self.moving(axes.plot([], [], ls, color=colour, ms=3.5, zorder=5)[0])
            for ls, colour in ((":", style.INK), ("--", style.LIMIT), ("o-", style.INK))
        )
        self._words = [
            self.label(x, y, axes=strip, weight="bold") for x, y in ((0, 1.25), (0, 0.35))
        ]
        self._words += [self.label(3, y, axes=axes) for y in (145, 129)]

    def draw(self, num_tokens, block_size, num_blocks, words):
        ends = block_size * np.arange(1, num_blocks + 1)
        self._fill.set_verts(_corners([0, num_tokens], [num_tokens, ends[-1]], 0, 1))
        self._cuts.set_verts(_corners(ends - block_size, ends, 0, 1))
        tops = block_size * np.arange(1, 160 // block_size + 1)
        feet = tops - block_size
        self._stairs.set_verts(np.stack([[feet, feet, tops], [feet, tops, tops]]).T)
        self._waste.set_data([num_tokens] * 2, [num_tokens, ends[-1]])
        said = float(self.guess[0].split()[0]) if self.guess else -160  # below the axis
        for line, above in ((self._mean, (block_size - 1) / 2), (self._guess, said)):
            line.set_data([0, 160], [above, 160 + above])
        self._words[1].set_x(ends[-1] + 1.5)
        said = f"dashed: you said {self.guess[0]}" if self.guess else ""
        for label, text in zip(self._words, (*words, said), strict=True):
            label.set_text(text)


class SmallCurves(Picture):
    """Four small plots: a curve of points, a dashed one beside it, and the present point.

    Parameters
    ----------
    *panes : tuple
        Of each plot, in reading order: label, first and last exponent of two of its horizontal
        axis, the same of its vertical one ("%" instead of exponents), what the dashed line is.
    """

    width, height = 720, 480

    def __init__(self, *panes):
        self._panes = panes
        super().__init__()

    def build(self):
        self._artists = []
        for k, (x_label, x_ends, y_label, y_ends, dashed) in enumerate(self._panes):
            axes = self.figure.add_axes((0.09 + 0.5 * (k % 2), 0.57 - 0.46 * (k // 2), 0.38, 0.27))
            log2_axis(axes, "x", *x_ends, step=2)
            axes.set(xlabel=x_label, ylabel=y_label)
            if y_ends == "%":
                axes.set(ylim=(0, 100), yticks=range(0, 101, 25))
            else:
                log2_axis(axes, "y", *y_ends, step=4)
            place = {"transform": axes.transAxes}
            axes.text(1, 1.02, f"- - {dashed}", ha="right", fontsize=8, **place)
            words = self.label(0, 1.13, axes=axes, weight="bold", **place)
            looks = (style.CACHE, ".", 4), (style.INK, "--", 1), (style.INK, "o", 6)
            lines = [
                axes.plot([], [], ls, color=c, ms=ms, lw=1, zorder=3)[0] for c, ls, ms in looks
            ]
            self._artists.append((words, *map(self.moving, lines)))

    def draw(self, panes):
        for artists, pane in zip(self._artists, panes, strict=True):
            artists[0].set_text(pane[0])
            for line, points in zip(artists[1:], pane[1:], strict=True):
                line.set_data(*points)


def _boxes(picture, axes, colour):
    return picture.moving(axes.add_collection(PolyCollection([], facecolors=colour, lw=0)))


def _corners(left, right, top, bottom):
    left, right, top, bottom = np.broadcast_arrays(left, right, top, bottom)
    return np.stack([[left, right, right, left], [top, top, bottom, bottom]]).T
