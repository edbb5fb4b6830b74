"""Tables that repeat what the chapters say: written into the start page and the READMEs.

A file holds each table between `<!-- name -->` and `<!-- /name -->`; `make notebooks` rewrites
what stands between, and the check fails when it differs.
"""

import importlib
import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
# Where each numbered formula is a function; a test holds the two together.
FUNCTIONS = {
    "1.1": "memory.kv_bytes_per_token",
    "1.2": "memory.sequence_kv_bytes",
    "2.1": "blocks.blocks_needed",
    "2.2": "blocks.tail_waste",
    "2.3": "blocks.fragmentation",
    "2.4": "blocks.fragmentation",
    "3.1": "blocks.appended_blocks",
    "3.2": "paged_cache.PagedKVCacheManager.release",
    "4.1": "sharing.prefix_saving_bytes",
    "4.2": "sharing.prefix_saving_blocks",
    "4.3": "sharing.shareable_tokens",
    "5.1": "quantization.quantize_per_channel_symmetric",
    "5.2": "quantization.quantize_per_channel_asymmetric",
    "5.3": "quantization.dequantize",
    "5.4": "memory.bits_per_value",
    "5.5": "quantization.attention_output_error",
    "6.1": "gather.gather_kv",
    "6.2": "gather.decode_seconds_per_token",
    "6.3": "gather.gather_bytes",
    "7.1": "eviction.overflow_blocks",
    "7.2": "eviction.LFUPolicy.select_victim",
    "7.3": "eviction.FairPolicy.select_victim",
    "7.4": "eviction.CostPolicy.select_victim",
    "7.5": "eviction.eviction_objective",
    "7.6": "eviction.break_even_tokens",
    "8.1": "replay.replay",
    "8.2": "replay.replay",
    "8.3": "eviction.eviction_objective",
    "9.1": "plan.plan",
    "9.2": "plan.plan",
    "10.1": "token_selection.KeptAttention",
    "10.2": "token_selection.keep_highest",
    "10.3": "memory.kv_bytes_per_token",
}
_FORMULA = re.compile(r"\$\$((?:(?!\$\$).)+?)\\tag\{(\d+\.\d+)\}\s*\$\$", re.DOTALL)


def read_chapters():
    """Return what the tables need of every chapter, in order."""
    found = []
    for source in sorted((HERE / "src").glob("[0-9]*.py")):
        if source.stem.startswith("00"):
            continue
        text = re.sub(r"^# ?", "", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
        title, chinese = re.search(r"^# (\d+ · .+?)\n\n(.+?)\n", text, re.MULTILINE).groups()
        decide = re.search(r"\*\*You will be able to decide\*\* (.+?)\n- ", text, re.DOTALL)[1]
        minutes = re.search(r"\*\*(\d+) minutes\.?\*\*(?:, and (\d+) more)?", text)
        formulas = {tag: " ".join(formula.split()) for formula, tag in _FORMULA.findall(text)}
        found.append(
            {
                "stem": source.stem,
                "title": title,
                "chinese": chinese.partition("（")[0],
                "decide": " ".join(decide.split()),
                "minutes": " + ".join(filter(None, minutes.groups())),
                "formulas": formulas,
            }
        )
    return found


def chapter_table(folder, chinese=False):
    """Question, decision, formula and minutes of every chapter."""
    heads = ("问题", "公式", "分钟") if chinese else ("question", "first formula", "minutes")
    rows = [f"| {' | '.join(heads)} |", "|---|---|---|"]
    for chapter in read_chapters():
        number = chapter["title"].partition(" ")[0]
        words = f"{number} · {chapter['chinese']}" if chinese else chapter["title"]
        formula = next(iter(chapter["formulas"].values())).rstrip(" ,.")
        link = f"[{words}]({folder}{chapter['stem']}.ipynb)"
        rows.append(f"| {link} | ${formula}$ | {chapter['minutes']} |".replace("\\|", "\\Vert"))
    return rows


def decision_table():
    """What a reader can decide after which chapter."""
    rows = ["| after chapter | you can decide | minutes |", "|---|---|---|"]
    for chapter in read_chapters():
        link = f"[{chapter['title']}]({chapter['stem']}.ipynb)"
        rows.append(f"| {link} | {chapter['decide']} | {chapter['minutes']} |")
    return rows


def formula_table():
    """Formula, function, chapter and test."""
    rows = ["| formula | function | chapter | test |", "|---|---|---|---|"]
    for chapter in read_chapters():
        for tag, formula in chapter["formulas"].items():
            module, _, function = FUNCTIONS[tag].partition(".")
            getattr(importlib.import_module(f"kvlib.{module}"), function.partition(".")[0])
            number = chapter["title"].partition(" ")[0]
            cells = f"`{module}.{function}`", f"[{number}]({chapter['stem']}.ipynb)"
            test = f"[test_{module}.py](../tests/test_{module}.py)"
            formula = formula.replace("|", "\\vert ")
            rows.append(f"| ({tag}) ${formula}$ | {cells[0]} | {cells[1]} | {test} |")
    return rows


def symbol_table():
    """Every symbol, with the Chinese term beside it."""
    text = (HERE / "SYMBOLS.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith("|")]


TABLES = {
    "README.md": {"chapters": lambda: chapter_table("notebooks/")},
    "README.zh.md": {"chapters": lambda: chapter_table("notebooks/", chinese=True)},
    "notebooks/src/00_start.py": {
        "decisions": decision_table,
        "formulas": formula_table,
        "symbols": symbol_table,
    },
}


def refreshed(name):
    """Return a file's text with its tables as they should be."""
    text = (ROOT / name).read_text(encoding="utf-8")
    mark = "# " if name.endswith(".py") else ""
    for table, make in TABLES[name].items():
        start, end = f"{mark}<!-- {table} -->\n", f"{mark}<!-- /{table} -->"
        before, _, rest = text.partition(start)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{name} has no table {table!r} between its two comments")
        lines = "".join(f"{mark}{row}\n" for row in make())
        text = f"{before}{start}{mark.rstrip()}\n{lines}{mark.rstrip()}\n{end}{after}"
    return text


def refresh(*, check):
    """Rewrite every table, or return the files whose tables are stale."""
    stale = []
    for name in TABLES:
        path, text = ROOT / name, refreshed(name)
        if path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    return stale if check else []
