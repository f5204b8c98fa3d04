// Numbers of LANES trajectories side by side, in GCC's and Clang's vector types, and elementary functions of them.
//
// REAL is the type of the states. Polynomials are those of Cephes, to one or two units in the last place; functions
// without one go to the C library lane by lane, by the compiler's names for it.
#pragma once
#include <stdint.h>

#include "polynomials.hpp"
#include "vectors.hpp"

#define INLINE          COMMON_INLINE
#define OUTLINE         static __attribute__((noinline, unused))
#define EACH(k, count)  _Pragma("GCC unroll 32") for (int k = 0; k < (count); k++)
#define AT_LEAST_ONE(n) ((n) > 0 ? (n) : 1)

// in place of <math.h>, which takes a quarter of the time that a small kernel takes to compile
#ifndef INFINITY
#define INFINITY __builtin_inff()
#define NAN      __builtin_nanf("")
#endif

typedef float VF VECTOR(4 * LANES);
typedef double VD VECTOR(8 * LANES);
typedef int32_t VI VECTOR(4 * LANES);
typedef int64_t VL VECTOR(8 * LANES);
typedef uint32_t U VECTOR(4 * LANES);
typedef uint64_t UL VECTOR(8 * LANES);

typedef REAL F;
#if DOUBLE
typedef VD V;
typedef VL B;
#else
typedef VF V;
typedef VI B;
#endif

INLINE V bc(F s) { return s - V{}; }  // not V{} + s, which turns −0 into 0
INLINE V bc(V v) { return v; }
INLINE VF same(VF, float s) { return s - VF{}; }
INLINE VD same(VD, double s) { return s - VD{}; }
INLINE VF sel(VI m, VF a, VF b) { return m ? a : b; }
INLINE VD sel(VL m, VD a, VD b) { return m ? a : b; }
#if DOUBLE
INLINE V sel(B m, V a, F b) { return m ? a : bc(b); }
INLINE V sel(B m, F a, V b) { return m ? bc(a) : b; }
INLINE V sel(B m, F a, F b) { return m ? bc(a) : bc(b); }
#else
INLINE V sel(B m, V a, F b) { return m ? a : bc(b); }
INLINE V sel(B m, F a, V b) { return m ? bc(a) : b; }
INLINE V sel(B m, F a, F b) { return m ? bc(a) : bc(b); }
#endif
INLINE B mask(int yes) { return yes ? ~B{} : B{}; }

// The high words of 32-bit products, from those of even and of odd lanes.
INLINE U multiply_high(U a, uint32_t b) {
  typedef uint64_t Pairs VECTOR(4 * LANES);
  const Pairs pairs = bits<Pairs>(a);
  const Pairs even = multiply_low(pairs, b) >> 32;
  const Pairs odd = multiply_low((Pairs)(pairs >> 32), b) & 0xFFFFFFFF00000000u;
  return bits<U>((Pairs)(even | odd));
}

// ------------------------------------------------------------------------------------------ roots and bits

INLINE VF m_sqrt(VF x) { return root_of_floats(x); }
INLINE VD m_sqrt(VD x) { return root_of_doubles(x); }

INLINE VF as_real(U bits) { return (VF)bits; }
INLINE VD as_real(UL bits) { return (VD)bits; }
INLINE VI whole(VF x) { return __builtin_convertvector(x, VI); }
INLINE VL whole(VD x) { return __builtin_convertvector(x, VL); }
INLINE VF real(VI n) { return __builtin_convertvector(n, VF); }
INLINE VD real(VL n) { return __builtin_convertvector(n, VD); }
INLINE VF narrow(VD x) { return __builtin_convertvector(x, VF); }
INLINE VD wide(VF x) { return __builtin_convertvector(x, VD); }
INLINE VD wide(VD x) { return x; }

// the nearest whole number, for |x| < 2^22 and 2^51
INLINE VF nearest(VF x) { return (x + 12582912.0f) - 12582912.0f; }
INLINE VD nearest(VD x) { return (x + 6755399441055744.0) - 6755399441055744.0; }
// 2^n for n in the range of normal numbers
INLINE VF power_of_two(VI n) { return (VF)((n + 127) << 23); }
INLINE VD power_of_two(VL n) { return (VD)((n + 1023) << 52); }

