"""The pictures of the chapters: artists built once, moved by `update`, blitted to a PNG."""

import functools
import io
import math
import textwrap

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from PIL import Image, ImageDraw, ImageFont

from kvlib.units import GiB, KiB, format_bytes

# Colour means the quantity, in every chapter.
WEIGHTS, CACHE, OTHER, LIMIT = "#7F7F7F", "#0072B2", "#E69F00", "#D55E00"
INK, SOFT, GRID, PAPER = "#222222", "#6E6E6E", "#E6E6E6", "#FFFFFF"
# Sequences, tenants and policies: always with a letter, shared blocks neutral.
OWNERS, SHARED = ("#7B4EA3", "#009E73", "#CC5A8A", "#8C6D1F"), "#CFCFCF"

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
    "figure.facecolor": PAPER,
}

_DPI = 100
_MAX_BACKGROUNDS = 8  # for each picture: frames with other limits, at two scales
_HALO = [withStroke(linewidth=3, foreground=PAPER)]  # keeps a label readable on a line
_ANCHOR = {"left": "l", "center": "m", "right": "r", "top": "a", "baseline": "s", "bottom": "d"}


class Picture:
    """A figure whose moving artists are redrawn over a kept background.

    Subclasses build their artists in `build`, register the moving ones with `moving` and `label`,
    and move them in ``update(**numbers)``, which returns the sentence that says the same in words.
    Pillow writes the moving labels, over everything else: it takes a tenth of Agg's time for text,
    which is most of the time of a frame.

    Attributes
    ----------
    width, height : int
        Fixed extent of the picture on the page [CSS pixels].
    cover_at : tuple of float
        Where a question or a problem is written over the bare axes, as fractions of the figure.
    guess : tuple of str
        What the reader guessed before the truth was shown; pictures may draw it.
    """

    width, height = 720, 440
    cover_at = 0.5, 0.5

    def __init__(self):
        self.guess = ()
        self._moving, self._labels, self._backgrounds = [], [], {}
        with mpl.rc_context(STYLE):
            self.figure = Figure(figsize=(self.width / _DPI, self.height / _DPI), dpi=_DPI)
            self.canvas = FigureCanvasAgg(self.figure)
            self.build()
            self._cover = self.figure.text(*self.cover_at, "", fontsize=12)
            self._cover.set(animated=True, path_effects=_HALO, ha="center", va="center")
        self._moving.sort(key=lambda artist: artist.get_zorder())

    def build(self):
        """Create the artists; the subclass does."""
        raise NotImplementedError

    def update(self, **numbers):
        """Move the artists to these numbers; the subclass does.

        Parameters
        ----------
        **numbers : object
            What the panel's `compute` returned.

        Returns
        -------
        str
            The sentence; code stands in backquotes.
        """
        raise NotImplementedError

    def moving(self, artist):
        """Register an artist that `update` moves.

        Parameters
        ----------
        artist : matplotlib.artist.Artist
            The artist; it is left out of the kept background.

        Returns
        -------
        matplotlib.artist.Artist
            The same artist.
        """
        artist.set_animated(True)
        self._moving.append(artist)
        return artist

    def label(self, x, y, text="", *, axes=None, **style):
        """Add a moving text.

        Parameters
        ----------
        x, y : float
            Position in data coordinates of `axes`, or as fractions of the figure.
        text : str
            The first text.
        axes : matplotlib.axes.Axes, optional
            Where the coordinates count.
        **style : object
            Text properties.

        Returns
        -------
        matplotlib.text.Text
            The text.
        """
        artist = (axes or self.figure).text(x, y, text, **style)
        artist.set_animated(True)
        self._labels.append(artist)
        return artist

    def set_limits(self, axes, *, x=None, y=None):
        """Change axis limits; only limits not seen lately cost a full redraw.

        Parameters
        ----------
        axes : matplotlib.axes.Axes
            The axes.
        x, y : tuple of float, optional
            New limits.
        """
        for limits, get, put in (
            (x, axes.get_xlim, axes.set_xlim),
            (y, axes.get_ylim, axes.set_ylim),
        ):
            if limits is not None and tuple(limits) != tuple(get()):
                put(limits)

    def png(self, scale=1, cover=None):
        """Draw the present state.

        Parameters
        ----------
        scale : int
            Pixels per CSS pixel: 1 while dragging, 2 when idle.
        cover : str, optional
            Leave the moving artists out and show this text over the bare axes instead.

        Returns
        -------
        bytes
            The PNG file.
        """
        file = io.BytesIO()
        image = self._image(scale, cover)
        if scale == 1:  # while dragging, half the time for colours that differ on edges only
            image = image.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        image.save(file, "png", compress_level=1)
        return file.getvalue()

    def captioned_png(self, caption):
        """Draw the present state for a file that is read without a kernel.

        Parameters
        ----------
        caption : str
            The sentence; it is written under the picture.

        Returns
        -------
        bytes
            The PNG file, two pixels per CSS pixel, 256 colours, compressed well.
        """
        lines = textwrap.wrap(caption, 112)
        picture = self._image(scale=2)
        image = Image.new("RGB", (picture.width, picture.height + 34 * len(lines) + 30), PAPER)
        image.paste(picture)
        place = {"font": _font("DejaVu Sans:normal", 22), "fill": INK, "spacing": 10}
        ImageDraw.Draw(image).text((28, picture.height + 8), "\n".join(lines), **place)
        file = io.BytesIO()
        image.quantize(256).save(file, "png", optimize=True)
        return file.getvalue()

    def _image(self, scale, cover=None):
        self.figure.set_dpi(_DPI * scale)
        frame = (scale, *((axes.get_xlim(), axes.get_ylim()) for axes in self.figure.axes))
        if frame not in self._backgrounds:
            self.canvas.draw()
            while len(self._backgrounds) >= _MAX_BACKGROUNDS:
                self._backgrounds.pop(next(iter(self._backgrounds)))
            self._backgrounds[frame] = self.canvas.copy_from_bbox(self.figure.bbox)
        self.canvas.restore_region(self._backgrounds[frame])
        for artist in [] if cover else self._moving:
            (artist.axes or self.figure).draw_artist(artist)
        extent = self.canvas.get_width_height()
        image = Image.frombuffer("RGBA", extent, self.canvas.buffer_rgba()).convert("RGB")
        self._cover.set_text(textwrap.fill(cover or "", 60))
        for text in [self._cover] if cover else self._labels:
            if text.get_visible() and text.get_text():
                _write(image, text, _DPI * scale)
        return image


