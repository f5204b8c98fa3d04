// The widest vectors of the instruction set this translation unit is compiled for.
//
// A file that includes this is compiled once per instruction set (see CMakeLists.txt). Everything here is
// always inlined and lives in a namespace of that set's name, so that no two builds share a symbol.
#pragma once
#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

#include "vectors.hpp"

#ifndef FLUCTUA_ISA
#define FLUCTUA_ISA baseline
#endif
#define FLUCTUA_INLINE inline __attribute__((always_inline))

namespace fluctua {
namespace FLUCTUA_ISA {

constexpr int kBytes = VECTOR_BYTES;

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

// a₀ b₀ a₁ b₁ …: the first and the second half.
template <class V, int... lane>
FLUCTUA_INLINE void zip_lanes(V a, V b, V& low, V& high, std::integer_sequence<int, lane...>) {
  constexpr int half = int(sizeof...(lane)) / 2;
  low = V{(lane % 2 ? b : a)[lane / 2]...};
  high = V{(lane % 2 ? b : a)[half + lane / 2]...};
}
template <class V> FLUCTUA_INLINE void zip(V a, V b, V& low, V& high) { zip_lanes(a, b, low, high, LaneNumbers<V>{}); }

// a/b, for numbers of ordinary size; AVX-512 divides slowly and has a reciprocal of 14 bits to start from.
template <class V> FLUCTUA_INLINE V ratio(V a, V b) { return a / b; }
#if VECTOR_BYTES == 64
template <> FLUCTUA_INLINE F32 ratio<F32>(F32 a, F32 b) {
  const F32 r = bits<F32>(_mm512_rcp14_ps(bits<__m512>(b)));
  return a * (r * (2.0f - b * r));
}
#endif

FLUCTUA_INLINE F32 root(F32 x) { return root_of_floats(x); }
FLUCTUA_INLINE F64 root(F64 x) { return root_of_doubles(x); }

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
