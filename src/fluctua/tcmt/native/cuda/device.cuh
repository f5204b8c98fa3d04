// Hardware-specific parts of the kernels. Everything else they do is plain C++, so a test can run them without
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
__device__ __forceinline__ double load(u32 address, double) {
  double v;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(v) : "r"(address) : "memory");
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

#if CLUSTER > 1
// Blocks that run one trajectory together, a cluster. A block reads its own shared memory alone; others send into it,
// and what they send is counted in bytes by a barrier in it, which opens when all that was expected is there.
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
__device__ __forceinline__ void send(u32 block, u32 address, u32 barrier, float2 v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                   address_in(block, address)),
               "f"(v.x), "f"(v.y), "r"(address_in(block, barrier))
               : "memory");
}
__device__ __forceinline__ void send(u32 block, u32 address, u32 barrier, double2 v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [%0], {%1, %2}, [%3];" ::"r"(
                   address_in(block, address)),
               "d"(v.x), "d"(v.y), "r"(address_in(block, barrier))
               : "memory");
}
__device__ __forceinline__ void send(u32 block, u32 address, u32 barrier, double v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];" ::"r"(
                   address_in(block, address)),
               "d"(v), "r"(address_in(block, barrier))
               : "memory");
}
__device__ __forceinline__ void make_barrier(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(barrier)
               : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {  // by one thread, once per phase
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool received(u32 barrier, u32 phase) {  // all of the phase of this parity
  u32 there;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(there)
      : "r"(barrier), "r"(phase)
      : "memory");
  return there;
}
__device__ __forceinline__ void sync_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}
#else
__device__ __forceinline__ u32 block_rank() { return 0; }
__device__ __forceinline__ void sync_cluster() { __syncthreads(); }
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
__device__ __forceinline__ float quotient(float a, float b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  return a * inverse;
}
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }
