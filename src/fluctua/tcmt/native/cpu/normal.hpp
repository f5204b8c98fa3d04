// The normals of `noise.hpp` for a vector of trajectories at once: the same law, word for word.
//
// Logarithm, sine and cosine are polynomials. float: relative error of the radius and absolute error of
// cosine and sine near 1e-7. double: a few 1e-16 (Taylor, to the last significant term).
#pragma once
#include "philox.hpp"
#include "polynomials.hpp"
#include "simd.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

struct VectorWords {  // a word in the low half of every lane; the high half is left over
  static FLUCTUA_INLINE void multiply(U64 a, std::uint32_t b, U64& high, U64& low) {
    low = multiply_low(a, b);
    high = low >> 32;
  }
  static FLUCTUA_INLINE U64 mix(U64 a, U64 b, U64 c) { return a ^ b ^ c; }
};

// Half of the counter is the same for all lanes or for all steps, so rounds 1 and 2 of Philox reduce to
// a few exclusive-ors: what depends on the site alone is tabulated by `Site`, on the trajectory alone by
// `Lane`, on trajectory and pair of steps by `Pair`.
struct Keys {
  std::uint32_t k0[PHILOX_ROUNDS], k1[PHILOX_ROUNDS];
};
FLUCTUA_INLINE Keys schedule(std::uint64_t seed) {
  Keys k;
  for (int r = 0; r < PHILOX_ROUNDS; ++r) {
    k.k0[r] = static_cast<std::uint32_t>(seed) + std::uint32_t(r) * PHILOX_KEY_0;
    k.k1[r] = static_cast<std::uint32_t>(seed >> 32) + std::uint32_t(r) * PHILOX_KEY_1;
  }
  return k;
}

struct SiteWords {
  std::uint32_t a, b, c;
};
FLUCTUA_INLINE SiteWords site_words(std::uint32_t site, const Keys& k) {
  const std::uint64_t p0 = std::uint64_t(PHILOX_MULTIPLY_0) * site;
  const std::uint32_t c2 = std::uint32_t(p0 >> 32) ^ k.k1[0], c3 = std::uint32_t(p0);
  const std::uint64_t p1 = std::uint64_t(PHILOX_MULTIPLY_1) * c2;
  return {std::uint32_t(p1 >> 32) ^ k.k0[1], std::uint32_t(p1), c3 ^ k.k1[1]};
}

struct LaneWords {  // of half a vector of trajectories
  U64 high, low;
};
FLUCTUA_INLINE LaneWords lane_words(U64 trajectory) {
  const U64 p = multiply_low(trajectory, PHILOX_MULTIPLY_1);
  return {p >> 32, p};
}

struct PairWords {
  U64 high, low;
};
FLUCTUA_INLINE PairWords pair_words(const LaneWords& lane, std::uint32_t pair, const Keys& k) {
  const U64 p = multiply_low(lane.high ^ std::uint64_t(pair ^ k.k0[0]), PHILOX_MULTIPLY_0);
  return {p >> 32, p};
}

// The low 32 bits of each lane of w[0..3] are the four words; the high bits are left over.
FLUCTUA_INLINE void words(const SiteWords& s, const LaneWords& lane, const PairWords& pair, const Keys& k, U64 w[4]) {
  U64 c0 = lane.low ^ std::uint64_t(s.a);
  U64 c1 = U64{} + std::uint64_t(s.b);
  U64 c2 = pair.high ^ std::uint64_t(s.c);
  U64 c3 = pair.low;
#pragma GCC unroll 8
  for (int r = 2; r < PHILOX_ROUNDS; ++r)
    philox_round<VectorWords>(c0, c1, c2, c3, U64{} + std::uint64_t(k.k0[r]), U64{} + std::uint64_t(k.k1[r]));
  w[0] = c0;
  w[1] = c1;
  w[2] = c2;
  w[3] = c3;
}

// Lanes 0, 2, 4, … from the first half, 1, 3, 5, … from the second.
FLUCTUA_INLINE U32 interleave(U64 even, U64 odd) {
  return bits<U32>((even & std::uint64_t(0xFFFFFFFFu)) | (odd << 32));
}

FLUCTUA_INLINE F32 minus_two_log(F32 x) {  // cephes' logf, |error| < 1e-7 relative
  const I32 ix = bits<I32>(x);
  const I32 e = (ix - 0x3F3504F3) >> 23;
  const F32 f = bits<F32>(ix - (e << 23)) - 1.0f;
  const F32 p = log_series(f);
  const F32 n = __builtin_convertvector(e, F32);
  const F32 f2 = f * f;
  const F32 tail = (f2 * f) * p + n * -2.12194440e-4f;
  return (n * -1.386718750f) + (f2 - (f + tail) * 2.0f);  // ln 2 = 0.693359375 − 2.12194440e-4
}

