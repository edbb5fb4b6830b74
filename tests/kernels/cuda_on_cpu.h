// Runs the kernels of kvlib/kernels.cu on a CPU: every CUDA thread is a fiber, one block after the other. A fiber runs
// until it waits for others or ends; in which order is up to the caller, so a missing barrier shows. Shared memory
// starts as 0xff. What a GPU would fault on (an address outside every array, a misaligned vector) ends the launch with
// an error here too; index overflow and indices outside a fixed array, which a GPU would not notice, do as well.
#define KV_ON_CPU
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <cmath>
#include <utility>
#include <vector>
#include <ucontext.h>

#define __global__
#define __device__
#define __restrict__
#define __launch_bounds__(...)
using std::max;
using std::min;
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct uint3 { unsigned x, y, z; };
typedef uint3 dim3;
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

namespace cpu {
constexpr size_t STACK_BYTES = 64 << 10;
enum State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };
struct Fiber {
  ucontext_t start;
  jmp_buf here;
  std::vector<char> stack = std::vector<char>(STACK_BYTES);
  uint3 index;
  State state;
  bool started;
  int line;
  unsigned long long said;
};
struct Region { char* bytes; size_t count; };

static std::vector<Fiber> fibers;
static std::vector<Region> regions;
static jmp_buf scheduler;
static sigjmp_buf rescue;
static unsigned current;
static char error[300];
static void (*run_one)(const void*, void**);
static const void* kernel;
static void** arguments;

template <class T, int LINE> T& shared() {  // one array per place in the source, as the compiler would lay it out
  alignas(16) static char bytes[sizeof(T)];
  static const bool known = (memset(bytes, 0xff, sizeof bytes), regions.push_back({bytes, sizeof bytes}), true);
  (void)known;
  return *reinterpret_cast<T*>(bytes);
}

static void wait(State state, int line) {
  Fiber& fiber = fibers[current];
  fiber.state = state, fiber.line = line;
  if (!_setjmp(fiber.here)) _longjmp(scheduler, 1);
}

static void enter() {
  run_one(kernel, arguments);
  fibers[current].state = DONE;
  _longjmp(scheduler, 1);
}

