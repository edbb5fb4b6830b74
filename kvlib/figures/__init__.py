"""The pictures of the chapters; `kvlib.panel.Panel` shows them."""

from kvlib.figures.gather import DecodeStep, PageScatter, ReadPaths
from kvlib.figures.memory import FactorTiles, MemoryCurve, ModelCurves
from kvlib.figures.picture import Picture
from kvlib.figures.start import WhyCache, contact_sheet

__all__ = [
    "DecodeStep",
    "FactorTiles",
    "MemoryCurve",
    "ModelCurves",
    "PageScatter",
    "Picture",
    "ReadPaths",
    "WhyCache",
    "contact_sheet",
]
