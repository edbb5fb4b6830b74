"""What all pictures share: artists built once, moved by `update`, blitted to a PNG."""

import functools
import io
import textwrap

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from matplotlib.patches import Rectangle
from PIL import Image, ImageColor, ImageDraw, ImageFont

from kvlib.figures import style

_DPI = 100
_MAX_BACKGROUNDS = 8  # for each picture: frames with other limits, at two scales
_ANCHOR = {"left": "l", "center": "m", "right": "r", "top": "a", "baseline": "s", "bottom": "d"}


class Picture:
    """A figure whose moving artists are redrawn over a kept background.

    Subclasses build their artists in `build`, register the moving ones with `moving` and `label`,
    and move them in ``draw(**numbers)``. The words, a title and a sentence, come with the numbers.
    Pillow writes the moving labels, over everything else: it takes a tenth of Agg's time for text,
    which is most of the time of a frame. A picture of many short words says them with `say`, at
    another tenth of a label's cost.

    Attributes
    ----------
    width, height : int
        Fixed extent of the picture on the page [CSS pixels].
    cover_at : tuple of float
        Where a question or a problem is written over the bare axes, as fractions of the figure.
    colours : tuple of str
        Colours that are not in `style`, such as a colour map's: at most 63.
    guess : tuple of str
        What the reader guessed before the truth was shown; pictures may draw it.
    """

    width, height = 720, 440
    cover_at = 0.5, 0.5
    colours = ()

    def __init__(self):
        self.guess = ()
        self._moving, self._labels, self._stamps = [], [], []
        self._backgrounds, self._layers = {}, {}
        with mpl.rc_context(style.STYLE):
            self.figure = Figure(figsize=(self.width / _DPI, self.height / _DPI), dpi=_DPI)
            self.canvas = FigureCanvasAgg(self.figure)
            self._title = self.label(0.02, 1 - 24 / self.height, fontsize=12, fontweight="bold")
            self.build()
            self._cover = self.figure.text(*self.cover_at, "", fontsize=12)
            self._cover.set(animated=True, path_effects=style.HALO, ha="center", va="center")
        self._moving.sort(key=lambda artist: artist.get_zorder())

    def build(self):
        """Create the artists; the subclass does."""
        raise NotImplementedError

    def draw(self, **numbers):
        """Move the artists to these numbers; the subclass does."""
        raise NotImplementedError

    def update(self, title, sentence, **numbers):
        """Show these numbers under this title.

        Parameters
        ----------
        title : str
            The one message.
        sentence : str
            What the picture shows, in words; code stands in backquotes.
        **numbers : object
            What `draw` needs.

        Returns
        -------
        str
            The sentence.
        """
        self._title.set_text(title)
        self._stamps.clear()
        self.draw(**numbers)
        return sentence

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

    def label(self, x, y, text="", *, axes=None, **look):
        """Add a moving text.

        Parameters
        ----------
        x, y : float
            Position in data coordinates of `axes`, or as fractions of the figure.
        text : str
            The first text.
        axes : matplotlib.axes.Axes, optional
            Where the coordinates count.
        **look : object
            Text properties.

        Returns
        -------
        matplotlib.text.Text
            The text.
        """
        artist = (axes or self.figure).text(x, y, text, **look)
        artist.set_animated(True)
        self._labels.append(artist)
        return artist

    def say(self, x, y, words, points=9, ink=style.INK, weight="normal", anchor="lm"):
        """Write words until the next `update`.

        Parameters
        ----------
        x, y : float
            Position from the top left corner [CSS pixels].
        words : str
            The words.
        points : float, optional
            Size of the font.
        ink : str, optional
            Colour.
        weight : {'normal', 'bold'}, optional
            Weight of the font.
        anchor : {'lm', 'mm', 'rm'}, optional
            What stands at the position: left end, middle or right end, at half height.
        """
        self._stamps.append((x, y, words, points, ink, weight, anchor))

    def stacked_bar(self, axes, colours, *, fontsize=9, **edge):
        """Add a horizontal bar of moving parts with a word in each, for `lay_out`.

        Parameters
        ----------
        axes : matplotlib.axes.Axes
            Where; the bar is as high as 0 to 1.
        colours : iterable of tuple of str
            Of each part: its face, its words.
        fontsize : float, optional
            Size of the words.
        **edge : object
            Edge properties of the parts.

        Returns
        -------
        list of tuple of matplotlib artists
            A rectangle and a text for each part.
        """
        place = {"axes": axes, "ha": "center", "va": "center", "fontsize": fontsize}
        return [
            (
                self.moving(axes.add_patch(Rectangle((0, 0), 0, 1, fc=face, **edge))),
                self.label(0, 0.5, color=ink, **place),
            )
            for face, ink in colours
        ]

    def cells(self, axes, extent):
        """Add a moving grid of coloured cells.

        Parameters
        ----------
        axes : matplotlib.axes.Axes
            Where.
        extent : tuple of float
            First and last x, first and last y: data coordinates of the grid's corners.

        Returns
        -------
        Cells
            The grid, still empty.
        """
        return self.moving(axes.add_artist(Cells(extent)))

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
            image = image.quantize(palette=_palette(self.colours), dither=Image.Dither.NONE)
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
        image = Image.new(
            "RGB", (picture.width, picture.height + 34 * len(lines) + 30), style.PAPER
        )
        image.paste(picture)
        place = {"font": font("DejaVu Sans:normal", 22), "fill": style.INK, "spacing": 10}
        ImageDraw.Draw(image).text((28, picture.height + 8), "\n".join(lines), **place)
        file = io.BytesIO()
        image.quantize(256).save(file, "png", optimize=True)
        return file.getvalue()

    def _background(self, scale):
        """Draw what keeps still: only axes whose limits have changed since the last time."""
        shown = [axes for axes in self.figure.axes if axes.get_visible()]
        for axes in shown:
            limits = axes.get_xlim(), axes.get_ylim()
            if self._layers.get((scale, axes), (None,))[0] != limits:
                for other in shown:
                    other.set_visible(other is axes)
                self.canvas.draw()
                self._layers[scale, axes] = limits, np.array(self.canvas.buffer_rgba())
        for axes in shown:
            axes.set_visible(True)
        # Ink on white that does not overlap: the darker of two pixels is the one with ink.
        return functools.reduce(np.minimum, (self._layers[scale, axes][1] for axes in shown))

    def _image(self, scale, cover=None):
        self.figure.set_dpi(_DPI * scale)
        frame = (scale, *((axes.get_xlim(), axes.get_ylim()) for axes in self.figure.axes))
        if frame not in self._backgrounds:
            while len(self._backgrounds) >= _MAX_BACKGROUNDS:
                self._backgrounds.pop(next(iter(self._backgrounds)))
            self._backgrounds[frame] = self._background(scale)
        renderer = self.canvas.get_renderer()
        np.asarray(renderer.buffer_rgba())[:] = self._backgrounds[frame]
        for artist in [] if cover else self._moving:
            artist.draw(renderer)
        extent = self.canvas.get_width_height()
        image = Image.frombytes("RGB", extent, self.canvas.buffer_rgba(), "raw", "RGBX")
        self._cover.set_text(textwrap.fill(cover or "", 60))
        labels = [self._cover] if cover else self._labels
        labels = [text for text in labels if text.get_visible() and text.get_text()]
        places = _places(labels)
        for text in labels:
            _write(image, text, places[text], _DPI * scale)
        for x, y, words, points, ink, weight, anchor in [] if cover else self._stamps:
            look = f"DejaVu Sans:{weight}", points * _DPI * scale / 72
            mask, left, top = _stamp(words, *look, anchor, "left", 0)
            image.paste(ink, (round(x * scale) + left, round(y * scale) + top), mask)
        return image


