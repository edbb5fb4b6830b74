"""The pictures of the chapters; `kvlib.panel.Panel` shows them."""

from kvlib.figures.eviction import EvictionTable, WaysBack
from kvlib.figures.memory import FactorTiles, MemoryCurve, ModelCurves
from kvlib.figures.picture import Picture

__all__ = ["EvictionTable", "FactorTiles", "MemoryCurve", "ModelCurves", "Picture", "WaysBack"]
