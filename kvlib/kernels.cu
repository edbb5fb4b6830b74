// Fused kernels for paged and quantized keys and values. Compiled by NVRTC for the GPU that is there, one template at a
// time; tests compile the same text for the CPU, where KV_ON_CPU brings its own version of the instructions below.
//
// A unit is 8 consecutive channels: 16 bytes of float16, and 8, 4 or 2 bytes of codes. ALIGNED kernels move a unit at
// once; the others move element by element and stop at the row's end. A block has THREADS threads: blockDim.x of them lie
// along a row. Scalars and offsets are 64 bits wide, so that none can wrap.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

// CuPy compiles with -ftz=true, which would turn denormal scales and values into zeros. PTX written out is exempt.
#ifndef KV_ON_CPU
#define FLOAT_OP(name, op)                                                                  \
  __device__ float name(float a, float b) {                                                 \
    float c;                                                                                \
    asm(op ".rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));                               \
    return c;                                                                               \
  }
FLOAT_OP(divide, "div")
FLOAT_OP(multiply, "mul")
FLOAT_OP(add, "add")
__device__ float widen(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ u16 narrow(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif

constexpr int THREADS = 256, UNIT = 8;
constexpr unsigned INFINITE = 0x7f800000;

__device__ float widen(float value) { return value; }
__device__ unsigned magnitude(float value) { return __float_as_uint(value) & 0x7fffffff; }  // orders like |value|
__device__ void put(float* at, float value) {
  *at = magnitude(value) < INFINITE ? value : copysignf(3.402823466e38f, value);
}
__device__ void put(u16* at, float value) {  // a float16, clamped: never infinite
  *at = narrow(fminf(fmaxf(value, -65504.f), 65504.f));
}
__device__ float load_scale(const void* scale, i64 i, bool half) {
  return half ? widen(((const u16*)scale)[i]) : ((const float*)scale)[i];
}

template <int BYTES> struct Word;
template <> struct Word<2> { typedef u16 type; };
template <> struct Word<4> { typedef unsigned type; };
template <> struct Word<8> { typedef u64 type; };
template <> struct Word<16> { typedef uint4 type; };

// Move `count` elements, a whole unit of an aligned row by the widest loads there are.
template <bool ALIGNED, class T> __device__ void copy_unit(T* to, const T* from, int count) {
  constexpr int BYTES = UNIT * sizeof(T), WIDE = BYTES < 16 ? BYTES : 16;
  if (ALIGNED) {
    typedef typename Word<WIDE>::type W;
    for (int i = 0; i < BYTES / WIDE; ++i) ((W*)to)[i] = ((const W*)from)[i];
  } else {
    for (int i = 0; i < UNIT; ++i)
      if (i < count) to[i] = from[i];
  }
}

// The codes of a unit, the first in the lowest bits.
template <int BITS, bool ALIGNED> __device__ u64 load_codes(const u8* from, int count) {
  typedef typename Word<BITS>::type W;
  if (ALIGNED) return *(const W*)from;
  u64 codes = 0;
  for (int i = 0; i < BITS; ++i)
    if (i * 8 < count * BITS) codes |= (u64)from[i] << 8 * i;
  return codes;
}
template <int BITS, bool ALIGNED> __device__ void store_codes(u8* to, u64 codes, int count) {
  typedef typename Word<BITS>::type W;
  if (ALIGNED) {
    *(W*)to = (W)codes;
  } else {
    if (count < UNIT) codes &= (1ull << count * BITS) - 1;
    for (int i = 0; i < BITS; ++i)
      if (i * 8 < count * BITS) to[i] = (u8)(codes >> 8 * i);
  }
}

// The scale of a symmetric group, by the same operations in the same order as quantization._fit.
template <int BITS> struct Fit {
  float divisor, inverse;
  __device__ Fit() = default;
  __device__ Fit(unsigned largest_bits, void* scale, i64 i, bool half, bool writes, unsigned* lost) {
    const float levels = (1 << (BITS - 1)) - 1, largest = __uint_as_float(largest_bits);
    const float exact = divide(largest, levels);
    float rounded = half ? widen(narrow(exact)) : exact;
    divisor = magnitude(rounded) ? rounded : 1.f;
    if (largest_bits > magnitude(multiply(levels + 0.25f, divisor))) {
      const float above = add(multiply(exact, 1.f + (half ? 0x1p-10f : 0x1p-23f)), half ? 0x1p-24f : 0x1p-149f);
      divisor = rounded = half ? widen(narrow(above)) : above;
    }
    // Below the bound `steps` must not trust a product; no comparison with NaN succeeds.
    inverse = divisor > 1e-30f ? 1.f / divisor : __uint_as_float(0x7fffffff);
    if (!writes) return;
    if (half) ((u16*)scale)[i] = narrow(rounded);
    else ((float*)scale)[i] = rounded;
    if (magnitude(rounded) >= INFINITE || (!magnitude(rounded) && largest_bits)) atomicOr(lost, 1u);
  }
};

template <class T> struct Unit {
  alignas(16) T values[UNIT];
  template <bool ALIGNED> __device__ void load(const T* from, int count) {
    if (!ALIGNED)
      for (int i = 0; i < UNIT; ++i) values[i] = 0;
    copy_unit<ALIGNED>(values, from, count);
  }
  // Codes are value / divisor, rounded to nearest, ties to even: adding 1.5 * 2**23 leaves the integer in the low bits.
  // A product with the inverse is off by 3e-5 at most, so it decides all but near-ties, which are divided.
  template <int BITS> __device__ u64 quantize(const Fit<BITS>* fits, int stride) const {
    const float magic = 12582912.f;
    constexpr unsigned mask = (1u << BITS) - 1, offset = BITS < 8 ? 1u << (BITS - 1) : 0;
    u64 codes = 0;
    bool sure = true;
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
      const float steps = widen(values[i]) * fits[i * stride].inverse, shifted = steps + magic;
      sure &= fabsf(steps - (shifted - magic)) < 0.4999f;
      codes |= (u64)(__float_as_uint(shifted) + offset & mask) << BITS * i;
    }
    if (sure) return codes;
    codes = 0;
    for (int i = 0; i < UNIT; ++i) {
      const float shifted = divide(widen(values[i]), fits[i * stride].divisor) + magic;
      codes |= (u64)(__float_as_uint(shifted) + offset & mask) << BITS * i;
    }
    return codes;
  }
};

// Copy words between numbered blocks and a row of blocks. Position p of the row, from `low` to `high`, is word
// p % block_words of its place p / block_words. Ids name the block at a place; null: the row lies in memory as it is.
template <class W>
__global__ void move_blocks(const W* __restrict__ from, W* to, const i64* from_ids, const i64* to_ids, i64 from_stride,
                            i64 to_stride, i64 block_words, i64 low, i64 high) {
  constexpr int HELD = 4;
  const i64 first = low + (i64)blockIdx.x * (HELD * THREADS) + threadIdx.x;
  W held[HELD];
#pragma unroll
  for (int k = 0; k < HELD; ++k) {
    const i64 p = first + k * THREADS, place = p / block_words;
    if (p < high) held[k] = from[from_ids ? from_ids[place] * from_stride + p % block_words : p - low];
  }
#pragma unroll
  for (int k = 0; k < HELD; ++k) {
    const i64 p = first + k * THREADS, place = p / block_words;
    if (p < high) to[to_ids ? to_ids[place] * to_stride + p % block_words : p - low] = held[k];
  }
}

// Quantize rows [rows, channels], one scale for each run of `run` channels, shared by blockDim.x lanes of a warp.
template <class T, int BITS, bool ALIGNED>
__global__ void quantize_token(const T* __restrict__ values, u8* codes, void* scale, unsigned* lost, i64 half,
                               i64 num_runs, i64 runs_per_row, i64 run, i64 channels, i64 row_bytes) {
  constexpr int HELD = 2;
  const i64 id = (i64)blockIdx.x * blockDim.y + threadIdx.y, row = runs_per_row > 1 ? id / runs_per_row : id;
  const i64 start = (id - row * runs_per_row) * run;
  const int length = (int)min(run, channels - start), width = blockDim.x, lane = threadIdx.x, stride = HELD * width;
  // A lane without work stays: a warp's shuffles need all of it.
  const int units = id < num_runs ? (length + UNIT - 1) / UNIT : 0;
  values += row * channels + start;
  codes += row * row_bytes + start * BITS / 8;
  Unit<T> held[HELD];
  unsigned largest = 0;
  int first = lane;
  for (; first < units; first += stride) {
#pragma unroll
    for (int k = 0, c = first; k < HELD; ++k, c += width)
      if (c < units) held[k].template load<ALIGNED>(values + c * UNIT, length - c * UNIT);
#pragma unroll
    for (int k = 0; k < HELD; ++k)
      for (int i = 0; i < UNIT; ++i)
        if (first + k * width < units) largest = max(largest, magnitude(widen(held[k].values[i])));
  }
  for (int step = width / 2; step; step /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
  const Fit<BITS> fit(largest, scale, id, half, lane == 0 && units, lost);
  // Backwards: the last units are still in registers, the ones before them in the cache.
  for (first -= stride; first >= 0; first -= stride) {
#pragma unroll
    for (int k = 0, c = first; k < HELD; ++k, c += width) {
      if (c >= units) break;
      if (first + stride < units) held[k].template load<ALIGNED>(values + c * UNIT, length - c * UNIT);
      store_codes<BITS, ALIGNED>(codes + c * BITS, held[k].template quantize<BITS>(&fit, 0), length - c * UNIT);
    }
  }
}

// Quantize [batch, tokens, channels], one scale for each channel and run of `run` tokens. A block takes blockDim.x units
// of ROWS * blockDim.y tokens. FUSED: that is a whole run. Else the largest magnitudes are found first, by all blocks of
// a run (LARGEST), then applied (APPLY).
enum Pass { FUSED, LARGEST, APPLY };
template <class T, int BITS, bool ALIGNED, int PASS>
__global__ void __launch_bounds__(THREADS, ALIGNED ? 4 : 2)
quantize_channel(const T* __restrict__ values, u8* codes, void* scale, unsigned* lost, i64 half, unsigned* all_largest,
                 i64 tokens, i64 channels, i64 run, i64 row_bytes, i64 slabs, i64 parts, i64 runs) {
  constexpr int ROWS = 8 / sizeof(T);
  __shared__ unsigned largest[THREADS * UNIT];
  __shared__ Fit<BITS> fits[THREADS];
  const int width = blockDim.x, tall = blockDim.y, columns = width * UNIT, column = threadIdx.y * width + threadIdx.x;
  const unsigned strip = blockIdx.x / (unsigned)slabs, id = strip / (unsigned)parts, batch = id / (unsigned)runs;
  const i64 left = (i64)(blockIdx.x - strip * (unsigned)slabs) * columns, part = strip - id * (unsigned)parts;
  const i64 start = (i64)(id - batch * (unsigned)runs) * run, stop = min(start + run, tokens);
  const i64 token = start + part * tall * ROWS + threadIdx.y, channel = left + threadIdx.x * UNIT;
  const int count = (int)min(channels - channel, (i64)UNIT);
  const i64 mine = count > 0 ? (stop - token + tall - 1) / tall : 0;  // rows of this thread, ROWS at most
  values += (batch * tokens + token) * channels + channel;
  Unit<T> units[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    if (r < mine) units[r].template load<ALIGNED>(values + r * tall * channels, count);
  if (PASS != APPLY) {
    for (int i = 0; i < UNIT; ++i) {
      unsigned most = 0;
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        if (r < mine) most = max(most, magnitude(widen(units[r].values[i])));
      largest[column * UNIT + i] = most;
    }
    __syncthreads();
  }
  if (column < columns && left + column < channels) {
    const i64 group = (i64)id * channels + left + column;
    unsigned most = PASS == APPLY ? all_largest[group] : 0;
    if (PASS != APPLY)
      for (int row = 0; row < tall; ++row) most = max(most, largest[row * columns + column]);
    if (PASS == LARGEST) atomicMax(&all_largest[group], most);
    else fits[column] = Fit<BITS>(most, scale, group, half, part == 0, lost);
  }
  if (PASS == LARGEST) return;
  __syncthreads();
  codes += (batch * tokens + token) * row_bytes + channel / UNIT * BITS;
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    if (r < mine)
      store_codes<BITS, ALIGNED>(codes + r * tall * row_bytes,
                                 units[r].template quantize<BITS>(fits + threadIdx.x * UNIT, 1), count);
}

// Read codes back, out = code * scale: rows of [blocks, slots, heads, channels], whose first three have any strides.
// A row of the output is slot row % slots of place row / slots; a table says which block stands there. A scale belongs to
// run_slots slots and run_channels channels: one, or a multiple of a unit.
template <class T, int BITS, bool ALIGNED>
__global__ void dequantize(const u8* __restrict__ codes, const void* __restrict__ scale, T* out, const i64* table,
                           i64 half, i64 rows, i64 slots, i64 heads, i64 channels, i64 run_slots, i64 run_channels,
                           i64 code_block, i64 code_slot, i64 code_head, i64 scale_block, i64 scale_slot,
                           i64 scale_head) {
  constexpr int HELD = 4;
  const i64 head_units = (channels + UNIT - 1) / UNIT, slabs = (heads * head_units + blockDim.x - 1) / blockDim.x;
  const i64 column = blockIdx.x % slabs * blockDim.x + threadIdx.x, head = column / head_units;
  const i64 first = blockIdx.x / slabs * blockDim.y * HELD + threadIdx.y, channel = column % head_units * UNIT;
  const int count = (int)min(channels - channel, (i64)UNIT);
  if (head >= heads) return;
  codes += head * code_head + channel / UNIT * BITS;
  u64 held[HELD];
  i64 at[HELD];
#pragma unroll
  for (int k = 0; k < HELD; ++k) {
    const i64 row = first + k * blockDim.y, slot = row % slots;
    if (row >= rows) break;
    const i64 block = table ? table[row / slots] : row / slots;
    held[k] = load_codes<BITS, ALIGNED>(codes + block * code_block + slot * code_slot, count);
    at[k] = block * scale_block + (run_slots == 1 ? slot : slot / run_slots) * scale_slot + head * scale_head
            + channel / run_channels;
  }
  const bool own = run_channels == 1;  // a scale for every channel; else one for the unit
  float factors[UNIT];
#pragma unroll
  for (int k = 0; k < HELD; ++k) {
    const i64 row = first + k * blockDim.y;
    if (row >= rows) return;
    if (k == 0 || at[k] != at[k - 1])
      for (int i = 0; i < UNIT; ++i)
        factors[i] = i && (!own || i >= count) ? factors[0] : load_scale(scale, at[k] + i, half);
    // Bits below the mantissa of 2**23 are an integer without a conversion. Whole bytes are made to count from 0 first.
    const u64 codes_from_0 = BITS == 8 ? held[k] ^ 0x8080808080808080 : held[k];
    alignas(16) T values[UNIT];
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
      const unsigned code = (unsigned)(codes_from_0 >> BITS * i) & ((1u << BITS) - 1);
      const float steps = __uint_as_float(0x4b000000 | code) - (8388608.f + (1 << (BITS - 1)));
      put(values + i, multiply(steps, factors[i]));
    }
    copy_unit<ALIGNED>(out + (row * heads + head) * channels + channel, values, count);
  }
}