// not inlined: a call of the library for every lane is long, and compiling it wherever it stands takes longer
#define LANE_BY_LANE(name, f, d)                    \
  OUTLINE VF m_##name(VF x) {                       \
    VF y;                                           \
    for (int l = 0; l < LANES; l++) y[l] = f(x[l]); \
    return y;                                       \
  }                                                 \
  OUTLINE VD m_##name(VD x) {                       \
    VD y;                                           \
    for (int l = 0; l < LANES; l++) y[l] = d(x[l]); \
    return y;                                       \
  }
#define LANE_PAIRS(name, f, d)                            \
  OUTLINE VF m_##name(VF x, VF z) {                       \
    VF y;                                                 \
    for (int l = 0; l < LANES; l++) y[l] = f(x[l], z[l]); \
    return y;                                             \
  }                                                       \
  OUTLINE VD m_##name(VD x, VD z) {                       \
    VD y;                                                 \
    for (int l = 0; l < LANES; l++) y[l] = d(x[l], z[l]); \
    return y;                                             \
  }

LANE_BY_LANE(cbrt, __builtin_cbrtf, __builtin_cbrt)
LANE_BY_LANE(exp2, __builtin_exp2f, __builtin_exp2)
LANE_BY_LANE(expm1, __builtin_expm1f, __builtin_expm1)
LANE_BY_LANE(log1p, __builtin_log1pf, __builtin_log1p)
LANE_BY_LANE(tan, __builtin_tanf, __builtin_tan)
LANE_BY_LANE(asin, __builtin_asinf, __builtin_asin)
LANE_BY_LANE(acos, __builtin_acosf, __builtin_acos)
LANE_BY_LANE(atan, __builtin_atanf, __builtin_atan)
LANE_BY_LANE(sinh, __builtin_sinhf, __builtin_sinh)
LANE_BY_LANE(cosh, __builtin_coshf, __builtin_cosh)
LANE_BY_LANE(asinh, __builtin_asinhf, __builtin_asinh)
LANE_BY_LANE(acosh, __builtin_acoshf, __builtin_acosh)
LANE_BY_LANE(atanh, __builtin_atanhf, __builtin_atanh)
LANE_BY_LANE(erf, __builtin_erff, __builtin_erf)
LANE_BY_LANE(erfc, __builtin_erfcf, __builtin_erfc)
LANE_BY_LANE(lgamma, __builtin_lgammaf, __builtin_lgamma)
LANE_BY_LANE(floor, __builtin_floorf, __builtin_floor)
LANE_BY_LANE(ceil, __builtin_ceilf, __builtin_ceil)
LANE_BY_LANE(trunc, __builtin_truncf, __builtin_trunc)
LANE_BY_LANE(round_even, __builtin_rintf, __builtin_rint)
LANE_BY_LANE(round_away, __builtin_roundf, __builtin_round)
LANE_BY_LANE(libm_sin, __builtin_sinf, __builtin_sin)
LANE_BY_LANE(libm_cos, __builtin_cosf, __builtin_cos)
LANE_PAIRS(libm_pow, __builtin_powf, __builtin_pow)
LANE_PAIRS(atan2, __builtin_atan2f, __builtin_atan2)
LANE_PAIRS(rem, __builtin_fmodf, __builtin_fmod)

INLINE V m_abs(V x) { return sel(x < 0, -x, x); }
INLINE V m_sign(V x) { return sel(x > 0, bc(F(1)), sel(x < 0, bc(F(-1)), x)); }
INLINE V m_max(V a, V b) { return (a > b) | (a != a) ? a : b; }  // NaN if one of them is
INLINE V m_min(V a, V b) { return (a < b) | (a != a) ? a : b; }
INLINE B m_isfinite(V x) { return x - x == V{}; }

// ------------------------------------------------------------------------------------------ exponentials

