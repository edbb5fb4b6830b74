"""What a model stores per token: its layer groups, read from a few numbers or a config.json."""

import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from kvlib._data import read_json
from kvlib._validate import one_of, real, whole

# Families whose released config.json names a window but leaves the pattern to the code: every
# n-th layer is full. Source: the configuration classes of the transformers library.
_PATTERN_OF_TYPE = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "cohere2": 4,
    "gpt_oss": 2,
}

_WINDOW_NAMES = ("sliding_window", "sliding_window_size")

# Other families' own ways to say which layers are which; reading them as all-full would be wrong.
_UNREAD_PATTERNS = (
    "attention_chunk_size",
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_configs",
    "block_types",
    "full_attn_idxs",
    "hybrid_layer_ids",
    "hybrid_override_pattern",
    "layers_block_type",
)

# One thing, many names: what a layer of `layer_types` keeps.
_KIND_OF_LAYER_TYPE = {
    "full_attention": "full",
    "attention": "full",
    "sparse_attention": "full",
    "sliding_attention": "window",
    "linear_attention": "linear",
    "kda": "linear",
}


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind: what each stores per token, and per sequence.

    Attributes
    ----------
    num_layers : int
        Layers of this kind that keep a cache of their own [layers].
    num_kv_heads : int
        Heads that are stored, one for MLA [heads].
    k_dim, v_dim : int
        Elements one head stores for the key and for the value [elements]; 0 where none is stored.
    window : int or None
        The layer forgets tokens older than this [tokens]; None keeps them all.
    state_bytes : int
        Constant state one sequence keeps in one layer, whatever its length [bytes].

    Raises
    ------
    TypeError
        If a field is not an integer.
    ValueError
        If a count is below 1, a width or state below 0, or the group stores nothing at all.

    Examples
    --------
    >>> LayerGroup(52, 16, 128, 128, window=1024).values_per_token
    212992
    """

    num_layers: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    state_bytes: int = 0

    def __post_init__(self):
        # Kept as Python ints: a NumPy integer would carry its own width into every product.
        self._keep_whole("num_layers", low=1)
        self._keep_whole("num_kv_heads", low=1, hint="MLA and MQA store one head.")
        for field in ("k_dim", "v_dim", "state_bytes"):
            self._keep_whole(field, low=0)
        if self.window is not None:
            self._keep_whole("window", low=1, hint="Use None for a layer that keeps every token.")
        if not (self.k_dim or self.v_dim or self.state_bytes):
            raise ValueError(
                "k_dim=0, v_dim=0, state_bytes=0; a group must store something. "
                "Leave out layers that share another layer's cache."
            )

    def _keep_whole(self, field, **rule):
        object.__setattr__(self, field, whole(field, getattr(self, field), **rule))

    @property
    def values_per_token(self):
        """Count the elements one token adds in all layers of the group [elements/token].

        Returns
        -------
        int
            ``num_layers * num_kv_heads * (k_dim + v_dim)``.
        """
        return self.num_layers * self.num_kv_heads * (self.k_dim + self.v_dim)

    @property
    def label(self):
        """Say in words what the layers keep [text].

        Returns
        -------
        str
            For example ``'52 layers with window 1,024'``.
        """
        if not self.k_dim and not self.v_dim:
            return f"{self.num_layers} linear layers (constant)"
        kept = "full layers" if self.window is None else f"layers with window {self.window:,}"
        return f"{self.num_layers} {kept}"


@dataclass(frozen=True, init=False, repr=False)
class ModelShape:
    """The numbers of a model that fix its KV-cache size.

    Parameters
    ----------
    num_layers : int
        Transformer layers, L [layers].
    num_kv_heads : int
        Key/value heads of a layer, H_KV [heads]: `num_heads` for MHA, 1 for MQA.
    head_dim : int
        Width of one head [elements]. Given, never derived from the hidden size.
    num_heads : int, optional
        Query heads of a layer [heads]; only comparisons with MHA need it.
    name : str
        What to call the model in a sentence.

    Attributes
    ----------
    layer_groups : tuple of LayerGroup
        What is stored, one entry for each kind of layer. The constructor makes the uniform model
        of the textbooks, one group; `from_groups` takes any mixture.
    num_heads : int or None
        Query heads of a layer [heads].
    name : str
        What to call the model in a sentence.

    Raises
    ------
    TypeError
        If a number is not an integer.
    ValueError
        If a number is below 1, or `num_kv_heads` does not divide `num_heads`.

    Examples
    --------
    >>> llama = ModelShape(num_layers=32, num_kv_heads=8, head_dim=128, num_heads=32)
    >>> llama.layer_groups
    (LayerGroup(num_layers=32, num_kv_heads=8, k_dim=128, v_dim=128, window=None, state_bytes=0),)
    """

    layer_groups: tuple[LayerGroup, ...]
    num_heads: int | None
    name: str

    def __init__(self, *, num_layers, num_kv_heads, head_dim, num_heads=None, name="custom"):
        head_dim = whole("head_dim", head_dim, low=1)
        self._fill((LayerGroup(num_layers, num_kv_heads, head_dim, head_dim),), num_heads, name)
        if num_heads is not None and num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads={num_kv_heads}; it must divide num_heads={num_heads}, since each KV "
                "head serves equally many query heads. See num_key_value_heads in config.json."
            )

    @classmethod
    def from_groups(cls, layer_groups, *, num_heads=None, name="custom"):
        """Build a model whose layers are not all alike.

        Parameters
        ----------
        layer_groups : iterable of LayerGroup
            What is stored, one entry for each kind of layer.
        num_heads : int, optional
            Query heads of a layer [heads].
        name : str
            What to call the model in a sentence.

        Returns
        -------
        ModelShape
            The model.

        Raises
        ------
        TypeError
            If an entry is not a LayerGroup.
        ValueError
            If there is no group.

        Examples
        --------
        >>> mla = ModelShape.from_groups([LayerGroup(61, 1, 512 + 64, 0)], name="deepseek-v3")
        >>> mla.num_layers, mla.head_dim
        (61, None)
        """
        layer_groups = tuple(layer_groups)
        if not layer_groups:
            raise ValueError(
                "layer_groups=(); a model needs a group. Pass at least one LayerGroup."
            )
        for group in layer_groups:
            if not isinstance(group, LayerGroup):
                raise TypeError(
                    f"layer_groups has {group!r}; entries must be LayerGroup. Build one."
                )
        shape = cls.__new__(cls)
        shape._fill(layer_groups, num_heads, name)
        return shape

    @classmethod
    def from_hf_config(cls, config, *, head_dim=None, name=None):
        """Read a Hugging Face ``config.json``.

        Parameters
        ----------
        config : mapping
            The parsed file. A ``text_config`` inside it is used where there is one.
        head_dim : int, optional
            Width of one head [elements], for configs that do not state it.
        name : str, optional
            What to call the model; its ``model_type`` by default.

        Returns
        -------
        ModelShape
            The model, layers that share another layer's cache left out.

        Raises
        ------
        TypeError
            If `config` is not a mapping.
        ValueError
            If a needed entry is missing or a layer type is unknown. A missing head_dim is never
            derived silently: the message says which value would be assumed and how to pass one.

        Notes
        -----
        Understood: grouped heads, MLA (one head of ``kv_lora_rank + qk_rope_head_dim``), sliding
        windows by ``layer_types``, by pattern or for every layer, ``use_sliding_window=False``,
        linear attention by ``layer_types``, ``full_attention_interval`` or ``linear_attn_config``,
        ``num_kv_shared_layers``, other widths in global or window layers (``global_*``,
        ``swa_*``) and ``v_head_dim``. A missing ``num_key_value_heads`` means MHA, as in the
        library. Draft (multi-token prediction) layers, the index keys of sparse attention and the
        few hundred KiB of a short convolution beside softmax attention are not counted.

        References
        ----------
        .. [1] The configuration classes of the transformers library, github.com/huggingface.

        Examples
        --------
        >>> config = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        ...           "head_dim": 128, "model_type": "qwen3"}
        >>> ModelShape.from_hf_config(config)
        ModelShape(num_layers=28, num_kv_heads=8, head_dim=128, num_heads=16, name='qwen3')
        """
        if not isinstance(config, Mapping):
            raise TypeError(f"config={config!r:.40}; it must be a mapping. Use json.load(file).")
        config = config.get("text_config") or config
        if head_dim is not None:
            head_dim = whole("head_dim", head_dim, low=1)
        num_heads = _entry(config, "num_attention_heads", "n_head", required=False)
        groups = [
            _layer_group(kind, num_layers, config, head_dim)
            for kind, num_layers in _layers_of_kind(config).items()
        ]
        name = name or str(config.get("model_type", "custom"))
        return cls.from_groups(groups, num_heads=num_heads, name=name)

    def _fill(self, layer_groups, num_heads, name):
        if num_heads is not None:
            num_heads = whole("num_heads", num_heads, low=1)
        for field, value in zip(
            ("layer_groups", "num_heads", "name"), (layer_groups, num_heads, name), strict=True
        ):
            object.__setattr__(self, field, value)

    @property
    def num_layers(self):
        """Count the layers that keep a cache of their own [layers].

        Returns
        -------
        int
            The sum over the groups.
        """
        return sum(group.num_layers for group in self.layer_groups)

    @property
    def num_kv_heads(self):
        """Return the KV heads of a layer, where every layer has the same [heads].

        Returns
        -------
        int or None
            None for a model of unequal groups.
        """
        return self.layer_groups[0].num_kv_heads if self.is_uniform else None

    @property
    def head_dim(self):
        """Return the width of a head, where every layer has the same for key and value [elements].

        Returns
        -------
        int or None
            None for a model of unequal groups or widths.
        """
        return self.layer_groups[0].k_dim if self.is_uniform else None

    @property
    def is_uniform(self):
        """Tell whether the one-line formula 2 L H_KV d s T describes this model.

        Returns
        -------
        bool
            True for one group with equal widths, no window and no state.
        """
        first = self.layer_groups[0]
        plain = first.k_dim == first.v_dim and first.window is None and not first.state_bytes
        return len(self.layer_groups) == 1 and plain

    def __repr__(self):
        heads = "" if self.num_heads is None else f", num_heads={self.num_heads}"
        tail = heads + ("" if self.name == "custom" else f", name={self.name!r}") + ")"
        if not self.is_uniform:
            return f"ModelShape.from_groups({list(self.layer_groups)}{tail}"
        return (
            f"ModelShape(num_layers={self.num_layers}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}{tail}"
        )


@functools.cache
def _presets():
    entries = read_json("model_configs.json").items()
    return {key: ModelShape.from_hf_config(entry["fields"], name=key) for key, entry in entries}


def load_models():
    """Return the presets: published models by name.

    Returns
    -------
    dict of str to ModelShape
        A new dict on every call.

    References
    ----------
    .. [1] data/model_configs.json, each entry with its source.

    Examples
    --------
    >>> load_models()["llama-3.1-8b"].num_kv_heads
    8
    """
    return dict(_presets())


def find_model(name):
    """Return one preset, or name the nearest.

    Parameters
    ----------
    name : str
        A key of `load_models`.

    Returns
    -------
    ModelShape
        The preset.

    Raises
    ------
    ValueError
        If there is no preset of that name; the message suggests the nearest.

    Examples
    --------
    >>> find_model("gemma-3-27b").num_layers
    62
    """
    return _presets()[one_of("name", name, _presets())]


def attention_variants(shape):
    """Return what a model would be with other attention, to draw beside it.

    Parameters
    ----------
    shape : ModelShape
        The model.

    Returns
    -------
    dict of str to ModelShape
        For a uniform model that knows its query heads: the same with as many KV heads (MHA), with
        8 (GQA) and with 1 (MQA), those that differ from it. For a model with windows: the same
        with every layer keeping every token. Else empty: the formula of MLA has no such factor.

    Examples
    --------
    >>> list(attention_variants(find_model("llama-3.1-8b")))
    ['MHA, 32 KV heads', 'MQA, 1 KV head']
    >>> list(attention_variants(find_model("gemma-3-27b")))
    ['all layers full']
    """
    if any(group.window for group in shape.layer_groups):
        full = [replace(group, window=None) for group in shape.layer_groups]
        return {"all layers full": ModelShape.from_groups(full, num_heads=shape.num_heads)}
    if not shape.is_uniform or shape.num_heads is None:
        return {}
    heads = {"MHA": shape.num_heads, "GQA": 8, "MQA": 1}
    return {
        f"{name}, {count} KV head{'s' if count > 1 else ''}": ModelShape(
            num_layers=shape.num_layers,
            num_kv_heads=count,
            head_dim=shape.head_dim,
            num_heads=shape.num_heads,
        )
        for name, count in heads.items()
        if shape.num_heads % count == 0
        and count != shape.num_kv_heads
        and (name != "GQA" or 1 < count < shape.num_heads)
    }


def released_weight_bytes(name, weight_bits=None):
    """Return what a preset's released weights take [bytes].

    Parameters
    ----------
    name : str
        A key of `load_models`.
    weight_bits : int, float or Fraction, optional
        Store each parameter in so many bits instead [bits/parameter].

    Returns
    -------
    int
        Parameters times the released checkpoint's bits per parameter, or times `weight_bits`,
        rounded up [bytes].

    Raises
    ------
    ValueError
        If there is no preset of that name (the message suggests the nearest), or the bits are not
        above 0.

    Notes
    -----
    Draft (multi-token prediction) layers are left out and tied embeddings counted once, as model
    cards do. Mixed-precision checkpoints carry their mean width.

    References
    ----------
    .. [1] data/model_parameters.json, each entry with its source.

    Examples
    --------
    >>> released_weight_bytes("qwen3-0.6b"), released_weight_bytes("qwen3-0.6b", weight_bits=8)
    (1192099840, 596049920)
    """
    entry = read_json("model_parameters.json")[find_model(name).name]
    if weight_bits is None:
        weight_bits = Fraction(str(entry["weight_bits"]))
    real("weight_bits", weight_bits, above=0)
    return math.ceil(entry["parameters"] * Fraction(str(weight_bits)) / 8)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as programs see it.

    Attributes
    ----------
    name : str
        What people call it.
    memory_bytes : int
        Memory that a driver or framework reports [bytes], not the decimal name.
    bandwidth_bytes_per_second : int
        Datasheet memory bandwidth [bytes/s], decimal.

    Raises
    ------
    TypeError
        If a number is not an integer.
    ValueError
        If a number is below 1.

    Examples
    --------
    >>> round(load_devices()["H100 80GB"].memory_bytes / 2**30, 2)
    79.11
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: int

    def __post_init__(self):
        for field in ("memory_bytes", "bandwidth_bytes_per_second"):
            object.__setattr__(self, field, whole(field, getattr(self, field), low=1))


@functools.cache
def _devices():
    return {
        name: Device(
            name=name,
            memory_bytes=round(entry["memory_gib"] * 2**30),
            bandwidth_bytes_per_second=round(entry["bandwidth_gb_s"] * 10**9),
        )
        for name, entry in read_json("gpus.json").items()
        if not name.startswith("_")
    }


def load_devices():
    """Return the GPUs whose memory somebody read off a running program.

    Returns
    -------
    dict of str to Device
        A new dict on every call.

    References
    ----------
    .. [1] data/gpus.json, each entry with its source.

    Examples
    --------
    >>> len(load_devices())
    13
    """
    return dict(_devices())


def _entry(config, *names, low=1, required=True):
    """Return the first entry present under any of its names."""
    for name in names:
        if config.get(name) is not None:
            return whole(name, config[name], low=low)
    if required:
        raise ValueError(f"config has no {names[0]}; it is needed. Add it to the mapping.")
    return None


def _layers_of_kind(config):
    """Count the layers of each kind that keep a cache: {'full': 10, 'window': 52}."""
    counted = {
        "full": ("full_attention_layers", "sparse_attention_layers"),
        "window": ("sliding_attention_layers",),
        "linear": ("linear_attention_layers", "kda_layers"),
    }
    counts = {
        kind: sum(_entry(config, name, low=0, required=False) or 0 for name in names)
        for kind, names in counted.items()
    }
    if not any(counts.values()):
        kinds = _kind_of_each_layer(config)
        shared = _entry(config, "num_kv_shared_layers", low=0, required=False) or 0
        if shared >= len(kinds):
            raise ValueError(
                f"num_kv_shared_layers={shared}; one of the {len(kinds)} layers must keep a cache "
                "of its own. Pass fewer."
            )
        counts = Counter(kinds[: len(kinds) - shared])
    return {kind: counts[kind] for kind in counted if counts[kind]}


def _kind_of_each_layer(config):
    num_layers = _entry(config, "num_hidden_layers", "n_layer", "n_layers")
    if config.get("linear_attn_config"):  # Kimi Linear lists its full layers by number
        full_layers = len(config["linear_attn_config"]["full_attn_layers"])
        return ["full"] * full_layers + ["linear"] * (num_layers - full_layers)
    if config.get("layer_types"):
        return _kinds_from_types(config["layer_types"], num_layers, config)
    if marks := config.get("hybrid_layer_pattern"):  # MiMo: 1 marks a window layer
        types = ["sliding_attention" if mark else "full_attention" for mark in marks]
        return _kinds_from_types(types, num_layers, config)
    if interval := _entry(config, "full_attention_interval", required=False):
        return ["linear" if (i + 1) % interval else "full" for i in range(num_layers)]
    for name in _UNREAD_PATTERNS:
        if config.get(name) is not None:
            raise ValueError(
                f"config has {name}={config[name]!r:.30}; this way to mix layers is not read. "
                "Add layer_types, or use ModelShape.from_groups."
            )
    pattern = _entry(config, "sliding_window_pattern", "_sliding_window_pattern", required=False)
    pattern = pattern or _PATTERN_OF_TYPE.get(config.get("model_type"))
    is_named = bool(pattern or config.get("use_sliding_window"))
    is_used = config.get("use_sliding_window")
    # Qwen's window is off unless the switch turns it on; other families have no switch.
    is_qwen = str(config.get("model_type")).startswith(("qwen2", "qwen3"))
    is_off = is_qwen if is_used is None else not is_used
    if is_off or not _entry(config, *_WINDOW_NAMES, low=0, required=is_named):
        return ["full"] * num_layers
    if pattern:
        return ["window" if (i + 1) % pattern else "full" for i in range(num_layers)]
    if config.get("use_sliding_window"):  # Qwen2: the first max_window_layers stay full
        first = min(_entry(config, "max_window_layers", low=0), num_layers)
        return ["full"] * first + ["window"] * (num_layers - first)
    return ["window"] * num_layers


def _kinds_from_types(layer_types, num_layers, config):
    if len(layer_types) != num_layers:
        raise ValueError(
            f"config has {len(layer_types)} layer_types; num_hidden_layers={num_layers} needs as "
            "many. Complete the list."
        )
    kinds = []
    for layer_type in layer_types:
        kind = _KIND_OF_LAYER_TYPE[one_of("layer_type", layer_type, _KIND_OF_LAYER_TYPE)]
        window_is_off = kind == "window" and config.get("use_sliding_window") is False
        kinds.append("full" if window_is_off else kind)
    return kinds


def _layer_group(kind, num_layers, config, head_dim):
    if kind == "linear":
        return _linear_group(num_layers, config)
    if config.get("kv_lora_rank"):
        latent_dim = _entry(config, "kv_lora_rank") + _entry(config, "qk_rope_head_dim")
        return LayerGroup(num_layers, 1, latent_dim, 0)
    heads_names = ["num_key_value_heads", "n_head_kv"]
    k_names, v_names = ["head_dim"], ["v_head_dim"]
    if kind == "window":
        heads_names.insert(0, "swa_num_key_value_heads")
        k_names.insert(0, "swa_head_dim")
        v_names = ["swa_v_head_dim", "swa_head_dim", "v_head_dim"]
    else:
        heads_names.insert(0, "num_global_key_value_heads")
        k_names.insert(0, "global_head_dim")
    k_dim = _entry(config, *k_names, required=False) or head_dim
    if k_dim is None:
        raise ValueError(_missing_head_dim(config))
    v_dim = _entry(config, *v_names, required=False) or k_dim
    num_kv_heads = _entry(config, *heads_names, required=False) or _implied_kv_heads(config)
    window = _entry(config, *_WINDOW_NAMES) if kind == "window" else None
    return LayerGroup(num_layers, num_kv_heads, k_dim, v_dim, window)


def _implied_kv_heads(config):
    """Old configs leave the KV heads out: Falcon's switch means one, all others mean MHA."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _entry(config, "num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_head")


