"""Pictures of the start page: why a cache exists, and what all chapters look like."""

import io
import textwrap

import numpy as np
from PIL import Image, ImageColor, ImageDraw

from kvlib.figures import style
from kvlib.figures.picture import Picture, font

_STEPS, _TOKENS = 40, 64  # rows and columns of the picture
_INKS = np.uint8([ImageColor.getrgb(ink) for ink in (style.PAPER, style.LIGHT, style.OTHER)])


class WhyCache(Picture):
    """Tokens computed at every step, without a cache and with one."""

    width, height = 720, 400

    def build(self):
        self._sides = []
        for left, words in ((0.06, "without a cache"), (0.54, "with a cache")):
            axes = self.figure.add_axes((left, 0.14, 0.43, 0.66))
            axes.set(xlim=(0, _TOKENS), ylim=(_STEPS, 0), xticks=[], yticks=[])
            axes.grid(visible=False)
            axes.set_title(words, fontsize=10, loc="left")
            axes.set_xlabel("tokens of the sequence, in order")
            cells = self.cells(axes, (0, _TOKENS, 0, _STEPS))
            total = self.label(_TOKENS * 0.98, 2.5, axes=axes, ha="right", weight="bold")
            self._sides.append((cells, total))
        self._sides[0][0].axes.set_ylabel("tokens of the answer")
        for x, words, colour in (
            (0.06, "\u25a0 computed: prefill, then steps of decode", style.OTHER),
            (0.54, "\u25a0 read: keys, values, every layer and head", style.CACHE),
        ):
            self.figure.text(x, 0.025, words, color=colour, weight="bold")

    def draw(self, prompt, answer_tokens, computed):
        step, token = np.indices((_STEPS, _TOKENS))
        is_there = (token < prompt + step) & (step < answer_tokens)
        is_new = is_there & ((step == 0) | (token == prompt + step - 1))
        for (cells, total), made, number in zip(
            self._sides, (is_there, is_new), computed, strict=True
        ):
            cells.colours = _INKS[is_there + made.astype(int)]
            total.set_text(f"{number:,} tokens computed")


def contact_sheet(pictures, columns=3, width=1440):
    """Arrange stored pictures under a heading for each chapter.

    Parameters
    ----------
    pictures : dict of str to list of bytes
        PNG files by heading; long headings take several lines.
    columns : int, optional
        Pictures beside each other.
    width : int, optional
        Extent of the sheet [pixels].

    Returns
    -------
    bytes
        The sheet, a PNG file.
    """
    wide, letters = width // columns, font("DejaVu Sans:bold", 22)
    rows, y = [], 0
    for words, files in pictures.items():
        heading = textwrap.fill(words, width // 14)
        below = 16 + 28 * (1 + heading.count("\n"))
        small = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        small = [
            image.resize((wide - 16, image.height * (wide - 16) // image.width)) for image in small
        ]
        rows.append((heading, y, y + below, small))
        y += below + -(-len(small) // columns) * (max(image.height for image in small) + 12)
    sheet = Image.new("RGB", (width, y), style.PAPER)
    draw = ImageDraw.Draw(sheet)
    for heading, y, top, small in rows:
        draw.text((8, y + 10), heading, fill=style.INK, font=letters)
        tall = max(image.height for image in small) + 12
        for k, image in enumerate(small):
            sheet.paste(image, (8 + k % columns * wide, top + k // columns * tall))
    file = io.BytesIO()
    sheet.quantize(128).save(file, "png", optimize=True)
    return file.getvalue()
