"""The block pool and its block tables, drawn block by block; what a shared prefix saves."""

from itertools import pairwise

import numpy as np
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.path import Path

from kvlib.figures import style
from kvlib.figures.picture import Picture

_FREE, _EDGE = "#F6F6F6", "#D5D5D5"
_RECTANGLE = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]


class BlockPool(Picture):
    """A pool of numbered blocks, beside it the block table of every sequence.

    A block shows its owners, how full it is, and how many tables point at it. Up to four sequences
    have a colour each; of more, only the selected one. Numbers come in CSS pixels from the top.
    """

    width, height = 720, 480
    max_rows = 8  # of eight blocks each

    def build(self):
        axes = self.figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.text(16, 66, "block pool", va="center")
        axes.text(400, 66, "block tables, in token order", va="center")
        self._boxes = self.moving(axes.add_collection(PathCollection([])))
        self._rectangles = {}

    def draw(self, frame, block_size, note="", answer="", steps=("", "", ""), first_block=0):
        self._rectangles = {}
        owners = {}
        for name in sorted(frame.tables):
            for block in frame.tables[name]:
                owners.setdefault(block, []).append(name)
        colours = self._colour(frame)
        looks = {k: (colours[o[0]] if len(o) == 1 else style.SHARED) for k, o in owners.items()}
        num_blocks, num_free = len(frame.filled), len(frame.free_list)
        shown = range(first_block, min(num_blocks, first_block + 8 * self.max_rows))
        part = f"{shown[0]} to {shown[-1]} of " if len(shown) < num_blocks else ""
        self.say(356, 66, f"{part}{num_blocks:,} blocks, {num_free:,} free", anchor="rm")
        self._draw_pool(shown, owners, looks, frame, block_size)
        pitch = 82 if len(colours) <= 4 else 43
        for row, (name, colour) in enumerate(colours.items()):
            head = f"{name}   {frame.num_tokens[name]:,} tokens"
            self.say(400, 86 + pitch * row, head, ink=colour, weight="bold")
            self._draw_table(96 + pitch * row, frame.tables[name], looks, frame, block_size)
        ids = ", ".join(map(str, frame.free_list[:14])) + (", …" if num_free > 14 else "")
        self.say(16, self.height - 34, f"free list, next first: {ids or 'empty'}")
        self.say(16, 46, note, ink=style.LIMIT, weight="bold")
        if self.guess:
            self.say(704, 46, f"you said {self.guess[0]}; it is {answer}", anchor="rm")
        self.say(320, self.height - 13, steps[0], ink=style.SOFT, anchor="rm")
        self.say(360, self.height - 13, steps[1], weight="bold", anchor="mm")
        self.say(400, self.height - 13, steps[2], ink=style.SOFT)
        looks = sorted(self._rectangles)  # faces below thin edges below thick ones
        corners = [np.reshape(self._rectangles[look], (-1, 2)) for look in looks]
        paths = [Path(xy, _RECTANGLE * (len(xy) // 5)) for xy in corners]
        widths, faces, edges = zip(*looks, strict=True)
        self._boxes.set(paths=paths, facecolor=faces, edgecolor=edges, linewidth=widths)

    def _colour(self, frame):
        names, step = sorted(frame.tables), frame.step
        palette = dict(zip("ABCD", style.OWNERS, strict=True))
        if not palette.keys() >= set(names):
            chosen = step and (step.argument if step.method == "fork" else step.seq_id)
            palette = dict.fromkeys(names, style.SOFT) | {chosen: style.OWNERS[0]}
        return {name: palette[name] for name in names}

    def _draw_pool(self, shown, owners, looks, frame, block_size):
        is_roomy = 62 * -(-len(shown) // 8) <= 43 * self.max_rows
        pitch, tall = (62, 44) if is_roomy else (43, 29)
        for place, block in enumerate(shown):
            x, y = 16 + 43 * (place % 8), 92 + pitch * (place // 8)
            level, look = tall * frame.filled[block] / block_size, looks.get(block)
            self.say(x, y - 7, str(block), 7, style.SOFT)
            if look:
                self._box(x, y + tall - level, 36, level, look)
                who = "".join(owners[block])
                is_low = tall - level >= 12  # the letters fit above the fill
                ink = style.INK if len(who) > 1 else look if is_low else style.PAPER
                who = who if len(who) < 5 else f"{who[0]}…{who[-1]}"
                middle = (tall - level) / 2 if is_low else tall - level / 2
                self.say(x + 18, y + middle, who, 9 if len(who) < 4 else 7.5, ink, "bold", "mm")
            is_touched = block in frame.written
            edge = style.INK if is_touched else style.SOFT if look else _EDGE
            face = "none" if look else _FREE
            self._box(x, y, 36, tall, face, edge, 2.2 if is_touched else 1.0)
            if frame.ref_counts[block] > 1:
                self.say(
                    x + 37, y - 7, f"x{frame.ref_counts[block]}", 7, weight="bold", anchor="rm"
                )
            elif block in frame.free_list[:1]:
                self.say(x + 37, y - 7, "next", 7, style.SOFT, anchor="rm")

    def _draw_table(self, y, table, looks, frame, block_size):
        left_out = range(1, len(table) - 6) if len(table) > 8 else ()
        cells = [*table[:1], None, *table[-6:]] if left_out else table
        pitch = 76 if len(cells) <= 4 else 38
        for place, block in enumerate(cells):
            x = 400 + pitch * place
            if block is None:
                self.say(x + 17, y + 11, f"+{len(left_out):,}", 8, style.SOFT, anchor="mm")
                continue
            look, is_touched = looks[block], block in frame.written
            thin = style.SOFT if look == style.SHARED else look
            self._box(x, y, (pitch - 4) * frame.filled[block] / block_size, 22, look + "66")
            edge, line = (style.INK, 2.2) if is_touched else (thin, 1.4)
            self._box(x, y, pitch - 4, 22, "none", edge, line)
            self.say(x + (pitch - 4) / 2, y + 11, str(block), 8, anchor="mm")
            if pitch > 38:
                fill = str(frame.filled[block])
                self.say(x + pitch - 7, y + 16, fill, 6.5, style.SOFT, anchor="rm")

    def _box(self, x, y, wide, tall, face, edge="none", line=0.0):
        corners = (x, y), (x + wide, y), (x + wide, y + tall), (x, y + tall), (x, y)
        self._rectangles.setdefault((line, face, edge), []).append(corners)


class ForkSaving(BlockPool):
    """A fork in the block pool, and the blocks it saves as its branches write."""

    height, max_rows = 510, 4
    cover_at = 0.5, 0.68

    def build(self):
        super().build()
        axes = self._curve = self.figure.add_axes((0.075, 0.195, 0.42, 0.25))
        axes.set(xlim=(-0.4, 8.5), ylim=(-7.8, 7.8), yticks=(-6, -3, 0, 3, 6))
        axes.set_xlabel("branches that have written")
        axes.axhline(0, color=style.LIMIT, lw=1.2)
        self._formula = self.label(-0.4, 8.6, axes=axes, color=style.LIMIT, va="bottom")
        self._dots = self.moving(axes.plot([], [], "o", color=style.SOFT, ms=4)[0])
        self._here = self.moving(axes.plot([], [], "o", color=style.CACHE, ms=8)[0])
        self._saved = [self.label(0, 0, axes=axes, ha="center", va="bottom") for _ in range(9)]

    def draw(self, saved, formula, num_written, **pool):
        super().draw(**pool)
        beyond = [blocks - formula for blocks in saved]
        self._dots.set_data(range(len(saved)), beyond)
        self._here.set_data([num_written], [beyond[num_written]])
        self._formula.set_text(f"blocks saved, above or below the formula's {formula:,g}")
        for place, text in enumerate(self._saved):
            has_room = saved[0] < 1000 or place in (0, num_written, len(saved) - 1)
            text.set_visible(place < len(saved) and has_room)
            if place < len(saved):
                text.set(position=(place, beyond[place] + 1), text=f"{saved[place]:,}")
                text.set_weight("bold" if place == num_written else "normal")


class PromptBar(Picture):
    """A prompt cut into blocks: what a prefix cache reuses, what it computes though it was seen."""

    width, height = 720, 240

    def build(self):
        axes = self._axes = self.figure.add_axes((0.04, 0.30, 0.92, 0.34))
        axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
        axes.set_axis_off()
        self._parts = self.moving(axes.add_collection(PolyCollection([], linewidth=0)))
        self._cuts = self.moving(axes.vlines([], 0, 1, color=style.PAPER, lw=1.4))
        self._shared = self.label(0, 1.1, axes=axes, ha="center")
        self._end = self.label(1, 1.1, axes=axes, ha="right")
        places = (0.04, style.CACHE), (0.28, style.LIMIT), (0.75, style.SOFT)
        self._key = [self.label(x, 0.1, color=colour, weight="bold") for x, colour in places]

    def draw(self, reused, prefix_tokens, prompt_tokens, block_size):
        ends = [0, reused, prefix_tokens, prompt_tokens]
        spans = [(a / prompt_tokens, b / prompt_tokens) for a, b in pairwise(ends)]
        verts = [((a, 0), (b, 0), (b, 1), (a, 1)) for a, b in spans]
        self._parts.set(verts=verts, facecolor=(style.CACHE, style.LIMIT, _EDGE))
        fractions = [k / prompt_tokens for k in range(block_size, prompt_tokens, block_size)]
        is_fine = len(fractions) > 200  # thinner than a pixel: draw none
        self._cuts.set_segments([] if is_fine else [((x, 0), (x, 1)) for x in fractions])
        words = "reused", "seen, but computed again", "new"
        for text, name, (a, b) in zip(self._key, words, pairwise(ends), strict=True):
            text.set_text(f"{name}: {b - a:,} tokens")
        x = min(max(spans[1][1], 0.1), 0.78)
        self._shared.set(x=x, text=f"shared until {prefix_tokens:,}")
        self._end.set_text(f"{prompt_tokens:,}")
