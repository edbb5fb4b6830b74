"""The one look of all pictures: colours by meaning, fonts, grid."""

from matplotlib.patheffects import withStroke

# Colour means the quantity, in every chapter.
WEIGHTS, CACHE, OTHER, LIMIT = "#7F7F7F", "#0072B2", "#E69F00", "#D55E00"
LIGHT = "#9CC9E3"  # cache beside the one in question
INK, SOFT, GRID, PAPER = "#222222", "#6E6E6E", "#E6E6E6", "#FFFFFF"
# Sequences, tenants and policies: always with a letter, shared blocks neutral.
OWNERS, SHARED = ("#7B4EA3", "#009E73", "#CC5A8A", "#8C6D1F"), "#CFCFCF"
COLOURS = (WEIGHTS, CACHE, OTHER, LIMIT, INK, SOFT, GRID, *OWNERS, SHARED)

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
    "figure.facecolor": PAPER,
}
HALO = [withStroke(linewidth=3, foreground=PAPER)]  # keeps a label readable on a line