def _linear_group(num_layers, config):
    """Linear attention: a short convolution's tail in 16 bit and a recurrent state in 32 bit."""
    nested = config.get("linear_attn_config") or {}  # Kimi Linear: equal key and value heads
    if nested:
        config = {
            "linear_num_key_heads": nested.get("num_heads"),
            "linear_key_head_dim": nested.get("head_dim"),
            "linear_conv_kernel_dim": nested.get("short_conv_kernel_size"),
        }
    key_heads = _entry(config, "linear_num_key_heads", "kda_num_key_heads")
    key_dim = _entry(config, "linear_key_head_dim", "kda_key_head_dim")
    value_heads = (
        _entry(config, "linear_num_value_heads", "kda_num_value_heads", required=False) or key_heads
    )
    value_dim = (
        _entry(config, "linear_value_head_dim", "kda_value_head_dim", required=False) or key_dim
    )
    kernel = _entry(config, "linear_conv_kernel_dim", "kda_conv_kernel_size")
    conv_bytes = (2 * key_heads * key_dim + value_heads * value_dim) * (kernel - 1) * 2
    recurrent_bytes = value_heads * key_dim * value_dim * 4
    return LayerGroup(num_layers, key_heads, 0, 0, state_bytes=conv_bytes + recurrent_bytes)


def _missing_head_dim(config):
    hidden = _entry(config, "hidden_size", "n_embd", required=False)
    num_heads = _entry(config, "num_attention_heads", "n_head", required=False)
    if not hidden or not num_heads:
        return "config has no head_dim; it is needed. Pass head_dim=..."
    guess = hidden // num_heads
    return (
        f"config has no head_dim; hidden_size // num_attention_heads would give {guess}, which is "
        f"wrong for some models. If the model card agrees, pass head_dim={guess}."
    )