static void resume(unsigned i) {
  Fiber& fiber = fibers[i];
  current = i, threadIdx = fiber.index;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.here, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

static void on_fault(int number, siginfo_t* info, void*) {
  const char* what = number == SIGILL ? "misaligned access, index outside its array or integer overflow"
                                      : "access outside every array";
  snprintf(error, sizeof error, "%s at %p: block %u, thread (%u, %u)", what, info->si_addr, blockIdx.x, threadIdx.x,
           threadIdx.y);
  siglongjmp(rescue, 1);
}

// Let those go on who wait for nobody any more; false if there are none.
static bool release() {
  const unsigned count = fibers.size();
  bool any = false;
  auto all = [&](unsigned first, unsigned last, State state) {
    for (unsigned i = first; i < last; ++i)
      if (fibers[i].state != state || fibers[i].line != fibers[first].line) return false;
    for (unsigned i = first; i < last; ++i) fibers[i].state = READY;
    return true;
  };
  if (all(0, count, AT_BLOCK_BARRIER)) return true;
  for (unsigned first = 0; first < count; first += 32) any |= all(first, min(first + 32, count), AT_WARP_BARRIER);
  return any;
}

static void shuffle(std::vector<unsigned>& items) {
  static unsigned random = 1;
  for (size_t i = items.size(); i > 1; --i) {
    random = random * 1664525u + 1013904223u;
    std::swap(items[i - 1], items[(random >> 8) % i]);
  }
}

static int run(void (*one)(const void*, void**), const void* function, void** values, const unsigned* grid,
               const unsigned* block, unsigned order, char* message) {  // grid: how many blocks, and the first one
  run_one = one, kernel = function, arguments = values;
  const unsigned count = block[0] * block[1];
  gridDim = {grid[0] + grid[1], 1, 1}, blockDim = {block[0], block[1], 1};
  if (fibers.size() != count) fibers = std::vector<Fiber>(count);
  static std::vector<char> alternate(STACK_BYTES);
  stack_t stack{}, old_stack;
  stack.ss_sp = alternate.data(), stack.ss_size = alternate.size();
  sigaltstack(&stack, &old_stack);
  const int signals[] = {SIGSEGV, SIGBUS, SIGILL};
  struct sigaction action{}, old[3];
  action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &action, &old[i]);
  std::vector<unsigned> turns(count), blocks(grid[0]);
  for (unsigned i = 0; i < count; ++i) turns[i] = order == 1 ? count - 1 - i : i;
  for (unsigned i = 0; i < grid[0]; ++i) blocks[i] = grid[1] + (order == 1 ? grid[0] - 1 - i : i);
  if (order > 1) shuffle(blocks);
  error[0] = 0;
  if (!sigsetjmp(rescue, 1))
    for (unsigned b : blocks) {
      blockIdx = {b, 0, 0};
      for (Region& region : regions) memset(region.bytes, 0xff, region.count);
      for (unsigned i = 0; i < count; ++i) {
        Fiber& fiber = fibers[i];
        fiber.index = {i % block[0], i / block[0], 0}, fiber.state = READY, fiber.started = false;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.data(), fiber.start.uc_stack.ss_size = STACK_BYTES;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, enter, 0);
      }
      for (bool over = false; !over && !error[0];) {
        if (order > 1) shuffle(turns);
        for (unsigned i : turns)
          if (fibers[i].state == READY) resume(i);
        over = true;
        int line = 0;
        for (Fiber& fiber : fibers)
          if (fiber.state != DONE) over = false, line = max(line, fiber.line);
        if (!over && !release())
          snprintf(error, sizeof error, "block %u: not all threads reach the barrier of line %d", b, line);
      }
      if (error[0]) break;
    }
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  strcpy(message, error);
  return error[0] != 0;
}

template <class... A, size_t... I> void call(void (*function)(A...), void** values, std::index_sequence<I...>) {
  function(*reinterpret_cast<std::remove_const_t<A>*>(values[I])...);
}
template <class... A>
int launch(void (*function)(A...), void** values, const unsigned* grid, const unsigned* block, unsigned order, char* message) {
  auto one = [](const void* f, void** v) {
    call(reinterpret_cast<void (*)(A...)>(const_cast<void*>(f)), v, std::index_sequence_for<A...>{});
  };
  return run(one, reinterpret_cast<const void*>(function), values, grid, block, order, message);
}
}  // namespace cpu

#define __syncthreads() cpu::wait(cpu::AT_BLOCK_BARRIER, __LINE__)
template <class T> T shuffle_xor(T value, int mask, int line) {
  const unsigned me = cpu::current;
  cpu::fibers[me].said = 0;
  memcpy(&cpu::fibers[me].said, &value, sizeof value);
  cpu::wait(cpu::AT_WARP_BARRIER, line);
  memcpy(&value, &cpu::fibers[me ^ mask].said, sizeof value);
  cpu::wait(cpu::AT_WARP_BARRIER, line);
  return value;
}
#define __shfl_xor_sync(all, value, mask) shuffle_xor(value, mask, __LINE__)
inline void atomicOr(unsigned* at, unsigned bits) { *at |= bits; }
inline void atomicMax(unsigned* at, unsigned value) { *at = max(*at, value); }

template <class To, class From> To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From), "");
  To bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline unsigned __float_as_uint(float value) { return bits_of<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return bits_of<float>(bits); }
inline float divide(float a, float b) { return a / b; }
inline float multiply(float a, float b) { return a * b; }
inline float add(float a, float b) { return a + b; }
inline float widen(unsigned short bits) { return bits_of<_Float16>(bits); }
inline unsigned short narrow(float value) { return bits_of<unsigned short>((_Float16)value); }