class Cells(Artist):
    """A grid of coloured cells; matplotlib's image takes ten times as long to draw.

    Parameters
    ----------
    extent : tuple of float
        First and last x, first and last y: data coordinates of the grid's corners.

    Attributes
    ----------
    extent : tuple of float
        The same; it may be changed.
    colours : numpy.ndarray of uint8
        ``(rows, columns, 3)``; the first row lies at the first y.
    """

    def __init__(self, extent):
        super().__init__()
        self.extent, self.colours = extent, np.zeros((0, 0, 3), np.uint8)

    def draw(self, renderer):
        """Fill the pixels whose centres lie in the grid and in the axes.

        Parameters
        ----------
        renderer : matplotlib.backends.backend_agg.RendererAgg
            It gives its memory.
        """
        page, box = np.asarray(renderer.buffer_rgba()).view(np.uint32)[..., 0], self.axes.bbox
        corners = self.axes.transData.transform(np.reshape(self.extent, (2, 2)).T)
        spans = []
        for (first, last), low, high, count in zip(
            corners.T, box.min, box.max, self.colours.shape[1::-1], strict=True
        ):
            pixels = np.arange(round(low), round(high))
            cells = np.ceil((pixels + 0.5 - first) * count / (last - first)).astype(int) - 1
            is_inside = (cells >= 0) & (cells < count)
            spans += pixels[is_inside], cells[is_inside]
        x, column, y, row = spans
        if x.size and y.size:
            opaque = np.insert(self.colours, 3, 255, axis=2).view(np.uint32)[..., 0]
            target = page[len(page) - 1 - y[-1] : len(page) - y[0], x[0] : x[-1] + 1]
            target[::-1] = opaque[:, column].take(row, axis=0)


