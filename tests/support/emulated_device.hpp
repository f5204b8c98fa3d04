// Stands in for CUDA and for device.cuh, so that the device sources compile as C++ and run without a GPU: one block or
// cluster of blocks after the other, and within it one thread until it waits for others. Every other one runs its
// threads backwards, so that a missing barrier shows.
//
// A thread begins with `setcontext`; from then on it and the scheduler jump to each other, which takes no system call.
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

typedef unsigned int u32;
typedef unsigned long long u64;
#define __device__
#define __host__
#define __global__
#define __constant__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __align__(n)
#define __launch_bounds__(...)
#define __cluster_dims__(...)
struct float2 { float x, y; };
struct double2 { double x, y; };
struct Index { unsigned x, y, z; };
Index threadIdx, blockIdx, blockDim, gridDim;
using std::fabs;
using std::fma;
using std::isfinite;
using std::log2;
using std::max;
using std::min;
using std::sqrt;

// Every member of what is kept in arrays here has a constant value from the start: a constructor that ran for all of
// them would touch 100 MiB per library.
struct Meeting {  // of a cluster's, a block's or a warp's threads
  int size = 0, here = 0, flag = 0, last = 0;
  long round = 0;
};
struct Warp {
  Meeting meeting;
  double value[32] = {};
  u32 left[32][4] = {}, right[32][2] = {};  // of a product by tensor cores
};
struct Fiber {
  ucontext_t context = {};
  jmp_buf place = {};
  char* stack = nullptr;  // kept for all launches, and not filled: what is not touched takes no memory
  unsigned index = 0, block = 0;  // of its block, in a cluster
  bool begun = false, done = false;
  const Meeting* waits = nullptr;  // until its round is over
  long round = 0;
};
jmp_buf scheduler;
const size_t STACK = 256 << 10;
Fiber* running;
const unsigned LARGEST_BLOCK = 1024, LARGEST_CLUSTER = 16;  // threads, blocks
Warp warps[LARGEST_CLUSTER][LARGEST_BLOCK / 32];
Fiber fibers[LARGEST_CLUSTER * LARGEST_BLOCK];
Meeting block_meetings[LARGEST_CLUSTER], cluster_meeting;

inline long come(Meeting& m, int flag = 0) {
  m.flag |= flag;
  const long round = m.round;
  if (++m.here == m.size) {
    m.here = 0;
    m.last = m.flag;
    m.flag = 0;
    ++m.round;
  }
  return round;
}
inline int stay(Meeting& m, long round) {  // until all have come
  running->waits = &m;
  running->round = round;
  if (m.round == round && !_setjmp(running->place)) _longjmp(scheduler, 1);
  running->waits = nullptr;
  return m.last;
}
inline int meet(Meeting& m, int flag = 0) { return stay(m, come(m, flag)); }
inline void __syncthreads() { meet(block_meetings[running->block]); }
inline int __syncthreads_or(int v) { return meet(block_meetings[running->block], v != 0); }
inline Warp& warp_of_thread() { return warps[running->block][threadIdx.x / 32]; }
inline void __syncwarp() { meet(warp_of_thread().meeting); }
template <class T> void atomicAdd(T* p, T v) { *p += v; }
inline void atomicOr(int* p, int v) { *p |= v; }

