"""The one control panel of all chapters: controls, a sentence, a picture that follows the drag."""

import asyncio
import base64
import html
import math
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import ipywidgets as widgets
import numpy as np
import traitlets

from kvlib.models import ModelShape, load_models

# A drag is over when nothing moved for this long: then sharpen the picture, announce the sentence.
_IDLE_SECONDS = 0.25
# The browser first paints the picture; words and boxes that arrive meanwhile would hold it up.
_PAINT_SECONDS = 0.06
# JupyterLab answers widgets from more than one thread of the kernel; matplotlib bears only one.
_ONE_AT_A_TIME = threading.RLock()
_READABLE = "line-height:1.45;overflow-wrap:anywhere"  # long calls break anywhere
_LETTER, _CODE_LETTER = 6.6, 8.0  # widths in the page [pixels], rather more than less
_FITTING = "display:block;max-width:100%;height:auto"
_HIDDEN = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)"


class _Control(widgets.Box):
    """What a panel needs of a control: one `value`, a reset value, an off switch."""

    value = traitlets.Any()

    def __init__(self, value, parts):
        self.start = value
        super().__init__(parts, layout={"flex": "1 1 330px", "align_items": "center"})
        self.value = value

    @property
    def disabled(self):
        return self.children[0].disabled

    @disabled.setter
    def disabled(self, off):
        for part in self.children:
            part.disabled = off


class _Thumb(widgets.IntSlider):
    """A slider that hears its own value back only once the picture is on its way."""

    value = traitlets.CInt().tag(sync=True, echo_update=False)

    def set_state(self, sync_data):
        super().set_state(sync_data)  # everything that follows the thumb happens in here
        # A drag that overtook Reset ends where the reader left it: the browser takes no echo but
        # that of the last value it sent.
        echo = {"method": "echo_update", "state": {"value": self.value}, "buffer_paths": []}
        self.comm.send(data=echo)


class Slider(_Control):
    """A thumb that moves through steps, and a number box that takes any number in range.

    Parameters
    ----------
    label : str
        Words, not letters; it names the number box.
    value : int or float
        First value, also the one that Reset returns to.
    steps : sequence of int or float
        Values the thumb visits, ascending; the ends bound the box.
    only_steps : bool
        There is nothing between the steps: the box goes on to the next one.

    Raises
    ------
    ValueError
        If the steps do not ascend or `value` lies outside them.
    """

    def __init__(self, label, value, steps, *, only_steps=False):
        self.steps, self._only_steps = np.asarray(list(steps)), only_steps
        if self.steps.size < 2 or (np.diff(self.steps) <= 0).any():
            raise ValueError(f"steps={steps!r:.60}; they must ascend. Give at least two.")
        low, high = self.steps[[0, -1]].tolist()
        if not low <= value <= high:
            raise ValueError(f"value={value}; it must lie from {low} to {high}. Widen the steps.")
        is_whole = np.issubdtype(self.steps.dtype, np.integer)
        box = widgets.BoundedIntText if is_whole else widgets.BoundedFloatText
        self.box = box(
            value, min=low, max=high, step=1 if is_whole else 0.01, description=label,
            style={"description_width": "110px"}, layout={"width": "215px"},
        )  # fmt: skip
        self.thumb = _Thumb(
            self._nearest(value), min=0, max=self.steps.size - 1, readout=False,
            layout={"flex": "1 1 90px", "min_width": "90px", "width": "auto"},
        )  # fmt: skip
        super().__init__(value, [self.box, self.thumb])
        self.thumb.observe(self._dragged, "value")
        self.box.observe(self._typed, "value")

    def _nearest(self, value):
        return int(np.abs(self.steps - value).argmin())

    def _dragged(self, change):
        # The thumb also moves when the box or a preset does; then it may sit beside the value.
        with _ONE_AT_A_TIME:
            if change.new != self._nearest(self.value):
                self.value = self.steps[change.new].item()

    def _typed(self, change):
        value = change.new
        if self._only_steps and value not in self.steps:
            at = int(np.searchsorted(self.steps, value))
            value = self.steps[at if value > self.value else at - 1].item()
        with _ONE_AT_A_TIME:
            self.value = value

    def show(self):
        """Bring thumb and box to the value."""
        self.thumb.value = self._nearest(self.value)
        self.box.value = self.value


