// The widest vectors of the instruction set this translation unit is compiled for, as the compiler's own
// vector types: arithmetic is written with operators and nothing is left to an auto-vectoriser.
//
// A file that includes this is compiled once per instruction set (see CMakeLists.txt). Everything here is
// always inlined and lives in a namespace of that set's name, so that no two builds share a symbol.
#pragma once
#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef FLUCTUA_ISA
#define FLUCTUA_ISA baseline
#endif
#define FLUCTUA_INLINE inline __attribute__((always_inline))

namespace fluctua {
namespace FLUCTUA_ISA {

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512BW__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

typedef float F32 __attribute__((vector_size(kBytes), aligned(kBytes), may_alias));
typedef double F64 __attribute__((vector_size(kBytes), aligned(kBytes), may_alias));
typedef std::int32_t I32 __attribute__((vector_size(kBytes), aligned(kBytes), may_alias));
typedef std::uint32_t U32 __attribute__((vector_size(kBytes), aligned(kBytes), may_alias));
typedef std::int64_t I64 __attribute__((vector_size(kBytes), aligned(kBytes), may_alias));
typedef std::uint64_t U64 __attribute__((vector_size(kBytes), aligned(kBytes), may_alias));

template <class Real> struct Simd;
template <> struct Simd<float> {
  using V = F32;
  using I = I32;
  using U = U32;
  using Word = std::uint32_t;
  static constexpr int width = kBytes / 4;
  static constexpr int halves = 2;  // 64-bit vectors that hold one word of each lane
};
template <> struct Simd<double> {
  using V = F64;
  using I = I64;
  using U = U64;
  using Word = std::uint64_t;
  static constexpr int width = kBytes / 8;
  static constexpr int halves = 1;
};

template <class V, class Real> FLUCTUA_INLINE V load(const Real* p) { return *reinterpret_cast<const V*>(p); }
template <class V, class Real> FLUCTUA_INLINE void store(Real* p, V v) { *reinterpret_cast<V*>(p) = v; }
template <class To, class From> FLUCTUA_INLINE To bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  union {
    From from;
    To to;
  } u;
  u.from = v;
  return u.to;
}

// mask ? a : b for masks that are all ones or all zeros, as comparisons give them.
template <class I, class V> FLUCTUA_INLINE V select(I mask, V a, V b) {
  return bits<V>((mask & bits<I>(a)) | (~mask & bits<I>(b)));
}

// The 64-bit product of the low 32 bits of every lane: what Philox is made of.
FLUCTUA_INLINE U64 mul_low(U64 a, std::uint32_t b) {
#if defined(__x86_64__) || defined(_M_X64)
  const U64 factor = U64{} + b;
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512BW__)
  return bits<U64>(_mm512_mul_epu32(bits<__m512i>(a), bits<__m512i>(factor)));
#elif defined(__AVX2__)
  return bits<U64>(_mm256_mul_epu32(bits<__m256i>(a), bits<__m256i>(factor)));
#else
  return bits<U64>(_mm_mul_epu32(bits<__m128i>(a), bits<__m128i>(factor)));
#endif
#elif defined(__aarch64__)
  return bits<U64>(vmull_n_u32(vmovn_u64(bits<uint64x2_t>(a)), b));
#else
  return (a & std::uint64_t(0xFFFFFFFFu)) * std::uint64_t(b);
#endif
}

FLUCTUA_INLINE U64 xor3(U64 a, U64 b, U64 c) {
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512BW__)
  return bits<U64>(_mm512_ternarylogic_epi64(bits<__m512i>(a), bits<__m512i>(b), bits<__m512i>(c), 0x96));
#else
  return a ^ b ^ c;
#endif
}

FLUCTUA_INLINE F32 root(F32 x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512BW__)
  return bits<F32>(_mm512_sqrt_ps(bits<__m512>(x)));
#elif defined(__AVX2__)
  return bits<F32>(_mm256_sqrt_ps(bits<__m256>(x)));
#elif defined(__x86_64__)
  return bits<F32>(_mm_sqrt_ps(bits<__m128>(x)));
#elif defined(__aarch64__)
  return bits<F32>(vsqrtq_f32(bits<float32x4_t>(x)));
#else
  for (int l = 0; l < kBytes / 4; ++l) x[l] = __builtin_sqrtf(x[l]);
  return x;
#endif
}

FLUCTUA_INLINE F64 root(F64 x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512BW__)
  return bits<F64>(_mm512_sqrt_pd(bits<__m512d>(x)));
#elif defined(__AVX2__)
  return bits<F64>(_mm256_sqrt_pd(bits<__m256d>(x)));
#elif defined(__x86_64__)
  return bits<F64>(_mm_sqrt_pd(bits<__m128d>(x)));
#elif defined(__aarch64__)
  return bits<F64>(vsqrtq_f64(bits<float64x2_t>(x)));
#else
  for (int l = 0; l < kBytes / 8; ++l) x[l] = __builtin_sqrt(x[l]);
  return x;
#endif
}

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
