// Stands in for CUDA and for device.cuh, so that the device sources compile as C++ and run without a GPU: one
// block after the other, a thread a thread. For tests of a few trajectories; nothing about it is fast.
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
#define __device__
#define __host__
#define __global__
#define __constant__
#define __shared__
#define __forceinline__ inline
#define __align__(n)
#define __launch_bounds__(...)
struct float2 { float x, y; };
struct double2 { double x, y; };
struct Index { unsigned x, y, z; };
thread_local Index threadIdx, blockIdx, blockDim, gridDim;
using std::fabs;
using std::isfinite;
using std::log2;
using std::max;
using std::min;
using std::sqrt;

class Barrier {
 public:
  explicit Barrier(int n) : n_(n) {}
  int wait_or(int flag) {
    std::unique_lock<std::mutex> lock(m_);
    any_ |= flag;
    const long round = round_;
    if (++here_ == n_) {
      here_ = 0;
      last_ = any_;
      any_ = 0;
      ++round_;
      cv_.notify_all();
    } else {
      cv_.wait(lock, [&] { return round_ != round; });
    }
    return last_;
  }

 private:
  std::mutex m_;
  std::condition_variable cv_;
  int n_, here_ = 0, any_ = 0, last_ = 0;
  long round_ = 0;
};
Barrier* barrier;
std::mutex atomic_mutex;
inline void __syncthreads() { barrier->wait_or(0); }
inline int __syncthreads_or(int v) { return barrier->wait_or(v != 0); }
template <class T> void atomicAdd(T* p, T v) {
  std::lock_guard<std::mutex> lock(atomic_mutex);
  *p += v;
}
template <class T> void sincospi(T x, T* s, T* c) {
  *s = T(std::sin(3.14159265358979323846 * double(x)));
  *c = T(std::cos(3.14159265358979323846 * double(x)));
}

alignas(16) unsigned char shared[1 << 20];
inline u32 shared_address(const void* p) { return u32(static_cast<const unsigned char*>(p) - shared); }
template <class T> T load(u32 address, T) {
  T v;
  std::memcpy(&v, shared + address, sizeof v);
  return v;
}
template <class T> void store(u32 address, T v) { std::memcpy(shared + address, &v, sizeof v); }
inline u32 fixed(u32 v) { return v; }
inline float fast_log2(float x) { return std::log2(x); }
inline float fast_sqrt(float x) { return std::sqrt(x); }
inline float fast_cos(float x) { return std::cos(x); }
inline float fast_sin(float x) { return std::sin(x); }

template <class Kernel> void launch(unsigned gx, unsigned gy, unsigned threads, Kernel kernel) {
  for (unsigned y = 0; y < gy; ++y)
    for (unsigned x = 0; x < gx; ++x) {
      Barrier b{int(threads)};
      barrier = &b;
      std::vector<std::thread> crew;
      for (unsigned t = 0; t < threads; ++t)
        crew.emplace_back([=] {
          threadIdx = {t, 0, 0};
          blockIdx = {x, y, 0};
          blockDim = {threads, 1, 1};
          gridDim = {gx, gy, 1};
          kernel();
        });
      for (auto& t : crew) t.join();
    }
}