class Choice(_Control):
    """A list of words to choose from.

    Parameters
    ----------
    label : str
        Words that name the list.
    value : str
        First value, also the one that Reset returns to.
    options : iterable of str
        The words.
    """

    def __init__(self, label, value, options):
        self.list = widgets.Dropdown(
            options=list(options), value=value, description=label,
            style={"description_width": "110px"}, layout={"width": "330px"},
        )  # fmt: skip
        super().__init__(value, [self.list])
        self.list.observe(lambda change: setattr(self, "value", change.new), "value")

    def show(self):
        """Bring the list to the value."""
        self.list.value = self.value


class Text(_Control):
    """A line to type into; the panel follows when Enter is pressed or the line is left.

    Parameters
    ----------
    label : str
        Words that name the line.
    value : str
        First text, also the one that Reset returns to.
    """

    def __init__(self, label, value):
        self.line = widgets.Text(
            value, description=label, continuous_update=False,
            style={"description_width": "110px"}, layout={"width": "100%"},
        )  # fmt: skip
        super().__init__(value, [self.line])
        self.layout.flex = "1 1 100%"
        self.line.observe(lambda change: setattr(self, "value", change.new), "value")

    def show(self):
        """Bring the line to the value."""
        self.line.value = self.value


class Job(_Control):
    """A button that starts work of more than a second, shows its progress and can cancel it.

    Parameters
    ----------
    label : str
        What the button does, in words.
    work : callable
        ``work(values, progress)`` gets the values of the panel's controls, calls
        ``progress(done, total)`` now and then and stops when that returns False. What it returns
        becomes the control's value; before it, and after a cancel or Reset, the value is None.
    """

    def __init__(self, label, work):
        self._label, self._work, self._is_running = label, work, False
        whole = {"width": "auto", "flex": "0 0 auto"}  # a long problem must not squeeze it
        self._button = widgets.Button(description=label, layout=whole)
        self._bar = widgets.FloatProgress(max=1.0, layout={"display": "none", "width": "150px"})
        self._problem = widgets.Label()
        super().__init__(None, [self._button, self._bar, self._problem])
        self._button.on_click(self._pressed)
        self.inputs = dict  # the panel says what its controls hold

    def _pressed(self, _):
        if self._is_running:  # the button reads Cancel now
            self._is_running = False
            return
        self._is_running, self._button.description = True, "Cancel"
        self._bar.layout.display, self._problem.value = None, ""
        # In a thread of its own, or the kernel could not hear the second press.
        threading.Thread(target=self._run, args=[self.inputs()], daemon=True).start()

    def _progress(self, done, total):
        self._bar.value = done / total
        return self._is_running

    def _run(self, values):
        result = None
        try:
            result = self._work(values, self._progress)
        except ValueError as problem:
            self._problem.value = str(problem)
        except Exception as problem:  # it would end in the thread, unseen
            self._problem.value = f"{type(problem).__name__}: {problem}"
        was_cancelled, self._is_running = not self._is_running, False
        self._button.description, self._bar.layout.display = self._label, "none"
        if result is not None and not was_cancelled:
            with _ONE_AT_A_TIME:
                self.value = result

    def show(self):
        """Do nothing: the button shows what it does, not the value."""


@dataclass(frozen=True)
class Guess:
    """A question to answer before the picture is shown.

    Attributes
    ----------
    question : str
        What to guess.
    options : tuple of str
        Answers, one button each.
    picks : int
        How many buttons to press: 1 to choose, ``len(options)`` to order.
    """

    question: str
    options: tuple[str, ...]
    picks: int = 1