INLINE VF m_exp(VF x) {
  x = sel(x > 89.0f, same(x, 89.0f), sel(x < -104.0f, same(x, -104.0f), x));
  VF n = nearest(x * 1.44269504f);
  VF r = x - n * 0.693359375f + n * 2.12194440e-4f;
  VF p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
          1.6666665459e-1f) *
             r +
         5.0000001201e-1f;
  VI k = whole(n), h = k >> 1;
  return (p * r * r + r + 1.0f) * power_of_two(h) * power_of_two(k - h);
}
INLINE VD m_exp(VD x) {
  x = sel(x > 710.0, same(x, 710.0), sel(x < -746.0, same(x, -746.0), x));
  VD n = nearest(x * 1.4426950408889634074);
  VD r = x - n * 6.93145751953125e-1 - n * 1.42860682030941723212e-6;
  VD s = r * r;
  VD p = ((1.26177193074810590878e-4 * s + 3.02994407707441961300e-2) * s + 9.99999999999999999910e-1) * r;
  VD q = ((3.00198505138664455042e-6 * s + 2.52448340349684104192e-3) * s + 2.27265548208155028766e-1) * s + 2.0;
  VL k = whole(n), h = k >> 1;
  return (1.0 + 2.0 * p / (q - p)) * power_of_two(h) * power_of_two(k - h);
}

// ln x for normal x > 0
INLINE VF log_of_positive(VF x) {
  VI bits = (VI)x - 0x3f3504f3;  // √½
  VI e = bits >> 23;
  VF m = (VF)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f, z = m * m, k = real(e);
  VF p = log_series(m) * m * z;
  return k * 0.693359375f + (m + (p - k * 2.12194440e-4f - 0.5f * z));
}
INLINE VD log_of_positive(VD x) {
  VL bits = (VL)x - 0x3fe6a09e667f3bcdLL;
  VL e = bits >> 52;
  VD m = (VD)((bits & 0x000fffffffffffffLL) + 0x3fe6a09e667f3bcdLL) - 1.0, z = m * m, k = real(e);
  VD p = ((((1.01875663804580931796e-4 * m + 4.97494994976747001425e-1) * m + 4.70579119878881725854) * m +
           1.44989225341610930846e1) *
              m +
          1.79368678507819816313e1) *
             m +
         7.70838733755885391666;
  VD q = ((((m + 1.12873587189167450590e1) * m + 4.52279145837532221105e1) * m + 8.29875266912776603211e1) * m +
          7.11544750618563894466e1) *
             m +
         2.31251620126765340583e1;
  return k * 0.693359375 + (m + (m * (z * p / q) - k * 2.121944400546905827679e-4 - 0.5 * z));
}
INLINE VF m_log(VF x) {
  VI tiny = x < 1.17549435e-38f;
  VF y = log_of_positive(sel(tiny, x * 8388608.0f, x)) - sel(tiny, same(x, 15.9423847f), VF{});
  y = sel(x <= 3.40282347e38f, y, x + x);  // infinity and what is not a number
  y = sel(x == 0, same(x, -INFINITY), y);
  return sel(x < 0, same(x, NAN), y);
}
INLINE VD m_log(VD x) {
  VL tiny = x < 2.2250738585072014e-308;
  VD y = log_of_positive(sel(tiny, x * 4503599627370496.0, x)) - sel(tiny, same(x, 36.04365338911715), VD{});
  y = sel(x <= 1.7976931348623157e308, y, x + x);
  y = sel(x == 0, same(x, -INFINITY), y);
  return sel(x < 0, same(x, NAN), y);
}
// x^y = exp(y ln x), in single precision by way of double. Polynomials were fitted at the nodes of Chebyshev, logarithm
// to 3e-10 and exponential to 2e-10: an error of 88 of the former is a half of the last digit.
OUTLINE VF m_pow(VF x, VF y) {
  if (__builtin_expect(any(~(x >= 0 & x < INFINITY & y - y == 0)), 0)) return m_libm_pow(x, y);
  const VD a = wide(x);
  const VL bits = (VL)a - 0x3fe6a09e667f3bcdLL;  // √½
  const VD m = (VD)((bits & 0x000fffffffffffffLL) + 0x3fe6a09e667f3bcdLL) - 1.0;
  VD p = ((((-0.06176836182480706 * m + 0.10688852825338495) * m - 0.10749106584975071) * m + 0.11017633087663788) * m -
          0.1243255915902398) *
             m +
         0.14287005182098053;
  p = ((((p * m - 0.16669044661292698) * m + 0.2000002142559064) * m - 0.24999970676476418) * m + 0.3333333305176817) *
          m -
      0.5000000005836684;
  const VD log = real(bits >> 52) * 0.69314718055994531 + (p * m * m + m);
  const VD l = wide(y) * log;
  const VD n = nearest(l * 1.4426950408889634), r = l - n * 0.69314718055994531;
  const VD q =
      ((((0.00019899278379766476 * r + 0.0013933645180568314) * r + 0.008333298477763502) * r + 0.04166646496118983) *
           r +
       0.16666666719013562) *
          r +
      0.5000000013463712;
  const VF size = narrow(l);  // choices in single precision: GCC takes longer vectors apart for them
  VF power = narrow((VD)((q * r * r + r + 1.0) * power_of_two(whole(n))));
  power = sel(size > 89.0f, same(x, INFINITY), sel(size < -104.0f, VF{}, power));
  power = sel(x > 0, power, sel(y < 0, same(x, INFINITY), VF{}));
  return sel(y == 0, same(x, 1.0f), power);
}
INLINE VD m_pow(VD x, VD y) { return m_libm_pow(x, y); }

