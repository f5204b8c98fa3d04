// What the kernels need of the machine itself. Everything else they do is plain C++, so a test can run them without
// a GPU by putting another text in place of this one. Compiled at run time: includes nothing.

typedef unsigned int u32;
typedef unsigned long long u64;

// Shared memory by its own 32-bit addresses: neighbours are stored as addresses, the buffer is an immediate offset,
// and nothing is computed to load one.
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float2 load(u32 address, float2) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ double2 load(u32 address, double2) {
  double2 v;
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(v.x), "=d"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store(u32 address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void store(u32 address, double v) {
  asm volatile("st.shared.f64 [%0], %1;" ::"r"(address), "d"(v) : "memory");
}
__device__ __forceinline__ void store(u32 address, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}
__device__ __forceinline__ void store(u32 address, double2 v) {
  asm volatile("st.shared.v2.f64 [%0], {%1, %2};" ::"r"(address), "d"(v.x), "d"(v.y) : "memory");
}

// Blocks that run one trajectory together, a cluster. Each reads its own shared memory alone, and writes into that of
// others. All of it is there for all of them once they have arrived and waited; a single block has its own barrier.
#if CLUSTER > 1
__device__ __forceinline__ u32 block_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ u32 address_in(u32 block, u32 address) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}
__device__ __forceinline__ void store_in(u32 block, u32 address, float2 v) {
  const u32 there = address_in(block, address);
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there), "f"(v.x), "f"(v.y) : "memory");
}
__device__ __forceinline__ void store_in(u32 block, u32 address, double2 v) {
  const u32 there = address_in(block, address);
  asm volatile("st.shared::cluster.v2.f64 [%0], {%1, %2};" ::"r"(there), "d"(v.x), "d"(v.y) : "memory");
}
__device__ __forceinline__ void arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#else
__device__ __forceinline__ u32 block_rank() { return 0; }
__device__ __forceinline__ void arrive() {}
__device__ __forceinline__ void wait() { __syncthreads(); }
#endif

// A value the compiler keeps instead of computing it anew from its parts at every use.
__device__ __forceinline__ u32 fixed(u32 v) {
  asm volatile("mov.u32 %0, %1;" : "=r"(v) : "r"(v));
  return v;
}

// The special-function unit. Denormals are flushed, which saves a rescaling that no argument here needs.
__device__ __forceinline__ float fast_log2(float x) {
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
}
__device__ __forceinline__ float fast_sqrt(float x) {
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
}
__device__ __forceinline__ float fast_cos(float x) {
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
}
__device__ __forceinline__ float fast_sin(float x) {
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
}

// a/b for numbers of ordinary size, to an ulp or two.
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }
