# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 0 · What fits on a GPU, and what happens when it does not?
#
# 从这里开始：一块 GPU 放得下什么，放不下时会怎样？（两份公式笔记的导读与词汇表）
#
# **First** choose *Run > Run All Cells*: until then the pictures stand still. In twenty minutes you can say what fits on a GPU, and why
# the answer you got from a calculator was wrong.
#
# Every chapter asks one question, lets you guess, and then lets you drag. Each formula is a tested function of `kvlib`, and each chapter
# compares itself with numbers that somebody else published.

# %%
import base64
import json
from pathlib import Path

from IPython.display import Image

from kvlib import figures, panel

# %% [markdown]
# ## Why a cache exists, in 90 seconds
#
# A transformer is a stack of **layers**. In each, every **head** compares the new token's query with the key of every token before it and
# mixes their values. Keys and values of old tokens never change, so a server computes them once and keeps them: that is the KV cache.
# Reading the prompt is **prefill**, all its tokens at once; writing the answer is **decode**, one token a step. Without a cache, every step
# of decode would compute the whole sequence again.

# %% jupyter={"source_hidden": true}
# Tokens computed to write an answer.
def write(answer_tokens, prompt_tokens):
    without = sum(prompt_tokens + step for step in range(answer_tokens))
    cached = prompt_tokens + answer_tokens - 1
    call = f"sum({prompt_tokens} + step for step in range({answer_tokens}))"
    return {
        "title": f"{answer_tokens} steps compute {without:,} tokens without a cache, {cached:,} with one",
        "sentence": f"A prompt of {prompt_tokens} tokens, then {answer_tokens} steps of decode: without a cache {without:,} tokens are "
        f"computed, with one {cached:,}, {without / cached:.1f} times fewer. The price is memory: chapter 1 counts it. `{call}`",
        "prompt": prompt_tokens, "steps": answer_tokens, "computed": (without, cached),
    }


panel.Panel(
    figures.WhyCache(),
    write,
    guess=panel.Guess("20 tokens of prompt, 12 steps of decode. How many tokens are computed without a cache?", ("32", "120", "306")),
    answer_tokens=panel.Slider("steps", 12, range(1, 41)),
    prompt_tokens=panel.Slider("prompt [tokens]", 20, range(1, 25)),
)

# %% [markdown]
# ## What you can decide after each chapter
#
# <!-- decisions -->
# <!-- /decisions -->
#
# Minutes are for reading and dragging; the second number is for the part called "Second hour".
#
# **An engineer with 20 minutes** reads the first screen of chapters 1, 2 and 5 and then plays chapter 9: model, GPU, traffic, and what gives
# first. **A student with 3 hours** takes 1 to 8 in order, the exercises too, and ends with 10. **A teacher** shows one panel: each chapter's
# first picture is a question, and the guess stays drawn beside the truth. The order is the order of decisions: size first (1 to 4),
# compress next (5, 6), evict last (7, 8), then all of it at once (9), and what to drop inside one sequence (10).
#
# ## Every panel, as it is stored

# %% jupyter={"source_hidden": true}
# The pictures that the chapters carry for readers without a kernel.
def stored_pictures(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    return [base64.b64decode(output["image/png"]) for output in outputs if "image/png" in output]


chapters = sorted(path for path in Path(".").glob("[0-9]*.ipynb") if not path.stem.startswith("00"))
sheet = {f"Chapter {int(path.stem[:2])}": stored_pictures(path) for path in chapters}
Image(figures.contact_sheet(sheet), width=720, alt="The stored pictures of all panels, chapter by chapter")

# %% [markdown]
# ## People often believe ...
#
# Each of these was seen in a public issue or discussion. Drag, and see.
#
# | people often believe | drag this and see |
# |---|---|
# | A bigger model has a bigger cache. | [Chapter 1](01_bytes_per_token.ipynb), first panel: the bars of 0.6B, 8B and 671B. The largest is the smallest. |
# | head_dim is the hidden size over the heads. | [Chapter 1](01_bytes_per_token.ipynb), first panel, *head_dim* from 128 to 160: 25 % too much for Mistral-Small-24B, whose config says 128. |
# | Eight ranks hold an eighth each. | [Chapter 1](01_bytes_per_token.ipynb), third panel, *tensor parallel* on deepseek-v3: every rank holds all of it. |
# | MLA stores two vectors of 512. | [Chapter 1](01_bytes_per_token.ipynb), third panel, *model* deepseek-v3: one vector of 576 in each layer, and no 2. |
# | Sliding windows save a fixed share. | [Chapter 1](01_bytes_per_token.ipynb), third panel, *context* on gemma-3-27b: nothing at 1,024 tokens, five sixths at 131,072. |
# | Reserving the longest length costs a little. | [Chapter 2](02_blocks.ipynb), first panel, *reserved slots*: nine tenths of the memory hold nothing. |
# | Smaller blocks are always better. | [Chapter 2](02_blocks.ipynb), third panel, *block size* below 16: the waste is gone already, only the table grows. |
# | Every new token takes memory. | [Chapter 3](03_lifecycle.ipynb), *step*: most appends find room in the tail. |
# | Any common prefix is shared. | [Chapter 4](04_sharing.ipynb), second panel, *shared tokens* at 240 and *block size* at 784: nothing is. |
# | Writing to a shared prefix copies it. | [Chapter 4](04_sharing.ipynb), first panel, *have written*: one block, not the prefix. |
# | q8 is a half and q4 a quarter. | [Chapter 5](05_quantization.ipynb), third panel, *group size*: the scales count. |
# | The scheme with the smaller error is the better one. | [Chapter 5](05_quantization.ipynb), third panel, *values* per channel and per token: tensor error and attention error disagree. |
# | A zero point fits into the codes' eight bits. | [Chapter 5](05_quantization.ipynb), the cell with a channel in [10, 11]: it wraps. |
# | A quantized cache is also a faster one. | [Chapter 6](06_reading.ipynb), third panel, *stored as*: in two steps it is slower than fp16. |
# | The oldest sequence is the cheapest to evict. | [Chapter 7](07_eviction.ipynb), first panel: it frees ten times what is needed and costs as much. |
# | One tenant's long job cannot hurt another's chat. | [Chapter 7](07_eviction.ipynb), second panel, *weights*: under LRU it does, under a quota it does not. |
# | A low hit ratio asks for more memory. | [Chapter 8](08_replay.ipynb), first panel, *cache* at 10,000 blocks: none of the loss is a lack of memory. |
# | The 80 GB of the card are 80 GiB. | [Chapter 9](09_plan.ipynb), first panel, *GPU*: an H100 80GB shows 79.11 GiB, before weights and reserve. |
# | Dropping 80 % of the tokens frees 80 % of the memory. | [Chapter 10](10_tokens.ipynb), third panel, *block size*: a block stays while one token of it stays. |
#
# ## Formula, function, chapter, test
#
# <!-- formulas -->
# <!-- /formulas -->
#
# ## Every symbol, once
#
# <!-- symbols -->
# <!-- /symbols -->
#
# Next question: how many bytes does one token cost?