class Panel(widgets.VBox):
    """Controls over a sentence over a picture.

    Parameters
    ----------
    picture : kvlib.figures.Picture
        Its ``update(**numbers)`` moves the artists and returns the sentence. A panel owns its
        picture: two panels never share one.
    compute : callable
        Pure: ``compute(**values)`` takes the controls' values and returns the numbers, a dict.
    guess : Guess, optional
        Veil the picture until the reader has guessed.
    assumptions : dict of str to control, optional
        Further controls, folded away.
    presets : dict, optional
        ``{"model": {"llama-3.1-8b": {"num_layers": 32}}}``: choosing an option of that control
        sets others; moving one of those sets the choice to ``"custom"``.
    **controls : Slider, Choice, Text or Job
        At most four, one for each argument of `compute`.

    Attributes
    ----------
    sentence : str
        What the picture shows, in words.

    Notes
    -----
    The picture is an HTML widget, never an Output widget. The browser sends a slider's next value
    only when the kernel has answered the last one, so a slow kernel skips values but never queues
    them, and the last value always arrives. The stored cell keeps the picture and the sentence.
    """

    def __init__(self, picture, compute, *, guess=None, assumptions=None, presets=None, **controls):
        assumptions = assumptions or {}
        self.picture, self._compute, self._guess = picture, compute, guess
        self.controls = controls | assumptions
        self._presets = presets or {}
        self._is_held, self._sharpening, self._saying = False, None, None
        self._num_lines = 4  # room for the longest sentence so far: the page must not jump
        self._picks, self._is_veiled = [], guess is not None
        self._words = widgets.HTML()
        self._announced = widgets.HTML()
        self._image = widgets.HTML()
        self._words.add_class("kv-sentence")
        reset = widgets.Button(
            description="Reset", tooltip="Back to the values in the text", layout={"width": "auto"}
        )
        reset.on_click(lambda _: self.reset())
        self._reset = reset
        wrap = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "0 16px"}
        rows = [widgets.Box([*controls.values(), reset], layout=wrap)]
        if assumptions:
            rows += self._fold(widgets.Box(list(assumptions.values()), layout=wrap))
        self._question = widgets.Box(self._question_parts(guess), layout=wrap)
        super().__init__([self._question, *rows, self._words, self._image, self._announced])
        self.add_class("kv-panel")
        self.layout.max_width = f"{picture.width + 40}px"
        for name, control in self.controls.items():
            control.disabled = self._is_veiled
            control.observe(lambda change, name=name: self._changed(name, change.new), "value")
            if isinstance(control, Job):
                control.inputs = lambda: self.values
        self._show()
        picture.png(scale=1)  # keeps the background that a drag needs

    @property
    def values(self):
        """Return the value of every control.

        Returns
        -------
        dict
            By name, as `compute` gets them.
        """
        return {name: control.value for name, control in self.controls.items()}

    def set(self, **values):
        """Set several controls and redraw once.

        Parameters
        ----------
        **values : object
            New values by name.
        """
        with _ONE_AT_A_TIME:
            with self._hold():
                for name, value in values.items():
                    self.controls[name].value = value
            self._show()

    def reset(self):
        """Return every control to its first value."""
        self.set(**{name: control.start for name, control in self.controls.items()})

    def reveal(self, *picks):
        """Lift the veil.

        Parameters
        ----------
        *picks : str
            The reader's guess, in order; none for "just show me".
        """
        self.picture.guess, self._is_veiled = tuple(picks), False
        self._question.layout.display = "none"
        for control in self.controls.values():
            control.disabled = False
        self._show()

    @contextmanager
    def _hold(self):
        with _ONE_AT_A_TIME:
            self._is_held, was_held = True, self._is_held
            try:
                yield
            finally:
                self._is_held = was_held

    def _changed(self, name, value):
        with _ONE_AT_A_TIME:
            if not self._is_held:
                self._follow(name, value)

    def _follow(self, name, value):
        with self._hold():
            if name in self._presets:
                for other, number in self._presets[name].get(value, {}).items():
                    self.controls[other].value = number
            for choice, options in self._presets.items():
                if any(name in preset for preset in options.values()):
                    self.controls[choice].value = "custom"
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a Job's thread, or no kernel: nothing can come later
            self._show()
            return
        self._draw(scale=1)
        self._saying = self._saying or loop.call_later(_PAINT_SECONDS, self._say)
        if self._sharpening:
            self._sharpening.cancel()
        self._sharpening = loop.call_later(_IDLE_SECONDS, self._show)

    def _show(self):
        with _ONE_AT_A_TIME:
            self._draw(scale=2)
            self._say()
            if not self._is_veiled:
                self._announced.value = (
                    f'<div role="status" style="{_HIDDEN}">{_as_html(self.sentence)}</div>'
                )

    def _draw(self, scale):
        cover = None
        try:
            numbers = self._compute(**self.values)
        except ValueError as problem:  # these values have no answer: say why, show no old picture
            self.sentence = cover = str(problem)
        else:
            self.sentence = self.picture.update(**numbers)
        if self._is_veiled:
            cover = self._guess.question
        png = base64.b64encode(self.picture.png(scale, cover=cover)).decode()
        words = html.escape(cover or self.sentence.replace("`", ""))
        extent = f'width="{self.picture.width}" height="{self.picture.height}"'
        # Inside the page, not behind a link: the browser decodes it before it paints the frame.
        self._image.value = (
            f'<img class="kv-picture" style="{_FITTING}" decoding="sync" {extent} '
            f'alt="{words}" src="data:image/png;base64,{png}">'
        )

    def _say(self):
        with _ONE_AT_A_TIME:
            self._saying = None
            if not self._is_veiled:
                self._num_lines = max(self._num_lines, _lines_of(self.sentence, self.picture.width))
                room = f"{_READABLE};min-height:{1.45 * self._num_lines:.2f}em"
                self._words.value = f'<div style="{room}">{_as_html(self.sentence)}</div>'
            for control in self.controls.values():
                control.show()

    @staticmethod
    def _fold(box):
        """A button that opens and closes the box; an Accordion cannot be opened by keyboard."""
        button = widgets.ToggleButton(description="Assumptions", icon="caret-right")

        def unfold(change):
            box.layout.display = None if change.new else "none"
            button.icon = "caret-down" if change.new else "caret-right"

        button.observe(unfold, "value")
        box.layout.display = "none"
        return [button, box]

    def _question_parts(self, guess):
        if guess is None:
            return []
        parts = [widgets.HTML(f"<b>{html.escape(guess.question)}</b>", layout={"width": "100%"})]
        for option in guess.options:
            button = widgets.Button(description=option, layout={"width": "auto"})
            button.on_click(lambda button, option=option: self._picked(button, option))
            parts.append(button)
        skip = widgets.Button(description="Just show me", button_style="info")
        skip.on_click(lambda _: self.reveal())
        return [*parts, skip]

    def _picked(self, button, option):
        self._picks.append(option)
        if len(self._picks) == self._guess.picks:
            self.reveal(*self._picks)
            return
        button.description, button.disabled = f"{len(self._picks)}. {option}", True

    def _repr_mimebundle_(self, **kwargs):
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        words = self.sentence.replace("`", "")
        stored = self.picture.captioned_png(words)
        bundle["image/png"] = base64.b64encode(stored).decode()
        bundle["text/plain"] = words
        return bundle, {"image/png": {"width": self.picture.width, "alt": words}}


