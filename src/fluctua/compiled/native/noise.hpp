// Standard normals of (stream, step, component), number for number those of JAX: threefry2x32 with its own way from
// bits to normals, and Philox4x32 of 10 or 7 rounds with Box–Muller.
//
// Needs the types U, VF, VD, UL and the functions of lanes.hpp or those of a GPU by the same names.
// NOISE64: normals are made in double precision, as JAX does with 64-bit numbers enabled.
#pragma once
#include "philox.hpp"

INLINE U rotated(U x, int by) { return (x << by) | (x >> (32 - by)); }

INLINE void threefry(U k0, U k1, U& x0, U& x1) {
  const U k2 = k0 ^ k1 ^ 0x1BD11BDAu;
  x0 += k0;
  x1 += k1;
#define FOUR(a, b, c, d)    \
  x0 += x1;                 \
  x1 = rotated(x1, a) ^ x0; \
  x0 += x1;                 \
  x1 = rotated(x1, b) ^ x0; \
  x0 += x1;                 \
  x1 = rotated(x1, c) ^ x0; \
  x0 += x1;                 \
  x1 = rotated(x1, d) ^ x0;
  FOUR(13, 15, 26, 6)
  x0 += k1;
  x1 += k2 + 1u;
  FOUR(17, 29, 16, 24)
  x0 += k2;
  x1 += k0 + 2u;
  FOUR(13, 15, 26, 6)
  x0 += k0;
  x1 += k1 + 3u;
  FOUR(17, 29, 16, 24)
  x0 += k1;
  x1 += k2 + 4u;
  FOUR(13, 15, 26, 6)
  x0 += k2;
  x1 += k0 + 5u;
#undef FOUR
}

// erf⁻¹ by the polynomials of Giles (2010), for |x| < 1
INLINE VF m_erf_inv(VF x) {
  VF w = -log_of_positive(1.0f - x * x);
  VF v = w - 2.5f;
  VF p =
      (((((((2.81022636e-08f * v + 3.43273939e-07f) * v - 3.5233877e-06f) * v - 4.39150654e-06f) * v + 0.00021858087f) *
             v -
         0.00125372503f) *
            v -
        0.00417768164f) *
           v +
       0.246640727f) *
          v +
      1.50140941f;
  if (any(w >= 5.0f)) {
    v = m_sqrt(w) - 3.0f;
    VF q = (((((((-0.000200214257f * v + 0.000100950558f) * v + 0.00134934322f) * v - 0.00367342844f) * v +
               0.00573950773f) *
                  v -
              0.0076224613f) *
                 v +
             0.00943887047f) *
                v +
            1.00167406f) *
               v +
           2.83297682f;
    p = sel(w < 5.0f, p, q);
  }
  return p * x;
}
INLINE VD m_erf_inv(VD x) {
  VD w = -log_of_positive(1.0 - x * x);
  VD v = w - 3.125;
  VD p = ((((((((((((((((((((((-3.6444120640178196996e-21 * v - 1.685059138182016589e-19) * v +
                              1.2858480715256400167e-18) *
                                 v +
                             1.115787767802518096e-17) *
                                v -
                            1.333171662854620906e-16) *
                               v +
                           2.0972767875968561637e-17) *
                              v +
                          6.6376381343583238325e-15) *
                             v -
                         4.0545662729752068639e-14) *
                            v -
                        8.1519341976054721522e-14) *
                           v +
                       2.6335093153082322977e-12) *
                          v -
                      1.2975133253453532498e-11) *
                         v -
                     5.4154120542946279317e-11) *
                        v +
                    1.051212273321532285e-09) *
                       v -
                   4.1126339803469836976e-09) *
                      v -
                  2.9070369957882005086e-08) *
                     v +
                 4.2347877827932403518e-07) *
                    v -
                1.3654692000834678645e-06) *
                   v -
               1.3882523362786468719e-05) *
                  v +
              0.0001867342080340571352) *
                 v -
             0.00074070253416626697512) *
                v -
            0.0060336708714301490533) *
               v +
           0.24015818242558961693) *
              v +
          1.6536545626831027356);
  if (any(w >= 6.25)) {
    VD root = m_sqrt(w);
    v = root - 3.25;
    VD q =
        ((((((((((((((((((2.2137376921775787049e-09 * v + 9.0756561938885390979e-08) * v - 2.7517406297064545428e-07) *
                            v +
                        1.8239629214389227755e-08) *
                           v +
                       1.5027403968909827627e-06) *
                          v -
                      4.013867526981545969e-06) *
                         v +
                     2.9234449089955446044e-06) *
                        v +
                    1.2475304481671778723e-05) *
                       v -
                   4.7318229009055733981e-05) *
                      v +
                  6.8284851459573175448e-05) *
                     v +
                 2.4031110387097893999e-05) *
                    v -
                0.0003550375203628474796) *
                   v +
               0.00095328937973738049703) *
                  v -
              0.0016882755560235047313) *
                 v +
             0.0024914420961078508066) *
                v -
            0.0037512085075692412107) *
               v +
           0.005370914553590063617) *
              v +
          1.0052589676941592334) *
             v +
         3.0838856104922207635);
    p = sel(w < 6.25, p, q);
    if (any(w >= 16.0)) {
      v = root - 5.0;
      VD s =
          ((((((((((((((((-2.7109920616438573243e-11 * v - 2.5556418169965252055e-10) * v + 1.5076572693500548083e-09) *
                            v -
                        3.7894654401267369937e-09) *
                           v +
                       7.6157012080783393804e-09) *
                          v -
                      1.4960026627149240478e-08) *
                         v +
                     2.9147953450901080826e-08) *
                        v -
                    6.7711997758452339498e-08) *
                       v +
                   2.2900482228026654717e-07) *
                      v -
                  9.9298272942317002539e-07) *
                     v +
                 4.5260625972231537039e-06) *
                    v -
                1.9681778105531670567e-05) *
                   v +
               7.5995277030017761139e-05) *
                  v -
              0.00021503011930044477347) *
                 v -
             0.00013871931833623122026) *
                v +
            1.0103004648645343977) *
               v +
           4.8499064014085844221);
      p = sel(w < 16.0, p, s);
    }
  }
  return p * x;
}

