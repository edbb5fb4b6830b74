"""The pictures of the chapters; `kvlib.panel.Panel` shows them."""

from kvlib.figures.blocks import RequestRows, SequenceBlocks, SmallCurves
from kvlib.figures.eviction import EvictionTable, WaysBack
from kvlib.figures.gather import DecodeStep, PageScatter, ReadPaths
from kvlib.figures.memory import FactorTiles, MemoryCurve, ModelCurves
from kvlib.figures.picture import Picture
from kvlib.figures.plan import EvictionCost, Levers, Waterfall
from kvlib.figures.pool import BlockPool, ForkSaving, PromptBar
from kvlib.figures.start import WhyCache, contact_sheet

__all__ = [
    "BlockPool",
    "DecodeStep",
    "EvictionCost",
    "EvictionTable",
    "FactorTiles",
    "ForkSaving",
    "Levers",
    "MemoryCurve",
    "ModelCurves",
    "PageScatter",
    "Picture",
    "PromptBar",
    "ReadPaths",
    "RequestRows",
    "SequenceBlocks",
    "SmallCurves",
    "Waterfall",
    "WaysBack",
    "WhyCache",
    "contact_sheet",
]