@functools.cache
def _font(family_and_weight, pixels):
    return ImageFont.truetype(findfont(family_and_weight), pixels)


@functools.lru_cache(maxsize=2048)
def _stamp(words, family_and_weight, pixels, anchor, align, stroke_width):
    """Return the mask of a text and where its corner lies from the anchor; most words recur."""
    style = {"anchor": anchor, "align": align, "stroke_width": stroke_width}
    style["font"] = _font(family_and_weight, pixels)
    measure = ImageDraw.Draw(Image.new("L", (1, 1)))
    left, top, right, bottom = map(int, measure.textbbox((0, 0), words, **style))
    mask = Image.new("L", (right - left + 2, bottom - top + 2))
    ImageDraw.Draw(mask).text((1 - left, 1 - top), words, fill=255, **style)
    return mask, left - 1, top - 1


def _write(image, text, dpi):
    """Write a matplotlib text with Pillow, at the same place, in the same font and colour."""
    x, y = text.get_transform().transform(text.get_unitless_position())
    anchor = _ANCHOR[text.get_ha()] + _ANCHOR[text.get_va()]
    font = f"{text.get_fontfamily()[0]}:{text.get_fontweight()}", text.get_fontsize() * dpi / 72
    inks = [(to_hex(text.get_color()), 0)]
    if text.get_path_effects():  # a halo
        inks.insert(0, (PAPER, 2 * dpi // _DPI))
    for ink, stroke_width in inks:
        mask, left, top = _stamp(text.get_text(), *font, anchor, text.get_ha(), stroke_width)
        image.paste(ink, (round(x) + left, image.height - round(y) + top), mask)


def log2_axis(axes, which, low, high, *, unit=1, step=1):
    """Make an axis logarithmic to base 2 with ticks such as 1K, 8K or 1/8.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        The axes.
    which : {'x', 'y'}
        Which of its axes.
    low, high : int
        Exponents of the first and the last tick.
    unit : int
        Divides the tick labels, such as `kvlib.units.GiB`.
    step : int
        Exponents between ticks.
    """
    ticks = [2.0**k for k in range(low, high + 1, step)]
    axes.set(**{f"{which}scale": "log", f"{which}lim": (2.0**low, 2.0**high)})
    getattr(axes, f"set_{which}ticks")(ticks, [short_power(tick / unit) for tick in ticks])
    axes.minorticks_off()


def short_power(value):
    """Write a power of two for a tick [text].

    Parameters
    ----------
    value : float
        A power of two.

    Returns
    -------
    str
        ``'8K'`` for 8,192, ``'2M'`` for 2,097,152, ``'1/8'`` for 0.125.

    Examples
    --------
    >>> short_power(8192), short_power(2**21), short_power(0.125), short_power(512)
    ('8K', '2M', '1/8', '512')
    """
    if value < 1:
        return f"1/{round(1 / value)}"
    for factor, letter in ((2**20, "M"), (2**10, "K")):
        if value >= factor:
            return f"{value / factor:g}{letter}"
    return f"{value:g}"


class FactorTiles(Picture):
    """Five factors multiply into bytes per token; bars set the product beside known models."""

    width, height = 720, 430
    cover_at = 0.6, 0.33

    def build(self):
        tiles = self.figure.add_axes((0.02, 0.60, 0.96, 0.28))
        tiles.set_axis_off()
        tiles.set(xlim=(0, 104), ylim=(0, 10))
        self._title = self.label(0.02, 0.945, fontsize=12, fontweight="bold")
        captions = ("key and value", "layers", "KV heads", "head_dim", "bits per value")
        self._factors = [self._tile(tiles, 16 * i, text) for i, text in enumerate(captions)]
        for i in range(1, 5):
            tiles.text(16 * i - 1.5, 6.4, "×", ha="center", va="center", fontsize=13)
        tiles.text(82, 6.4, "÷ 8 =", ha="center", va="center", fontsize=12)
        self._product = self.label(95.5, 6.5, axes=tiles, ha="center", va="center", fontsize=15)
        self._product.set(color=CACHE, weight="bold")
        tiles.text(95.5, 1.2, "bytes per token", ha="center", color=CACHE)
        self._axes = self.figure.add_axes((0.30, 0.11, 0.60, 0.43))
        self._axes.set_xlabel("KV cache of one token [KiB]")
        self._axes.set(ylim=(3.6, -0.6), yticks=[])
        self._axes.grid(axis="y", visible=False)
        self._axes.spines["left"].set_visible(False)
        beside = self._axes.get_yaxis_transform()
        self._bars, self._names, self._ends = [], [], []
        for row in range(4):
            colour = CACHE if row == 0 else "#9CC9E3"
            bar = Rectangle((0, row - 0.32), 1, 0.64, fc=colour, lw=0)
            self._bars.append(self.moving(self._axes.add_patch(bar)))
            place = {"axes": self._axes, "va": "center"}
            self._names.append(self.label(-0.02, row, ha="right", transform=beside, **place))
            self._ends.append(self.label(0, row, **place))

    def _tile(self, axes, x, caption):
        axes.add_patch(Rectangle((x, 3.4), 13, 6.2, fc="#E5F1F8", ec=CACHE, lw=1.2))
        axes.text(x + 6.5, 1.2, caption, ha="center", color=SOFT)
        style = {"ha": "center", "va": "center", "fontsize": 16, "color": CACHE}
        return self.label(x + 6.5, 6.5, axes=axes, **style)

    def update(self, factors, bytes_per_token, others, call):
        for text, factor in zip(self._factors, factors, strict=True):
            text.set_text(f"{factor:g}")
        self._product.set_text(f"{bytes_per_token:,}")
        self._title.set_text(
            f"One token costs {format_bytes(bytes_per_token)}; no tile is the parameter count"
        )
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
        product = " × ".join(f"{factor:g}" for factor in factors)
        return (
            f"{product} bits ÷ 8 = {bytes_per_token:,} bytes, {format_bytes(bytes_per_token)} for "
            f"each token of context, whatever the number of parameters. `{call}`"
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
        self._title = self.label(0.02, 0.95, fontsize=12, fontweight="bold")
        axes = self._axes = self.figure.add_axes((0.09, 0.36, 0.72, 0.55))
        log2_axis(axes, "x", 10, 20)
        axes.set_xlabel("context length [tokens per sequence]")
        axes.set_ylabel("KV cache of all sequences [GiB]")
        self._top = None
        self._lines = []
        for row in range(4):
            style = {"color": SOFT, "lw": 1.1} if row else {"color": CACHE, "lw": 2.8}
            line = self.moving(axes.plot([], [], **style)[0])
            tag = self.label(2**20.2, 0, axes=axes, color=style["color"], va="center")
            tag.set_weight("normal" if row else "bold")
            self._lines.append((line, tag))
        self._limit = self.moving(axes.axhline(1, color=LIMIT, lw=1.4))
        self._limit_tag = self.label(2**10.08, 1, axes=axes, color=LIMIT, va="bottom")
        self._here = self.moving(axes.plot([], [], "o", color=INK, ms=5, zorder=5)[0])
        self._cross = self.moving(axes.plot([], [], "o", color=CACHE, ms=8, zorder=6)[0])
        self._cross_tag = self.label(0, 0, axes=axes, color=CACHE, weight="bold", va="top")
        self._cross_tag.set_path_effects(_HALO)
        bar = self._bar = self.figure.add_axes((0.09, 0.12, 0.72, 0.10))
        bar.set(ylim=(0, 1), yticks=[])
        bar.grid(visible=False)
        bar.spines["left"].set_visible(False)
        self._end = self.moving(bar.axvline(1, color=LIMIT, lw=2))
        self._caption = self.label(0.09, 0.015, color=SOFT)
        self._parts = []
        for colour, ink in ((WEIGHTS, PAPER), (OTHER, INK), (CACHE, PAPER), (PAPER, INK)):
            patch = bar.add_patch(Rectangle((0, 0), 0, 1, fc=colour, ec=SOFT, lw=0.8))
            text = self.label(0, 0.5, axes=bar, ha="center", va="center", color=ink, fontsize=8)
            self._parts.append((self.moving(patch), text))

    def update(
        self,
        name,
        gpu,
        parts,
        context,
        num_sequences,
        cache_bytes,
        contexts,
        curves,
        longest,
        num_fitting,
        call,
    ):
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
        gpu_text, weights_text, reserve_text = map(format_bytes, parts)
        many = f"{num_sequences:,} sequence{'s' if num_sequences > 1 else ''}"
        start = (
            f"{name} on one {gpu}: {gpu_text} minus {weights_text} of weights and "
            f"{reserve_text} of reserve"
        )
        if budget <= 0:
            need = math.ceil((parts[1] + 1) / (parts[0] - parts[2]))
            self._title.set_text(f"No cache fits: the weights alone fill {need} such GPUs")
            return f"{start} leaves nothing for the cache of {many} of {context:,} tokens."
        title = f"{many} fill this GPU at {longest:,} tokens each" if longest else "None fits"
        self._title.set_text(title)
        short = cache_bytes - budget
        verdict = "which fits" if short <= 0 else f"{format_bytes(short)} too much"
        return (
            f"{start} leaves {format_bytes(budget)}. A cache for {many} of {context:,} tokens "
            f"takes {format_bytes(cache_bytes)}, {verdict}; {num_fitting:,} of this length fit, or "
            f"{many} of {longest:,} tokens each. `{call}`"
        )

    def _scale_to(self, most):
        """Move the axis in steps of eight, so that a drag rarely redraws it."""
        top = 3 * math.ceil(math.log2(most * 1.3) / 3)
        if top != self._top:
            self._top = top
            with mpl.rc_context(STYLE):
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
        span = gpu_bytes if taken <= gpu_bytes else 2 ** math.ceil(math.log2(taken))
        self.set_limits(self._bar, x=(0, span / GiB))
        self._end.set_xdata([gpu_bytes / GiB] * 2)
        parts = {"weights": weight_bytes, "reserve": reserve_bytes, "cache": cache_bytes}
        parts["free"] = max(0, gpu_bytes - taken)
        left = 0
        for (patch, text), (name, part) in zip(self._parts, parts.items(), strict=True):
            patch.set(x=left / GiB, width=part / GiB)
            text.set(x=(left + part / 2) / GiB, text=f"{name}\n{part / GiB:,.1f}")
            text.set_visible(part > 0.06 * span)
            left += part
        self._caption.set_text(f"one {gpu} as programs see it: {format_bytes(gpu_bytes)}")


class ModelCurves(Picture):
    """One curve a model, and what each kind of layer of the selected one holds."""

    width, height = 720, 440

    def build(self):
        self._title = self.label(0.02, 0.945, fontsize=12, fontweight="bold")
        axes = self._axes = self.figure.add_axes((0.10, 0.13, 0.35, 0.75))
        log2_axis(axes, "x", 10, 20, step=2)
        log2_axis(axes, "y", -8, 8, step=2)
        axes.set_xlabel("context length [tokens]")
        axes.set_ylabel("one sequence, one rank [GiB]")
        self._lines = []
        for _ in range(6):
            line = self.moving(axes.plot([], [], color=SOFT, lw=1.1)[0])
            self._lines.append((line, self.label(2**20.25, 1, axes=axes, va="center")))
        self._here = self.moving(axes.plot([], [], "o", color=INK, ms=6, zorder=5)[0])
        groups = self._groups = self.figure.add_axes((0.63, 0.13, 0.35, 0.75))
        groups.set(ylim=(3, 0), xlim=(0, 1.02), yticks=[])
        groups.set_xticks([0, 0.5, 1], ["0", "50", "100"])
        groups.set_xlabel("share of the longest bar [%]")
        groups.grid(axis="y", visible=False)
        self._rows = []
        for row in range(3):
            patch = Rectangle((0, row + 0.40), 0, 0.40, fc=CACHE, ec=SOFT, lw=0.8)
            text = self.label(0.01, row + 0.34, axes=groups, va="bottom")
            text.set(transform=groups.get_yaxis_transform(), path_effects=_HALO)
            self._rows.append((self.moving(groups.add_patch(patch)), text))

    def update(self, selected, contexts, curves, context, rows, note, call):
        heights = spread([math.log2(curve[-1] / GiB) for curve in curves.values()], gap=0.62)
        for (line, tag), (name, curve), y in zip(self._lines, curves.items(), heights, strict=True):
            chosen = name == selected
            colour = CACHE if chosen else SOFT
            line.set_data(contexts, curve / GiB)
            line.set(color=colour, lw=2.8 if chosen else 1.1, zorder=4 if chosen else 2)
            tag.set(y=2.0**y, text=name, color=colour, weight="bold" if chosen else "normal")
        stored = [row for row in rows if not row[0].startswith("if")]
        total = sum(num_bytes for _, num_bytes in stored)
        instead = f", not {format_bytes(rows[-1][1])}" if stored != rows else ""
        self._here.set_data([context], [total / GiB])
        most = max(num_bytes for _, num_bytes in rows)
        for (patch, text), row in zip(self._rows, [*rows, None, None][:3], strict=True):
            patch.set_visible(row is not None)
            text.set_visible(row is not None)
            if row is not None:
                patch.set(width=row[1] / most, fc=PAPER if row[0].startswith("if") else CACHE)
                text.set_text(f"{row[0]}: {format_bytes(row[1])}")
        self._title.set_text(f"{selected}: {format_bytes(total)} at {context:,} tokens{instead}")
        parts = " + ".join(f"{format_bytes(num_bytes)} in {text}" for text, num_bytes in stored)
        return f"{selected} at {context:,} tokens holds {parts} = {total:,} bytes{note}. `{call}`"


def spread(values, gap):
    """Push values apart until neighbours differ by at least `gap`, keeping their order and mean.

    Parameters
    ----------
    values : sequence of float
        Wanted positions.
    gap : float
        Smallest distance.

    Returns
    -------
    list of float
        New positions.

    Examples
    --------
    >>> spread([9.0, 1.0, 1.0], gap=1.0)
    [9.0, 0.5, 1.5]
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    clusters = []  # of [sum of wanted positions, members]; a cluster sits gap by gap at its mean
    for k in order:
        clusters.append([values[k], [k]])
        while len(clusters) > 1 and _edge(clusters[-2], gap, 1) + gap > _edge(
            clusters[-1], gap, -1
        ):
            total, members = clusters.pop()
            clusters[-1] = [clusters[-1][0] + total, clusters[-1][1] + members]
    placed = list(values)
    for cluster in clusters:
        low = _edge(cluster, gap, -1)
        for step, k in enumerate(cluster[1]):
            placed[k] = low + step * gap
    return placed


def _edge(cluster, gap, side):
    total, members = cluster
    return total / len(members) + side * gap * (len(members) - 1) / 2
