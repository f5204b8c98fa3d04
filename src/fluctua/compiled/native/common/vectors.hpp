// Vectors of numbers as the compiler's own types (GCC, Clang): arithmetic is written with operators, and nothing is
// left to an auto-vectoriser. For the CPU.
#pragma once
#include "inline.hpp"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define VECTOR(bytes) __attribute__((vector_size(bytes), aligned(bytes), may_alias))

template <class To, class From> COMMON_INLINE To bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  union {
    From from;
    To to;
  } u;
  u.from = v;
  return u.to;
}

// ------------------------------------------------------------------------------------------ square roots

// of the longest vectors of the processor that fit
#if defined(__AVX512F__)
COMMON_INLINE __m512 piece_root(__m512 x) { return _mm512_sqrt_ps(x); }
COMMON_INLINE __m512d piece_root(__m512d x) { return _mm512_sqrt_pd(x); }
#endif
#if defined(__AVX__)
COMMON_INLINE __m256 piece_root(__m256 x) { return _mm256_sqrt_ps(x); }
COMMON_INLINE __m256d piece_root(__m256d x) { return _mm256_sqrt_pd(x); }
#endif
#if defined(__x86_64__)
COMMON_INLINE __m128 piece_root(__m128 x) { return _mm_sqrt_ps(x); }
COMMON_INLINE __m128d piece_root(__m128d x) { return _mm_sqrt_pd(x); }
#elif defined(__aarch64__)
COMMON_INLINE float32x4_t piece_root(float32x4_t x) { return vsqrtq_f32(x); }
COMMON_INLINE float64x2_t piece_root(float64x2_t x) { return vsqrtq_f64(x); }
#endif

template <class Piece, class V> COMMON_INLINE V root_by_pieces(V x) {
  Piece pieces[sizeof(V) / sizeof(Piece)];
  __builtin_memcpy(pieces, &x, sizeof x);
  for (unsigned k = 0; k < sizeof(V) / sizeof(Piece); ++k) pieces[k] = piece_root(pieces[k]);
  __builtin_memcpy(&x, pieces, sizeof x);
  return x;
}

template <class V> COMMON_INLINE V root_of_floats(V x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) % 64 == 0) return root_by_pieces<__m512>(x);
#endif
#if defined(__AVX__)
  if constexpr (sizeof(V) % 32 == 0) return root_by_pieces<__m256>(x);
#endif
#if defined(__x86_64__)
  if constexpr (sizeof(V) % 16 == 0) return root_by_pieces<__m128>(x);
#elif defined(__aarch64__)
  if constexpr (sizeof(V) % 16 == 0) return root_by_pieces<float32x4_t>(x);
#endif
  for (unsigned l = 0; l < sizeof(V) / 4; ++l) x[l] = __builtin_sqrtf(x[l]);
  return x;
}

template <class V> COMMON_INLINE V root_of_doubles(V x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) % 64 == 0) return root_by_pieces<__m512d>(x);
#endif
#if defined(__AVX__)
  if constexpr (sizeof(V) % 32 == 0) return root_by_pieces<__m256d>(x);
#endif
#if defined(__x86_64__)
  if constexpr (sizeof(V) % 16 == 0) return root_by_pieces<__m128d>(x);
#elif defined(__aarch64__)
  if constexpr (sizeof(V) % 16 == 0) return root_by_pieces<float64x2_t>(x);
#endif
  for (unsigned l = 0; l < sizeof(V) / 8; ++l) x[l] = __builtin_sqrt(x[l]);
  return x;
}
