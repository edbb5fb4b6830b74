"""The pictures of the chapters; `kvlib.panel.Panel` shows them."""

from kvlib.figures.blocks import RequestRows, SequenceBlocks, SmallCurves
from kvlib.figures.memory import FactorTiles, MemoryCurve, ModelCurves
from kvlib.figures.picture import Picture

__all__ = ["FactorTiles", "MemoryCurve", "ModelCurves", "Picture", "RequestRows"]
__all__ += ["SequenceBlocks", "SmallCurves"]
