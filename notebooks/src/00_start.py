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
# Every chapter asks one question, lets you guess, and then lets you drag. Each formula is a tested function of `kvlib`, and chapters 1 to 10
# compare themselves with numbers that somebody else published. They follow two Chinese notes, *KV Cache 公式到源码对照* and *KV 驱逐数学*:
# "the notes" means these, and their listings are quoted where they fail.

# %%
import base64
import json
import re
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
        "title": f"An answer of {answer_tokens} computes {without:,} tokens without a cache, {cached:,} with one",
        "sentence": f"A prompt of {prompt_tokens} tokens, an answer of {answer_tokens}. The first comes out of prefill, every other takes a step "
        f"of decode: without a cache {without:,} tokens are computed, with one {prompt_tokens} + {answer_tokens - 1} = {cached:,}, "
        f"{without / cached:.1f} times fewer. The price is memory: chapter 1 counts it. `{call}`",
        "prompt": prompt_tokens, "answer_tokens": answer_tokens, "computed": (without, cached),
    }


# %% jupyter={"source_hidden": true}
# The panel.
panel.Panel(
    figures.WhyCache(),
    write,
    guess=panel.Guess("A prompt of 20 tokens, an answer of 12. How many tokens are computed without a cache?", ("31", "120", "306")),
    answer_tokens=panel.Slider("answer [tokens]", 12, range(1, 41)),
    prompt_tokens=panel.Slider("prompt [tokens]", 20, range(1, 25)),
)

# %% [markdown]
# ## What you can decide after each chapter
#
# <!-- decisions -->
#
# | after chapter | you can decide | minutes |
# |---|---|---|
# | [1 · How many bytes does one token cost?](01_bytes_per_token.ipynb) | which model, cache dtype and context length fit a GPU, and how many sequences at once. | 20 + 15 |
# | [2 · Why does a sequence pay for tokens it does not have?](02_blocks.ipynb) | how many tokens a block should hold, and what a server that reserves the longest length gives away. | 15 + 10 |
# | [3 · When does one more token cost a block?](03_lifecycle.ipynb) | how many free blocks a scheduler must hold back before it lets a batch decode on. | 20 |
# | [4 · How much does a shared prefix save, and when does the saving end?](04_sharing.ipynb) | whether to share or copy a prompt, and whether padding it to a whole block pays. | 25 |
# | [5 · What does one bit less cost?](05_quantization.ipynb) | how many bits keys and values may lose, who shares a scale, and what the true bytes are. | 25 + 10 |
# | [6 · Where do the bytes go when attention reads a paged cache?](06_reading.ipynb) | whether a batch is limited by weights or by caches, and whether a quantized cache also saves time. | 15 + 10 |
# | [7 · The budget is full. Who leaves?](07_eviction.ipynb) | which policy picks the victim, how much a tenant may hold, and whether an evicted context is recomputed or copied back from host memory. | 25 + 15 |
# | [8 · What does a policy cost on real traffic?](08_replay.ipynb) | whether to buy memory or to change the policy, and which policy. | 25 + 25 |
# | [9 · Will it fit, and what gives first?](09_plan.ipynb) | how many GPUs a model and its traffic need, which lever to pull first, and what eviction costs if you pull none. | 25 + 10 |
# | [10 · Which tokens matter?](10_tokens.ipynb) | whether to drop tokens or bits, by which rule, and how much memory that really returns. | 20 + 10 |
#
# <!-- /decisions -->
#
# Minutes are for reading and dragging; the second number is for the part called "Second hour".
#
# **An engineer with 20 minutes** reads the first screen of chapters 1, 2 and 5 and then plays chapter 9: model, GPU, traffic, and what gives
# first. **A student with 5 hours** takes 1 to 8 in order, the exercises too, and ends with 10. **A teacher** shows one panel: each chapter's
# first picture is a question, and the guess stays drawn beside the truth. The order is the order of decisions: size first (1 to 4),
# compress next (5, 6), evict last (7, 8), then all of it at once (9), and what to drop inside one sequence (10).
#
# ## Every panel, as it is stored