@functools.cache
def _palette(colours):
    """Hold every colour by meaning with fifteen lighter shades, and a picture's own."""
    shades = [
        [round(255 + (channel - 255) * step / 16) for channel in ImageColor.getrgb(colour)]
        for colour in style.COLOURS
        for step in range(1, 17)
    ]
    shades = [shade for shade in shades if min(shade) < 244]  # white stays white
    own = [ImageColor.getrgb(colour) for colour in colours]
    palette = Image.new("P", (1, 1))
    palette.putpalette([channel for colour in ([255] * 3, *shades, *own) for channel in colour])
    return palette


@functools.cache
def font(family_and_weight, pixels):
    """Load a font once.

    Parameters
    ----------
    family_and_weight : str
        As matplotlib finds it, such as ``'DejaVu Sans:bold'``.
    pixels : float
        Height.

    Returns
    -------
    PIL.ImageFont.FreeTypeFont
        The font.
    """
    return ImageFont.truetype(findfont(family_and_weight), pixels)


@functools.lru_cache(maxsize=2048)
def _stamp(words, family_and_weight, pixels, anchor, align, stroke_width):
    """Return the mask of a text and where its corner lies from the anchor; most words recur."""
    look = {"anchor": anchor, "align": align, "stroke_width": stroke_width}
    look["font"] = font(family_and_weight, pixels)
    lines = words.split("\n")
    # To be measured, a text is laid out once more: write it into the middle of more than enough.
    half = round(1.5 * pixels) * np.array([1 + max(map(len, lines)), 1 + len(lines)])
    sheet = Image.new("L", (2 * half).tolist())
    ImageDraw.Draw(sheet).text(half.tolist(), words, fill=255, **look)
    box = sheet.getbbox() or (0, 0, 1, 1)
    return sheet.crop(box), *(box[:2] - half).tolist()


def _places(texts):
    """Return where texts stand [pixels from the bottom left]."""
    together = {}  # one call of a transform for all its texts: it costs the same as for one
    for text in texts:
        transform = text.get_transform()
        together.setdefault(id(transform), (transform, []))[1].append(text)
    places = {}
    for transform, members in together.values():
        at = transform.transform([text.get_unitless_position() for text in members])
        places.update(zip(members, at.tolist(), strict=True))
    return places


def _write(image, text, place, dpi):
    """Write a matplotlib text with Pillow at this place, in the same font and colour."""
    x, y = place
    anchor = _ANCHOR[text.get_ha()] + _ANCHOR[text.get_va()]
    font = f"{text.get_fontfamily()[0]}:{text.get_fontweight()}", text.get_fontsize() * dpi / 72
    inks = [(to_hex(text.get_color()), 0)]
    if text.get_path_effects():  # a halo
        inks.insert(0, (style.PAPER, 2 * dpi // _DPI))
    for ink, stroke_width in inks:
        mask, left, top = _stamp(text.get_text(), *font, anchor, text.get_ha(), stroke_width)
        image.paste(ink, (round(x) + left, image.height - round(y) + top), mask)


def log_axis(axes, which, ticks, labels=None, *, limits=None):
    """Make an axis logarithmic with these ticks and no others.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        The axes.
    which : {'x', 'y'}
        Which of its axes.
    ticks : sequence of float
        Where ticks stand.
    labels : sequence of str, optional
        What they say; by default their numbers.
    limits : tuple of float, optional
        Ends of the axis; by default the outer ticks.
    """
    axes.set(**{f"{which}scale": "log", f"{which}lim": limits or (ticks[0], ticks[-1])})
    getattr(axes, f"set_{which}ticks")(ticks, labels or [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


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
    labels = [short_power(tick / unit) for tick in ticks]
    log_axis(axes, which, ticks, labels, limits=(2.0**low, 2.0**high))


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


def lay_out(parts, widths):
    """Place the parts of a stacked bar side by side, each word in the middle of its own.

    Parameters
    ----------
    parts : sequence of tuple of matplotlib artists
        What `Picture.stacked_bar` returned.
    widths : iterable of float
        Extent of each part.
    """
    left = 0
    for (patch, text), width in zip(parts, widths, strict=True):
        patch.set(x=left, width=width)
        text.set_x(left + width / 2)
        left += width


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
