"""The pictures of the chapters; `kvlib.panel.Panel` shows them."""

from kvlib.figures.memory import FactorTiles, MemoryCurve, ModelCurves
from kvlib.figures.picture import Picture
from kvlib.figures.tokens import ErrorCurves, KeptBlocks, RuleCurves

__all__ = [
    "ErrorCurves",
    "FactorTiles",
    "KeptBlocks",
    "MemoryCurve",
    "ModelCurves",
    "Picture",
    "RuleCurves",
]
