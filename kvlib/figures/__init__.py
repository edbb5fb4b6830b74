"""The pictures of the chapters; `kvlib.panel.Panel` shows them."""

from kvlib.figures.memory import FactorTiles, MemoryCurve, ModelCurves
from kvlib.figures.picture import Picture
from kvlib.figures.pool import BlockPool, ForkSaving, PromptBar

__all__ = [
    "BlockPool",
    "FactorTiles",
    "ForkSaving",
    "MemoryCurve",
    "ModelCurves",
    "Picture",
    "PromptBar",
]
