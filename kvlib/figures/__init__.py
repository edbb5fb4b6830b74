"""The pictures of the chapters; `kvlib.panel.Panel` shows them."""

from kvlib.figures.memory import FactorTiles, MemoryCurve, ModelCurves
from kvlib.figures.picture import Picture
from kvlib.figures.plan import EvictionCost, Levers, Waterfall

__all__ = [
    "EvictionCost",
    "FactorTiles",
    "Levers",
    "MemoryCurve",
    "ModelCurves",
    "Picture",
    "Waterfall",
]
