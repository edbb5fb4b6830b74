"""The pictures of the chapters; `kvlib.panel.Panel` shows them."""

from kvlib.figures.blocks import RequestRows, SequenceBlocks, SmallCurves
from kvlib.figures.eviction import EvictionTable, WaysBack
from kvlib.figures.gather import DecodeStep, PageScatter, ReadPaths
from kvlib.figures.memory import FactorTiles, MemoryCurve, ModelCurves
from kvlib.figures.picture import Picture
from kvlib.figures.plan import EvictionCost, Levers, Waterfall
from kvlib.figures.pool import BlockPool, ForkSaving, PromptBar
from kvlib.figures.quantization import ErrorMaps, IntegerGrid, Tradeoff
from kvlib.figures.replay import HitRatio, PolicyBars, PolicyMap, TenantUsage
from kvlib.figures.start import WhyCache, contact_sheet
from kvlib.figures.tokens import ErrorCurves, KeptBlocks, RuleCurves

__all__ = [
    "BlockPool",
    "DecodeStep",
    "ErrorCurves",
    "ErrorMaps",
    "EvictionCost",
    "EvictionTable",
    "FactorTiles",
    "ForkSaving",
    "HitRatio",
    "IntegerGrid",
    "KeptBlocks",
    "Levers",
    "MemoryCurve",
    "ModelCurves",
    "PageScatter",
    "Picture",
    "PolicyBars",
    "PolicyMap",
    "PromptBar",
    "ReadPaths",
    "RequestRows",
    "RuleCurves",
    "SequenceBlocks",
    "SmallCurves",
    "TenantUsage",
    "Tradeoff",
    "Waterfall",
    "WaysBack",
    "WhyCache",
    "contact_sheet",
]