FLUCTUA_INLINE void turn(U32 word, F32& c, F32& s) {  // cosine and sine of 2π·word·2⁻³²
  const U32 quadrant = (word + 0x20000000u) >> 30;
  const F32 x = __builtin_convertvector(bits<I32>(word - (quadrant << 30)), F32) * 1.4629180792671596e-9f;  // 2π·2⁻³²
  const F32 y = x * x;
  const F32 sine = sine_series(y) * (y * x) + x;
  const F32 cosine = cosine_series(y) * (y * y) + (y * -0.5f + 1.0f);
  const I32 odd = -bits<I32>(quadrant & 1u);
  const U32 flip_sine = (quadrant & 2u) << 30, flip_cosine = ((quadrant + 1u) & 2u) << 30;
  c = bits<F32>(bits<U32>(select(odd, sine, cosine)) ^ flip_cosine);
  s = bits<F32>(bits<U32>(select(odd, cosine, sine)) ^ flip_sine);
}

FLUCTUA_INLINE F32 as_real(U32 w) { return __builtin_convertvector(w, F32); }

FLUCTUA_INLINE F64 minus_two_log(F64 x) {
  const I64 ix = bits<I64>(x);
  const U64 biased = bits<U64>(ix - 0x3FE6A09E667F3BCDll) + (std::uint64_t(1) << 62);  // logical shifts only: AVX2
  const I64 e = bits<I64>(biased >> 52) - (1ll << 10);
  const F64 m = bits<F64>(bits<U64>(ix) - (bits<U64>(e) << 52));
  const F64 s = (m - 1.0) / (m + 1.0), y = s * s;
  F64 p = F64{} + 1.0 / 23;
#pragma GCC unroll 11
  for (int k = 21; k >= 3; k -= 2) p = p * y + 1.0 / k;
  // 2⁵² + 2⁵¹ + e is exact and its low bits are e.
  const F64 n = bits<F64>(bits<U64>(e) + 0x4338000000000000ull) - 6755399441055744.0;
  return n * -1.3862943611198906 - 4.0 * (s + s * (y * p));
}

FLUCTUA_INLINE F64 as_real(U64 w) { return bits<F64>(w | 0x4330000000000000ull) - 4503599627370496.0; }

FLUCTUA_INLINE void turn(U64 word, F64& c, F64& s) {
  const U64 quadrant = ((word + 0x20000000u) >> 30) & 3u;
  // word − quadrant·2³⁰ in (−2²⁹, 2³²): the last quadrant wraps round to the first.
  const F64 shifted = as_real((word + 0x20000000u) & 0x3FFFFFFFu) - 536870912.0;
  const F64 x = shifted * 1.4629180792671596e-9, y = x * x;
  F64 sine = F64{} + 1.0 / 355687428096000.0, cosine = F64{} - 1.0 / 6402373705728000.0;
  sine = sine * y - 1.0 / 1307674368000.0;
  sine = sine * y + 1.0 / 6227020800.0;
  sine = sine * y - 1.0 / 39916800.0;
  sine = sine * y + 1.0 / 362880.0;
  sine = sine * y - 1.0 / 5040.0;
  sine = sine * y + 1.0 / 120.0;
  sine = sine * y - 1.0 / 6.0;
  sine = sine * (y * x) + x;
  cosine = cosine * y + 1.0 / 20922789888000.0;
  cosine = cosine * y - 1.0 / 87178291200.0;
  cosine = cosine * y + 1.0 / 479001600.0;
  cosine = cosine * y - 1.0 / 3628800.0;
  cosine = cosine * y + 1.0 / 40320.0;
  cosine = cosine * y - 1.0 / 720.0;
  cosine = cosine * y + 1.0 / 24.0;
  cosine = cosine * (y * y) + (y * -0.5 + 1.0);
  const I64 odd = -bits<I64>(quadrant & 1u);
  const U64 flip_sine = (quadrant & 2u) << 62, flip_cosine = ((quadrant + 1u) & 2u) << 62;
  c = bits<F64>(bits<U64>(select(odd, sine, cosine)) ^ flip_cosine);
  s = bits<F64>(bits<U64>(select(odd, cosine, sine)) ^ flip_sine);
}

// scale·(two standard normals) of one vector of words.
FLUCTUA_INLINE void box_muller(U32 first, U32 second, F32 scale, F32& re, F32& im) {
  turn(second, re, im);
  const F32 radius = scale * root(minus_two_log((as_real(first) + 0.5f) * 2.3283064365386963e-10f));
  re *= radius;
  im *= radius;
}
FLUCTUA_INLINE void box_muller(U64 first, U64 second, F64 scale, F64& re, F64& im) {
  turn(second, re, im);
  const F64 radius = scale * root(minus_two_log((as_real(first) + 0.5) * 2.3283064365386963e-10));
  re *= radius;
  im *= radius;
}

// The words of all lanes: packed from two halves for float, stripped of what is left over for double.
FLUCTUA_INLINE void collect(const U64 even[4], const U64 odd[4], U32 w[4]) {
  for (int i = 0; i < 4; ++i) w[i] = interleave(even[i], odd[i]);
}
FLUCTUA_INLINE void collect(const U64 all[4], U64 w[4]) {
  for (int i = 0; i < 4; ++i) w[i] = all[i] & std::uint64_t(0xFFFFFFFFu);
}

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