INLINE VF m_tanh(VF x) {
  VF a = sel(x < 0, -x, x), s = x * x;
  VF p = ((((-5.70498872745e-3f * s + 2.06390887954e-2f) * s - 5.37397155531e-2f) * s + 1.33314422036e-1f) * s -
          3.33332819422e-1f) *
             s * x +
         x;
  VF q = 1.0f - 2.0f / (m_exp(a + a) + 1.0f);
  return sel(a < 0.625f, p, sel(x < 0, -q, q));
}
INLINE VD m_tanh(VD x) {
  VD a = sel(x < 0, -x, x), s = x * x;
  VD p = (-9.64399179425052238628e-1 * s - 9.92877231001918586564e1) * s - 1.61468768441708447952e3;
  VD q = ((s + 1.12811678491632931402e2) * s + 2.23548839060100448583e3) * s + 4.84406305325125486048e3;
  VD far = 1.0 - 2.0 / (m_exp(a + a) + 1.0);
  return sel(a < 0.625, p / q * s * x + x, sel(x < 0, -far, far));
}

// ------------------------------------------------------------------------------------------ circles

// quarter: 0 for the sine, 1 for the cosine
INLINE VF wave(VF x, int quarter) {
  VF n = nearest(x * 0.636619772f);
  VF r = x - n * 1.57079637f + n * 4.37113883e-8f + n * 1.71512451e-15f;
  VF z = r * r;
  VF s = sine_series(z) * z * r + r;
  VF c = cosine_series(z) * z * z - 0.5f * z + 1.0f;
  VI k = whole(n) + quarter;
  VF y = sel((k & 1) != 0, c, s);
  return (VF)((VI)y ^ ((k & 2) << 30));
}
INLINE VD wave(VD x, int quarter) {
  VD n = nearest(x * 0.63661977236758134308);
  VD r = x - n * 1.5707963267948965580 - n * 6.1232339957367660359e-17;
  VD z = r * r;
  VD s = (((((1.58962301576546568060e-10 * z - 2.50507477628578072866e-8) * z + 2.75573136213857245213e-6) * z -
            1.98412698295895385996e-4) *
               z +
           8.33333333332211858878e-3) *
              z -
          1.66666666666666307295e-1) *
             z * r +
         r;
  VD c = (((((-1.13585365213876817300e-11 * z + 2.08757008419747316778e-9) * z - 2.75573141792967388112e-7) * z +
            2.48015872888517045348e-5) *
               z -
           1.38888888888730564116e-3) *
              z +
          4.16666666666665929218e-2) *
             z * z -
         0.5 * z + 1.0;
  VL k = whole(n) + quarter;
  VD y = sel((k & 1) != 0, c, s);
  return (VD)((VL)y ^ ((k & 2) << 62));
}
INLINE VF m_sin(VF x) {
  if (__builtin_expect(any(x * x > 1e12f), 0)) return m_libm_sin(x);
  return wave(x, 0);
}
INLINE VF m_cos(VF x) {
  if (__builtin_expect(any(x * x > 1e12f), 0)) return m_libm_cos(x);
  return wave(x, 1);
}
INLINE VD m_sin(VD x) {
  if (__builtin_expect(any(x * x > 1e16), 0)) return m_libm_sin(x);
  return wave(x, 0);
}
INLINE VD m_cos(VD x) {
  if (__builtin_expect(any(x * x > 1e16), 0)) return m_libm_cos(x);
  return wave(x, 1);
}