// the normals of JAX from the 32 or 64 bits of a component
INLINE VF normal32(U high, U low) {
  VF f = as_real((U)(((high ^ low) >> 9) | 0x3f800000u)) - 1.0f;
  return 1.41421356f * m_erf_inv((VF)(f * 2.0f - 0.99999994f));
}
INLINE VD normal64(U high, U low) {
  UL bits = (__builtin_convertvector(high, UL) << 20) | (__builtin_convertvector(low, UL) >> 12);
  VD f = as_real((UL)(bits | 0x3ff0000000000000ULL)) - 1.0;
  return 1.4142135623730951 * m_erf_inv((VD)(f * 2.0 - 0.99999999999999988898));
}

struct LaneWords {
  static COMMON_MEMBER void multiply(U a, uint32_t b, U& high, U& low) {
    low = a * b;
    high = multiply_high(a, b);
  }
  static COMMON_MEMBER U mix(U a, U b, U c) { return a ^ b ^ c; }
};

template <int ROUNDS> INLINE void philox(U k0, U k1, U& c0, U& c1, U& c2, U& c3) {
#pragma GCC unroll 10
  for (int round = 0; round < ROUNDS; round++) {
    philox_round<LaneWords>(c0, c1, c2, c3, k0, k1);
    k0 += PHILOX_KEY_0;
    k1 += PHILOX_KEY_1;
  }
}

#if NOISE64
typedef VD N;  // in which Box–Muller is computed
#else
typedef VF N;
#endif
// two independent normals from two words
INLINE void box_muller(U first, U second, N& cosine, N& sine) {
#if NOISE64
  const double scale = 2.3283064365386963e-10, turn = 6.283185307179586, half = 0.5;
#else
  const float scale = 2.3283064365386963e-10f, turn = 6.2831855f, half = 0.5f;
#endif
  const N a = __builtin_convertvector(first, N), b = __builtin_convertvector(second, N);
  const N radius = m_sqrt((N)(-2 * log_of_positive((N)((a + half) * scale)))), angle = turn * (b * scale);
  cosine = radius * wave(angle, 1);
  sine = radius * wave(angle, 0);
}

// the four normals of a component in steps 4q to 4q + 3 (`philox7`); stream: two words of the key, and the trajectory
INLINE void philox7_normals(const U* stream, uint32_t component, uint32_t q, N* four) {
  U c0 = U{} + component, c1 = U{} + q, c2 = stream[2], c3 = U{};
  philox<PHILOX7_ROUNDS>(stream[0], stream[1], c0, c1, c2, c3);
  box_muller(c0, c1, four[0], four[1]);
  box_muller(c2, c3, four[2], four[3]);
}
