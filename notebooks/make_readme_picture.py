"""Draw notebooks/panel.gif: a panel of chapter 1 while somebody drags its context length.

python notebooks/make_readme_picture.py
"""

import io
import re
import textwrap

from build import HERE, run_here
from PIL import Image, ImageDraw

from kvlib.figures import style
from kvlib.figures.picture import font


def frame(shown):
    """Draw slider, picture and sentence of a panel as one image."""
    picture = Image.open(io.BytesIO(shown.picture.png(1))).convert("RGB")
    image = Image.new("RGB", (picture.width, picture.height + 110), style.PAPER)
    image.paste(picture, (0, 40))
    draw, slider = ImageDraw.Draw(image), shown.controls["context"]
    share = slider._nearest(slider.value) / (slider.steps.size - 1)
    draw.text((18, 12), "context [tokens]", fill=style.INK, font=font("DejaVu Sans:normal", 13))
    draw.line([(150, 21), (590, 21)], fill=style.SHARED, width=4)
    x = 150 + 440 * share
    draw.ellipse([x - 8, 13, x + 8, 29], fill=style.PAPER, outline=style.SOFT, width=2)
    draw.text((610, 12), f"{slider.value:,}", fill=style.INK, font=font("DejaVu Sans:normal", 13))
    words = textwrap.fill(re.sub(r" `.*`", "", shown.sentence), 100)
    place = {"font": font("DejaVu Sans:normal", 12), "fill": style.INK, "spacing": 6}
    draw.multiline_text((18, picture.height + 46), words, **place)
    return image


def main():
    """Drag there and back, and write the frames."""
    _, panels = run_here("01_bytes_per_token")
    shown = panels[1]  # the one that fills a GPU
    slider = shown.controls["context"]
    steps = [value for value in slider.steps.tolist() if 4096 <= value <= 524_288]
    frames = []
    for value in [*steps, *steps[-2:0:-1]]:
        shown.set(context=value)
        frames.append(frame(shown).quantize(48, dither=Image.Dither.NONE))
    target = HERE / "panel.gif"
    frames[0].save(target, save_all=True, append_images=frames[1:], duration=120, loop=0)
    print(f"{target}: {len(frames)} frames, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
