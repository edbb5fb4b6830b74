"""The pictures of the chapters; `kvlib.panel.Panel` shows them."""

from kvlib.figures.memory import FactorTiles, MemoryCurve, ModelCurves
from kvlib.figures.picture import Picture
from kvlib.figures.quantization import ErrorMaps, IntegerGrid, Tradeoff

__all__ = [
    "ErrorMaps",
    "FactorTiles",
    "IntegerGrid",
    "MemoryCurve",
    "ModelCurves",
    "Picture",
    "Tradeoff",
]