# %% jupyter={"source_hidden": true}
# The pictures that the chapters carry for readers without a kernel, under what each helps to decide.
def stored_pictures(path):
    """The decision that a chapter serves, and its pictures."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    decision = re.search(r"able to decide\*\* (.+?)\.\n", "".join(cells[0]["source"]), re.DOTALL).group(1)
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    pictures = [base64.b64decode(output["image/png"]) for output in outputs if "image/png" in output]
    return f"Chapter {int(path.stem[:2])}: {' '.join(decision.split())}", pictures


chapters = sorted(path for path in Path(".").glob("[0-9]*.ipynb") if not path.stem.startswith("00"))
sheet = dict(map(stored_pictures, chapters))
Image(figures.contact_sheet(sheet), width=720, alt="The stored pictures of all panels, chapter by chapter")

# %% [markdown]
# ## People often believe ...
#
# Most of these were seen in public issues and discussions. Drag, and see.
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
# | Eight bits are eight bits. | [Chapter 5](05_quantization.ipynb), third panel, *keys* in fp8 and in int8 per token: one bit more, a seventh of the error. |
# | The scheme with the smaller error is the better one. | [Chapter 5](05_quantization.ipynb), third panel, *values* per channel and per token: tensor error and attention error disagree. |
# | A zero point fits into the codes' eight bits. | [Chapter 5](05_quantization.ipynb), the cell with a channel in [10, 11]: it wraps. |
# | A quantized cache is also a faster one. | [Chapter 6](06_reading.ipynb), third panel, *stored as*: int8 in two steps is slower than fp16 gathered, and any gathered copy slower than fp16 read inside attention. |
# | The oldest sequence is the cheapest to evict. | [Chapter 7](07_eviction.ipynb), first panel: it frees ten times what is needed and costs ten times as much. |
# | One tenant's long job cannot hurt another's chat. | [Chapter 7](07_eviction.ipynb), second panel, *weights*: under LRU it does, under a quota it does not. |
# | A low hit ratio asks for more memory. | [Chapter 8](08_replay.ipynb), first panel, *cache* at 10,000 blocks: none of the loss is a lack of memory. |
# | The 80 GB of the card are 80 GiB. | [Chapter 9](09_plan.ipynb), first panel, *GPU*: an H100 80GB shows 79.11 GiB, before weights and reserve. |
# | Dropping 80 % of the tokens frees 80 % of the memory. | [Chapter 10](10_tokens.ipynb), third panel, *block size*: a block stays while one token of it stays. |
#
# ## Formula, function, chapter, test
#
# <!-- formulas -->
#
# | formula | function | chapter | test |
# |---|---|---|---|
# | (1.1) $m = 2 \, L \, H_{KV} \, d_{head} \, s / 8$ | `memory.kv_bytes_per_token` | [1](01_bytes_per_token.ipynb) | [test_memory.py](../tests/test_memory.py) |
# | (1.2) $M(T) = \sum_g L_g \left( H_g \, (k_g + v_g) \, s / 8 \cdot \min(T, W_g) + c_g \right)$ | `memory.sequence_kv_bytes` | [1](01_bytes_per_token.ipynb) | [test_memory.py](../tests/test_memory.py) |
# | (2.1) $n_{blocks} = \left\lceil T / B_{block} \right\rceil$ | `blocks.blocks_needed` | [2](02_blocks.ipynb) | [test_blocks.py](../tests/test_blocks.py) |
# | (2.2) $w_{tail} = (B_{block} - T \bmod B_{block}) \bmod B_{block} = n_{blocks} B_{block} - T$ | `blocks.tail_waste` | [2](02_blocks.ipynb) | [test_blocks.py](../tests/test_blocks.py) |
# | (2.3) $\varphi = \sum w_{tail} \,/ \sum n_{blocks} B_{block}$ | `blocks.fragmentation` | [2](02_blocks.ipynb) | [test_blocks.py](../tests/test_blocks.py) |
# | (2.4) $E[w_{tail}] = (B_{block} - 1) / 2, \qquad \varphi \approx E[w_{tail}] \,/\, (E[T] + E[w_{tail}])$ | `blocks.fragmentation` | [2](02_blocks.ipynb) | [test_blocks.py](../tests/test_blocks.py) |
# | (3.1) $\Delta n_{blocks} = \left\lceil \frac{\max(0,\ \Delta T - f_{last})}{B_{block}} \right\rceil$ | `blocks.appended_blocks` | [3](03_lifecycle.ipynb) | [test_blocks.py](../tests/test_blocks.py) |
# | (3.2) $\text{release cost} = O(n_{blocks})$ | `paged_cache.PagedKVCacheManager.release` | [3](03_lifecycle.ipynb) | [test_paged_cache.py](../tests/test_paged_cache.py) |
# | (4.1) $\Delta M = (k - 1) \, M(T_{prefix})$ | `sharing.prefix_saving_bytes` | [4](04_sharing.ipynb) | [test_sharing.py](../tests/test_sharing.py) |
# | (4.2) $n_{saved} = (k - 1) \left\lfloor \frac{T_{prefix}}{B_{block}} \right\rfloor + [\,T_{prefix} \bmod B_{block} > 0\,] \, \max(0,\ k - 1 - k_w)$ | `sharing.prefix_saving_blocks` | [4](04_sharing.ipynb) | [test_sharing.py](../tests/test_sharing.py) |
# | (4.3) $T_{reused} = \left\lfloor \frac{\min(T_{prefix},\ T - 1)}{B_{block}} \right\rfloor B_{block}$ | `sharing.shareable_tokens` | [4](04_sharing.ipynb) | [test_sharing.py](../tests/test_sharing.py) |
# | (5.1) $\text{scale}_c = \frac{\max \vert x_c\vert }{q_{max}}, \qquad q_c = \text{clip}\left(\text{round}\left(\frac{x_c}{\text{scale}_c}\right), -q_{max}, q_{max}\right)$ | `quantization.quantize_per_channel_symmetric` | [5](05_quantization.ipynb) | [test_quantization.py](../tests/test_quantization.py) |
# | (5.2) $\text{scale}_c = \frac{\max x_c - \min x_c}{q_{max} - q_{min}}, \qquad \text{zero}_c = \text{round}\left(q_{min} - \frac{\min x_c}{\text{scale}_c}\right)$ | `quantization.quantize_per_channel_asymmetric` | [5](05_quantization.ipynb) | [test_quantization.py](../tests/test_quantization.py) |
# | (5.3) $q_c = \text{clip}\left(\text{round}\left(\frac{x_c}{\text{scale}_c}\right) + \text{zero}_c, q_{min}, q_{max}\right), \qquad \hat{x}_c = (q_c - \text{zero}_c) \cdot \text{scale}_c$ | `quantization.dequantize` | [5](05_quantization.ipynb) | [test_quantization.py](../tests/test_quantization.py) |
# | (5.4) $s = b + \frac{b_{scale} + b_{zero}}{G}$ | `memory.bits_per_value` | [5](05_quantization.ipynb) | [test_memory.py](../tests/test_memory.py) |
# | (5.5) $e = \frac{\lVert o' - o \rVert}{\lVert o \rVert}, \qquad o = \text{softmax}\left(\frac{q k^T}{\sqrt{d_{head}}}\right) v$ | `quantization.attention_output_error` | [5](05_quantization.ipynb) | [test_quantization.py](../tests/test_quantization.py) |
# | (6.1) $out_t = pool[\,table[\lfloor t / B_{block} \rfloor],\; t \bmod B_{block}\,]$ | `gather.gather_kv` | [6](06_reading.ipynb) | [test_gather.py](../tests/test_gather.py) |
# | (6.2) $t_{step} = \Big(W + \sum_i M(T_i)\Big) / v$ | `gather.decode_seconds_per_token` | [6](06_reading.ipynb) | [test_gather.py](../tests/test_gather.py) |
# | (6.3) $b_{moved} = r \, b_{stored} + w \, b_{plain}$ | `gather.gather_bytes` | [6](06_reading.ipynb) | [test_gather.py](../tests/test_gather.py) |
# | (7.1) $\text{overflow} = \max(0,\; U + \Delta b - B_{total})$ | `eviction.overflow_blocks` | [7](07_eviction.ipynb) | [test_eviction.py](../tests/test_eviction.py) |
# | (7.2) $\text{LRU: } \arg\min_i\, t_i \qquad \text{LFU: } \arg\min_i\, (c_i,\, t_i)$ | `eviction.LFUPolicy.select_victim` | [7](07_eviction.ipynb) | [test_eviction.py](../tests/test_eviction.py) |
# | (7.3) $q_t = \frac{w_t}{\sum_{t'} w_{t'}}\, B_{total}, \qquad u_t = \sum_{i \in t} n_i, \qquad t^* = \arg\max_{t:\, u_t > q_t} (u_t - q_t), \qquad \text{Fair: } \arg\min_{i \in t^*} t_i$ | `eviction.FairPolicy.select_victim` | [7](07_eviction.ipynb) | [test_eviction.py](../tests/test_eviction.py) |
# | (7.4) $\text{seconds}(i) \approx \frac{n_i \cdot \text{block\_size}}{P}, \qquad \text{Cost: } \arg\min_i\, \left(\frac{\text{seconds}(i)}{\min(r_i,\, \text{overflow})},\, t_i\right)$ | `eviction.CostPolicy.select_victim` | [7](07_eviction.ipynb) | [test_eviction.py](../tests/test_eviction.py) |
# | (7.5) $\min\; \alpha \cdot \text{miss rate} + \beta \cdot \text{recompute cost} + \gamma \cdot \text{unfairness}$ | `eviction.eviction_objective` | [7](07_eviction.ipynb) | [test_eviction.py](../tests/test_eviction.py) |
# | (7.6) $\text{recompute}(T) = \frac{T}{P}\left(1 + \frac{T}{2A}\right), \qquad \text{copy}(T) = \frac{m T}{R}, \qquad T_{even} = 2A\left(\frac{m P}{R} - 1\right)$ | `eviction.break_even_tokens` | [7](07_eviction.ipynb) | [test_eviction.py](../tests/test_eviction.py) |
# | (8.1) $1 = h_\pi + (h_B - h_\pi) + (h_\infty - h_B) + (1 - h_\infty)$ | `replay.replay` | [8](08_replay.ipynb) | [test_replay.py](../tests/test_replay.py) |
# | (8.2) $T_{again} = \min(512 \, n_\infty, T) - \min(512 \, n, T)$ | `replay.replay` | [8](08_replay.ipynb) | [test_replay.py](../tests/test_replay.py) |
# | (8.3) $J = \frac{\alpha \cdot \text{miss\_rate} + \beta \cdot \text{recompute\_cost} + \gamma \cdot \text{unfairness}}{\alpha + \beta + \gamma}$ | `eviction.eviction_objective` | [8](08_replay.ipynb) | [test_eviction.py](../tests/test_eviction.py) |
# | (9.1) $n_{fit} = \left\lfloor \frac{f \, M_{GPU} - M_w - M_r - M_P}{\bar M - M_P} \right\rfloor$ | `plan.plan` | [9](09_plan.ipynb) | [test_plan.py](../tests/test_plan.py) |
# | (9.2) $t_{again} = \max(0,\, n_{ask} - n_{fit}) \; r_{turn} \, T_{own} \,/\, v_{prefill}$ | `plan.plan` | [9](09_plan.ipynb) | [test_plan.py](../tests/test_plan.py) |
# | (10.1) $o'_t = \frac{\sum_{j \in K_t} w_{tj} \, v_j}{\sum_{j \in K_t} w_{tj}}, \qquad e = \frac{\lVert o' - o \rVert}{\lVert o \rVert}$ | `token_selection.KeptAttention` | [10](10_tokens.ipynb) | [test_token_selection.py](../tests/test_token_selection.py) |
# | (10.2) $K_t = \{t - r + 1, \dots, t\} \; \cup \; \operatorname{top}_{\,n - r} \{ a_j : j \le t - r \}$ | `token_selection.keep_highest` | [10](10_tokens.ipynb) | [test_token_selection.py](../tests/test_token_selection.py) |
# | (10.3) $M = n \cdot 2 \, H_{KV} \, d_{head} \, s / 8$ | `memory.kv_bytes_per_token` | [10](10_tokens.ipynb) | [test_memory.py](../tests/test_memory.py) |
#
# <!-- /formulas -->
#
# ## Every symbol
#
# <!-- symbols -->
#
# | symbol | name in code | meaning | unit | 中文 |
# |---|---|---|---|---|
# | $m$ | `kv_bytes_per_token` | what one token adds to the cache | bytes/token | 每 token 字节数 |
# | $L$ | `num_layers` | transformer layers | layers | 层数 |
# | $H_{KV}$ | `num_kv_heads` | key/value heads of a layer | heads | KV 头数 |
# | $d_{head}$ | `head_dim` | width of one head | elements | 每头维度 |
# | $s$ | `bits_per_value` | width of one stored value, scales included | bits | 元素位宽 |
# | $M(T)$ | `sequence_kv_bytes` | what a sequence of $T$ tokens holds | bytes | 序列的 KV 占用 |
# | $T$ | `num_tokens` | tokens of the sequence | tokens | 序列长度 |
# | $g$ | `layer_groups` | layers of one kind | - | 层组 |
# | $L_g, H_g$ | `num_layers`, `num_kv_heads` | layers of one kind, and KV heads of each | - | 同类层数、每层 KV 头数 |
# | $k_g, v_g$ | `k_dim`, `v_dim` | width of a stored key, of a stored value | elements | 键宽、值宽 |
# | $W_g$ | `window` | a layer forgets tokens older than this | tokens | 滑动窗口 |
# | $c_g$ | `state_bytes` | constant state of a linear-attention layer | bytes | 线性注意力的固定状态 |
# | $t_{step}$ | `decode_seconds_per_token` | least time of one decode step | s | 解码一步的下限时间 |
# | $W$ | `weight_bytes` | weights that a step reads | bytes | 权重字节数 |
# | $v$ | `bytes_per_second` | memory bandwidth | bytes/s | 显存带宽 |
# | $b_{moved}$ | `gather_bytes` | moved before attention can start | bytes | 读取搬运量 |
# | $b_{stored}$ | `stored_bytes` | as the pool stores these tokens, scales included | bytes | 存储字节数 |
# | $b_{plain}$ | `plain_bytes` | the same values as attention computes with them | bytes | 计算字节数 |
# | $r, w$ | `path` | how often each is read or written | - | 读写次数 |
# | $\Delta n_{blocks}$ | `appended_blocks` | blocks that a growing sequence takes | blocks | 新增块数 |
# | $\Delta T$ | `num_new_tokens` | tokens that are appended | tokens | 追加 token 数 |
# | $f_{last}$ | `tail_free_slots` | empty slots in the last block of a sequence | tokens | 尾块空位 |
# | $B_{block}$ | `block_size` | slots of one block | tokens/block | 块大小 |
# | $n_{blocks}$ | `blocks_needed` | blocks of one sequence | blocks | 块数 |
# | $\Delta M$ | `prefix_saving_bytes` | bytes saved by sharing a prefix | bytes | 共享节省的字节 |
# | $n_{saved}$ | `prefix_saving_blocks` | whole blocks saved by sharing a prefix | blocks | 共享节省的块 |
# | $k$ | `num_branches` | sequences that start with the prefix | sequences | 分支数 |
# | $T_{prefix}$ | `prefix_tokens` | length of the shared prefix | tokens | 公共前缀长度 |
# | $k_w$ | `num_written` | branches that have appended since the fork | sequences | 已写入的分支数 |
# | $T_{reused}$ | `shareable_tokens` | tokens of a prompt that a prefix cache reuses | tokens | 可复用 token 数 |
# | $\varphi$ | `fragmentation` | share of allocated slots that hold no token | - | 内部碎片率 |
# | $U$ | `used_blocks` | blocks in use, shared ones counted once | blocks | 已用块数 |
# | $\Delta b$ | `delta_blocks` | blocks about to be added | blocks | 将要新增的块数 |
# | $B_{total}$ | `budget_blocks`, `total_blocks` | blocks that exist | blocks | 块预算 |
# | $\text{overflow}$ | `overflow_blocks` | blocks that must be freed first | blocks | 溢出块数 |
# | $t_i$ | `last_access_step` | when sequence $i$ was last used | steps | 最近访问时间 |
# | $c_i$ | `use_count` | how often sequence $i$ was used | - | 访问次数 |
# | $n_i$ | `num_blocks` | blocks in the table of sequence $i$, shared or not | blocks | 序列的块数 |
# | $r_i$ | `reclaimable_blocks` | blocks that return if sequence $i$ leaves now | blocks | 真正可回收的块数 |
# | $w_t$ | `tenant_weights` | weight of tenant $t$ | - | 租户权重 |
# | $q_t$ | `fair_quotas` | quota of tenant $t$ | blocks | 租户配额 |
# | $u_t$ | `usage` | blocks that the sequences of tenant $t$ hold | blocks | 租户占用 |
# | $P$ | `prefill_tokens_per_second` | prefill throughput at the start of a context | tokens/s | 预填充吞吐 |
# | $A$ | `attention_tokens` | context at which a token costs twice as much as the first | tokens | 注意力开销翻倍的长度 |
# | $R$ | `bytes_per_second` | bandwidth from host memory to the GPU | bytes/s | 回填带宽 |
# | $w_{tail}$ | `tail_waste` | empty slots in the last block | tokens | 尾块浪费 |
# | $n_{fit}$ | `num_sequences` | sequences that fit at once | sequences | 可并发序列数 |
# | $f$ | `memory_fraction` | share of a GPU's memory that the engine may use | - | 显存可用比例 |
# | $M_{GPU}$ | `gpu_bytes` | memory of one GPU as programs see it | bytes | 单卡显存 |
# | $M_w$ | `weights` | weights on one GPU | bytes | 单卡权重 |
# | $M_r$ | `reserve_bytes` | activations and buffers on one GPU inside that share | bytes | 预留显存 |
# | $\bar M$ | `sequence_kv_bytes` | whole blocks of a sequence on one GPU, mean over the traffic | bytes | 平均每序列占用 |
# | $M_P$ | `prefix_bytes` | full blocks of the shared prefix on one GPU | bytes | 共享前缀占用 |
# | $t_{again}$ | `recompute_seconds_per_minute` | prefill of evicted contexts | s/min | 每分钟重算时间 |
# | $n_{ask}$ | `concurrency` | sequences wanted at a time | sequences | 期望并发数 |
# | $r_{turn}$ | `turns_per_minute` | how often each sequence comes back | 1/min | 每分钟轮次 |
# | $T_{own}$ | `mean_tokens` | tokens of a sequence outside the shared prefix, mean | tokens | 非共享 token 数 |
# | $v_{prefill}$ | `prefill_tokens_per_second` | prefill throughput of one group of GPUs | tokens/s | prefill 吞吐 |
# | $K_t$ | `kept` | keys that the query of token $t$ keeps | tokens | 查询保留的 key 集合 |
# | $w_{tj}$ | `weights` | attention of token $t$ to key $j$, all keys present | - | 注意力权重 |
# | $v_j$ | `v` | value of token $j$ | - | 第 j 个 token 的 value |
# | $n$ | `num_kept` | keys kept | tokens | 保留的 key 数 |
# | $r$ | `num_recent` | the newest of them | tokens | 其中最新的 key 数 |
# | $a_j$ | `scores` | what a rule knows about key $j$ | - | key 的得分 |
# | $h_\pi$ | `block_hit_ratio` | share of the blocks that policy $\pi$ finds | - | 策略的块命中率 |
# | $h_B$ | `recorded_hits(..., "belady")` | share that Belady's policy finds | - | Belady 上界 |
# | $h_\infty$ | `unlimited` | share that an unlimited cache finds | - | 无限缓存的命中率 |
# | $n, n_\infty$ | `leading_hits`, `ideal_leading_hits` | blocks a request finds in an unbroken run from its first, now and with an unlimited cache | blocks | 从首块起连续命中的块数 |
# | $J$ | `eviction_objective` | the three costs of a policy, weighed; smaller is better | - | 驱逐目标函数 |
# | $\alpha, \beta, \gamma$ | `alpha`, `beta`, `gamma` | weights of misses, recomputing, unfairness; only their proportions matter | - | 三项权重 |
# | $T_{again}$ | `recompute_tokens` | tokens that an eviction made a request compute again | tokens | 重算 token 数 |
# | $x_c$ | `tensor` | values that share a scale, here one channel | value | 一个通道的值 |
# | $q_c$ | `codes` | stored integers | - | 量化码 |
# | $q_{min}, q_{max}$ | `q_min`, `q_max` | lowest and highest code | - | 最小码、最大码 |
# | $\text{scale}_c$ | `scale` | distance of two neighbouring levels | value | 缩放系数 |
# | $\text{zero}_c$ | `zero_point` | code that stands for 0 | - | 零点 |
# | $\hat{x}_c$ | `dequantize` | what is read back | value | 反量化值 |
# | $b_{scale}, b_{zero}$ | `scale_dtype` | width of a stored scale, of a zero point or minimum | bits | 缩放系数、零点的位宽 |
# | $G$ | `group_size` | values that share a scale | elements | 分组大小 |
# | $q, k, v$ | `q`, `k`, `v` | queries, keys and values | value | 查询、键、值 |
# | $o, o'$ | `attention_output` | attention over exact, over read-back keys and values | value | 注意力输出 |
# | $e$ | `attention_output_error` | how far the attention output is off, relative | - | 注意力输出的相对误差 |
# | $b$ | `bits` | width of a code | bits | 码宽 |
#
# <!-- /symbols -->
#
# Next question: how many bytes does one token cost?