class Code(str):
    """Python source whose repr is itself, so that calls nest in `as_python`."""

    __repr__ = str.__str__


def as_python(function, *args, **kwargs):
    """Write the call that gives a sentence's number, to be copied.

    Parameters
    ----------
    function : callable
        A public function of kvlib.
    *args, **kwargs : object
        Its arguments; a preset is written as the call that finds it.

    Returns
    -------
    Code
        Source that runs after ``from kvlib import memory, models`` and the like.

    Examples
    --------
    >>> from kvlib import memory, models
    >>> as_python(memory.kv_bytes_per_token, models.find_model("qwen3-0.6b"), "q8_0")
    memory.kv_bytes_per_token(models.find_model('qwen3-0.6b'), 'q8_0')
    """
    words = [_source(arg) for arg in args]
    words += [f"{name}={_source(value)}" for name, value in kwargs.items()]
    module = function.__module__.rpartition(".")[2]
    return Code(f"{module}.{function.__name__}({', '.join(words)})")


def _source(value):
    if isinstance(value, ModelShape) and value == load_models().get(value.name):
        return f"models.find_model({value.name!r})"
    return re.sub(r"\b(ModelShape|LayerGroup)\b", r"models.\1", repr(value))


def _lines_of(sentence, width):
    """Estimate the lines that a sentence takes in the page."""
    code = sum(map(len, re.findall(r"`([^`]+)`", sentence)))
    pixels = (len(sentence) - code) * _LETTER + code * _CODE_LETTER
    return math.ceil(pixels / width + 0.1)  # a line ends early where the next word is too long


def _as_html(sentence):
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(sentence, quote=False))
