// Vectors of numbers as the compiler's own types (GCC, Clang), for the CPU: arithmetic is written with operators, which
// become the instructions of any processor. Built-in functions remain where GCC makes slower ones of them on x86;
// <immintrin.h>, which gives them other names, takes as long to compile as a kernel.
#pragma once
#include <stdint.h>

#include <utility>

#include "inline.hpp"

#if defined(__x86_64__) && !defined(__clang__) && defined(__has_builtin)
#define GCC_ON_X86 1
#else
#define GCC_ON_X86 0
#endif

// Length of the processor's vectors in bytes, unless it has none.
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
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

// Unnamed, so that files compiled for different processors share no function.
namespace {

// ------------------------------------------------------------------------------------------ longer vectors

template <class Number, int bytes> struct Vector {
  typedef Number type VECTOR(bytes);
};
// Vectors may be longer than those of the processor; this is the part of one that fits.
template <class Number, class V>
using Piece = typename Vector<Number, (sizeof(V) < VECTOR_BYTES ? sizeof(V) : VECTOR_BYTES)>::type;

// Operation::apply of each piece
template <class Operation, class Number, class V, class... Rest> COMMON_INLINE V apply_by_pieces(V x, Rest... rest) {
  constexpr unsigned count = sizeof(V) / sizeof(Piece<Number, V>);
  Piece<Number, V> pieces[count];
  __builtin_memcpy(pieces, &x, sizeof x);
  for (unsigned k = 0; k < count; ++k) pieces[k] = Operation::apply(pieces[k], rest...);
  __builtin_memcpy(&x, pieces, sizeof x);
  return x;
}

template <class V> using LaneNumbers = std::make_integer_sequence<int, int(sizeof(V) / sizeof(std::declval<V>()[0]))>;

// ------------------------------------------------------------------------------------------ square roots

struct SquareRoot {
  static COMMON_MEMBER float of_number(float x) { return __builtin_sqrtf(x); }
  static COMMON_MEMBER double of_number(double x) { return __builtin_sqrt(x); }
  // one instruction, since all lanes are named at once
  template <class V, int... lane> static COMMON_MEMBER V of_lanes(V x, std::integer_sequence<int, lane...>) {
    return V{of_number(x[lane])...};
  }
  template <class V> static COMMON_MEMBER V apply(V x) { return of_lanes(x, LaneNumbers<V>{}); }
};
template <class V> COMMON_INLINE V root_of_floats(V x) { return apply_by_pieces<SquareRoot, float>(x); }
template <class V> COMMON_INLINE V root_of_doubles(V x) { return apply_by_pieces<SquareRoot, double>(x); }

// ------------------------------------------------------------------------------------------ products of words

// GCC does not see that high words are zero, and multiplies all 64 bits.
struct MultiplyLow {
  template <class V> static COMMON_MEMBER V apply(V a, uint32_t b) {
#if GCC_ON_X86
    using Halves = typename Vector<int, sizeof(V)>::type;
    const Halves left = bits<Halves>(a), right = bits<Halves>((V)(V{} + b));
#if VECTOR_BYTES == 64 && __has_builtin(__builtin_ia32_pmuludq512_mask)
    using Quads = typename Vector<long long, sizeof(V)>::type;
    if constexpr (sizeof(V) == 64) return bits<V>(__builtin_ia32_pmuludq512_mask(left, right, Quads{}, -1));
#endif
#if VECTOR_BYTES >= 32 && __has_builtin(__builtin_ia32_pmuludq256)
    if constexpr (sizeof(V) == 32) return bits<V>(__builtin_ia32_pmuludq256(left, right));
#endif
#if __has_builtin(__builtin_ia32_pmuludq128)
    if constexpr (sizeof(V) == 16) return bits<V>(__builtin_ia32_pmuludq128(left, right));
#endif
#endif
    return (a & uint64_t(0xFFFFFFFFu)) * uint64_t(b);
  }
};
// The 64-bit products of the low 32 bits of every lane with b: what Philox is made of. V: vectors of uint64_t.
template <class V> COMMON_INLINE V multiply_low(V a, uint32_t b) {
  return apply_by_pieces<MultiplyLow, uint64_t>(a, b);
}

// ------------------------------------------------------------------------------------------ masks

// Whether a mask, as comparisons give them, is true for any lane.
template <class Mask> COMMON_INLINE bool any(Mask mask) {
  using Words = Piece<int64_t, Mask>;
  constexpr unsigned count = sizeof(Mask) / sizeof(Words);
  Words pieces[count];
  __builtin_memcpy(pieces, &mask, sizeof mask);
  Words all = pieces[0];
  for (unsigned k = 1; k < count; ++k) all |= pieces[k];
#if GCC_ON_X86
  using Quads = typename Vector<long long, sizeof(Words)>::type;
#if VECTOR_BYTES == 64 && __has_builtin(__builtin_ia32_ptestmq512)
  if constexpr (sizeof(Words) == 64) return __builtin_ia32_ptestmq512(bits<Quads>(all), bits<Quads>(all), -1) != 0;
#endif
#if VECTOR_BYTES >= 32 && __has_builtin(__builtin_ia32_ptestz256)
  if constexpr (sizeof(Words) == 32) return !__builtin_ia32_ptestz256(bits<Quads>(all), bits<Quads>(all));
#endif
#endif
  int64_t some = 0;
  for (unsigned k = 0; k < sizeof(Words) / 8; ++k) some |= all[k];
  return some != 0;
}

}  // namespace
