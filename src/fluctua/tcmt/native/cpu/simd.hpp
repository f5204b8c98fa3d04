// The widest vectors of the instruction set this translation unit is compiled for.
//
// A file that includes this is compiled once per instruction set (see CMakeLists.txt). Everything here is
// always inlined and lives in a namespace of that set's name, so that no two builds share a symbol.
#pragma once
#include <cstdint>

#include "vectors.hpp"

#ifndef FLUCTUA_ISA
#define FLUCTUA_ISA baseline
#endif
#define FLUCTUA_INLINE inline __attribute__((always_inline))

namespace fluctua {
namespace FLUCTUA_ISA {

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define FLUCTUA_BYTES 64
#elif defined(__AVX2__)
#define FLUCTUA_BYTES 32
#else
#define FLUCTUA_BYTES 16
#endif
constexpr int kBytes = FLUCTUA_BYTES;

typedef float F32 VECTOR(kBytes);
typedef double F64 VECTOR(kBytes);
typedef std::int32_t I32 VECTOR(kBytes);
typedef std::uint32_t U32 VECTOR(kBytes);
typedef std::int64_t I64 VECTOR(kBytes);
typedef std::uint64_t U64 VECTOR(kBytes);

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

// a₀ b₀ a₁ b₁ …: the first and the second half.
#if defined(__GNUC__) && !defined(__clang__)
#if FLUCTUA_BYTES == 64
#define FLUCTUA_LOW32  I32{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}
#define FLUCTUA_HIGH32 I32{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}
#define FLUCTUA_LOW64  I64{0, 8, 1, 9, 2, 10, 3, 11}
#define FLUCTUA_HIGH64 I64{4, 12, 5, 13, 6, 14, 7, 15}
#elif FLUCTUA_BYTES == 32
#define FLUCTUA_LOW32  I32{0, 8, 1, 9, 2, 10, 3, 11}
#define FLUCTUA_HIGH32 I32{4, 12, 5, 13, 6, 14, 7, 15}
#define FLUCTUA_LOW64  I64{0, 4, 1, 5}
#define FLUCTUA_HIGH64 I64{2, 6, 3, 7}
#else
#define FLUCTUA_LOW32  I32{0, 4, 1, 5}
#define FLUCTUA_HIGH32 I32{2, 6, 3, 7}
#define FLUCTUA_LOW64  I64{0, 2}
#define FLUCTUA_HIGH64 I64{1, 3}
#endif
FLUCTUA_INLINE void zip(F32 a, F32 b, F32& low, F32& high) {
  low = __builtin_shuffle(a, b, FLUCTUA_LOW32);
  high = __builtin_shuffle(a, b, FLUCTUA_HIGH32);
}
FLUCTUA_INLINE void zip(F64 a, F64 b, F64& low, F64& high) {
  low = __builtin_shuffle(a, b, FLUCTUA_LOW64);
  high = __builtin_shuffle(a, b, FLUCTUA_HIGH64);
}
#else
template <class V> FLUCTUA_INLINE void zip(V a, V b, V& low, V& high) {
  constexpr int half = int(sizeof(V) / sizeof(a[0])) / 2;
  for (int i = 0; i < half; ++i) {
    low[2 * i] = a[i];
    low[2 * i + 1] = b[i];
    high[2 * i] = a[half + i];
    high[2 * i + 1] = b[half + i];
  }
}
#endif

// a/b, for numbers of ordinary size; AVX-512 divides slowly and has a reciprocal of 14 bits to start from.
template <class V> FLUCTUA_INLINE V ratio(V a, V b) { return a / b; }
#if FLUCTUA_BYTES == 64
template <> FLUCTUA_INLINE F32 ratio<F32>(F32 a, F32 b) {
  const F32 r = bits<F32>(_mm512_rcp14_ps(bits<__m512>(b)));
  return a * (r * (2.0f - b * r));
}
#endif

// Whether any lane of a is below b.
#if FLUCTUA_BYTES == 64
FLUCTUA_INLINE bool any_below(F32 a, float b) {
  return _mm512_cmp_ps_mask(bits<__m512>(a), _mm512_set1_ps(b), _CMP_LT_OQ) != 0;
}
FLUCTUA_INLINE bool any_below(F64 a, double b) {
  return _mm512_cmp_pd_mask(bits<__m512d>(a), _mm512_set1_pd(b), _CMP_LT_OQ) != 0;
}
#elif FLUCTUA_BYTES == 32
FLUCTUA_INLINE bool any_below(F32 a, float b) { return _mm256_movemask_ps(bits<__m256>(a < b)) != 0; }
FLUCTUA_INLINE bool any_below(F64 a, double b) { return _mm256_movemask_pd(bits<__m256d>(a < b)) != 0; }
#elif defined(__x86_64__) || defined(_M_X64)
FLUCTUA_INLINE bool any_below(F32 a, float b) { return _mm_movemask_ps(bits<__m128>(a < b)) != 0; }
FLUCTUA_INLINE bool any_below(F64 a, double b) { return _mm_movemask_pd(bits<__m128d>(a < b)) != 0; }
#else
FLUCTUA_INLINE bool any_below(F32 a, float b) { return (a[0] < b) | (a[1] < b) | (a[2] < b) | (a[3] < b); }
FLUCTUA_INLINE bool any_below(F64 a, double b) { return (a[0] < b) | (a[1] < b); }
#endif

FLUCTUA_INLINE F32 root(F32 x) { return root_of_floats(x); }
FLUCTUA_INLINE F64 root(F64 x) { return root_of_doubles(x); }

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
