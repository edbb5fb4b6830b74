"""The pictures of the chapters; `kvlib.panel.Panel` shows them."""

from kvlib.figures.memory import FactorTiles, MemoryCurve, ModelCurves
from kvlib.figures.picture import Picture
from kvlib.figures.replay import HitRatio, PolicyBars, PolicyMap, TenantUsage

__all__ = ["FactorTiles", "MemoryCurve", "ModelCurves", "Picture"]
__all__ += ["HitRatio", "PolicyBars", "PolicyMap", "TenantUsage"]