template <class T> T __shfl_xor_sync(unsigned, T v, int d) {
  Warp& w = warp_of_thread();
  std::memcpy(w.value + (threadIdx.x & 31), &v, sizeof v);
  meet(w.meeting);
  T other;
  std::memcpy(&other, w.value + ((threadIdx.x & 31) ^ d), sizeof other);
  meet(w.meeting);
  return other;
}
template <class T> T __shfl_sync(unsigned, T v, int from) {
  Warp& w = warp_of_thread();
  std::memcpy(w.value + (threadIdx.x & 31), &v, sizeof v);
  meet(w.meeting);
  T other;
  std::memcpy(&other, w.value + from, sizeof other);
  meet(w.meeting);
  return other;
}
inline unsigned __ballot_sync(unsigned, bool v) {
  Warp& w = warp_of_thread();
  w.value[threadIdx.x & 31] = v;
  meet(w.meeting);
  unsigned yes = 0;
  for (int l = 0; l < 32; ++l) yes |= unsigned(w.value[l] != 0) << l;
  meet(w.meeting);
  return yes;
}
inline int __ffs(unsigned v) { return __builtin_ffs(int(v)); }
inline unsigned __match_any_sync(unsigned, int v) {
  Warp& w = warp_of_thread();
  w.value[threadIdx.x & 31] = v;
  meet(w.meeting);
  unsigned peers = 0;
  for (int l = 0; l < 32; ++l) peers |= unsigned(w.value[l] == v) << l;
  meet(w.meeting);
  return peers;
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
template <class T> T quotient(T a, T b) { return a / b; }
template <class T> void sincospi(T x, T* s, T* c) {
  *s = T(std::sin(3.14159265358979323846 * double(x)));
  *c = T(std::cos(3.14159265358979323846 * double(x)));
}

const size_t SHARED = 1 << 20;
alignas(16) unsigned char memory[LARGEST_CLUSTER][SHARED];
unsigned char* shared;  // of the thread's block
inline u32 shared_address(const void* p) { return u32(static_cast<const unsigned char*>(p) - shared); }
template <class T> T load(u32 address, T) {
  T v;
  std::memcpy(&v, shared + address, sizeof v);
  return v;
}
template <class T> void store(u32 address, T v) { std::memcpy(shared + address, &v, sizeof v); }
inline u32 fixed(u32 v) { return v; }

#ifndef CLUSTER
#define CLUSTER 1
#endif
inline u32 block_rank() { return running->block; }
inline void sync_cluster() { meet(CLUSTER > 1 ? cluster_meeting : block_meetings[running->block]); }

struct Mail : Meeting {  // a barrier of a block that counts bytes
  long bytes = 0;
  bool expected = false;
  void count(long more) {
    bytes += more;
    if (expected && bytes < 0) std::abort();  // a block is ahead, and has sent what belongs to the next round
    if (expected && bytes == 0) {
      expected = false;
      ++round;
    }
  }
};
Mail mails[LARGEST_CLUSTER][SHARED / 8];  // one for every place where a barrier may be
inline Mail& mail_of(u32 block, u32 barrier) { return mails[block][barrier / 8]; }
inline void make_barrier(u32 barrier) { mail_of(running->block, barrier) = Mail(); }
template <class T> void send(u32 block, u32 address, u32 barrier, T v) {
  std::memcpy(memory[block] + address, &v, sizeof v);
  mail_of(block, barrier).count(-long(sizeof v));
}
inline void expect(u32 barrier, u32 bytes) {
  Mail& m = mail_of(running->block, barrier);
  if (m.expected) std::abort();
  m.expected = true;
  m.count(bytes);
}
inline bool received(u32 barrier, u32 phase) {
  Mail& m = mail_of(running->block, barrier);
  if ((m.round & 1) == phase) stay(m, m.round);
  return true;
}
template <class To, class From> To emulated_bits(From v) {
  To to;
  std::memcpy(&to, &v, sizeof to);
  return to;
}
inline float __int_as_float(int v) { return emulated_bits<float>(v); }
inline float __uint_as_float(u32 v) { return emulated_bits<float>(v); }
inline u32 __float_as_uint(float v) { return emulated_bits<u32>(v); }
inline double __longlong_as_double(long long v) { return emulated_bits<double>(v); }
inline float __logf(float x) { return std::log(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float fast_log2(float x) { return std::log2(x); }
inline float fast_sqrt(float x) { return std::sqrt(x); }
inline float fast_cos(float x) { return std::cos(x); }
inline float fast_sin(float x) { return std::sin(x); }

// Stands for `multiply_16_8_8` of batches.cuh. Tensor cores ignore the 13 lowest bits of an operand.
#define EMULATED
inline float cut_bits(u32 v) { return __uint_as_float(v & 0xffffe000u); }
inline void multiply_16_8_8(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  Warp& w = warp_of_thread();
  const int self = threadIdx.x & 31;
  const u32 left[4] = {a0, a1, a2, a3}, right[2] = {b0, b1};
  std::memcpy(w.left[self], left, sizeof left);
  std::memcpy(w.right[self], right, sizeof right);
  meet(w.meeting);
  for (int c = 0; c < 4; ++c) {
    const int row = self / 4 + c / 2 * 8, column = self % 4 * 2 + c % 2;
    for (int t = 0; t < 4; ++t)
      for (int half = 0; half < 2; ++half)
        sum[c] += cut_bits(w.left[row % 8 * 4 + t][row / 8 + 2 * half]) * cut_bits(w.right[column * 4 + t][half]);
  }
  meet(w.meeting);
}

void (*body)();
template <class Kernel> Kernel* launched;
inline void enter() {
  body();
  running->done = true;
  _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void go_on(Fiber& f) {  // until it waits or is done
  if (_setjmp(scheduler)) return;
  if (f.begun) _longjmp(f.place, 1);
  f.begun = true;
  setcontext(&f.context);
}

inline void run_blocks(unsigned first, unsigned blocks, unsigned threads, bool backwards) {
  cluster_meeting = Meeting{int(blocks * threads)};
  for (unsigned b = 0; b < blocks; ++b) {
    block_meetings[b] = Meeting{int(threads)};
    for (unsigned w = 0; w < (threads + 31) / 32; ++w) warps[b][w] = Warp{Meeting{32}};
    if (blocks > 1) std::memset(memory[b], 0xFF, SHARED);  // not a number: what is not written must show
  }
  for (unsigned t = 0; t < blocks * threads; ++t) {
    Fiber& f = fibers[t];
    if (!f.stack) f.stack = new char[STACK];
    f.index = t % threads;
    f.block = t / threads;
    f.begun = f.done = false;
    f.waits = nullptr;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack;
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  for (unsigned left = blocks * threads; left > 0;) {
    bool moved = false;
    for (unsigned b = 0; b < blocks && !moved; ++b)  // the first that can go on: as far ahead of others as it gets
      for (unsigned i = 0; i < threads; ++i) {
        const unsigned at = b * threads + i;
        Fiber& f = fibers[backwards ? blocks * threads - 1 - at : at];
        if (f.done || (f.waits && f.waits->round == f.round)) continue;
        running = &f;
        threadIdx = {f.index, 0, 0};
        blockIdx.x = first + f.block;
        shared = memory[f.block];
        moved = true;
        go_on(f);
        left -= f.done;
      }
    if (!moved) std::abort();  // all wait for each other
  }
}

template <class Kernel>
void launch(unsigned gx, unsigned gy, unsigned gz, unsigned threads, unsigned cluster, Kernel kernel) {
  if (threads > LARGEST_BLOCK || cluster > LARGEST_CLUSTER || gx % cluster) std::abort();
  launched<Kernel> = &kernel;
  body = [] { (*launched<Kernel>)(); };
  blockDim = {threads, 1, 1};
  gridDim = {gx, gy, gz};
  for (unsigned z = 0; z < gz; ++z)
    for (unsigned y = 0; y < gy; ++y)
      for (unsigned x = 0; x < gx; x += cluster) {
        blockIdx = {x, y, z};
        run_blocks(x, cluster, threads, (x / cluster + y) % 2);
      }
}
