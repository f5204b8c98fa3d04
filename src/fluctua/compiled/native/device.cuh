// One thread per trajectory: the types and functions of lanes.hpp by the same names, for a GPU. Compiled at run time
// (NVRTC), without header files. Functions of single precision are accurate to a few units in the last place.
typedef unsigned int u32;
typedef u32 uint32_t;
typedef unsigned long long u64;
typedef long long i64;

#define INLINE          static __device__ __forceinline__
#define HUGE_NUMBER     __int_as_float(0x7f800000)
#define EACH(k, count)  _Pragma("unroll") for (int k = 0; k < (count); k++)
#define AT_LEAST_ONE(n) ((n) > 0 ? (n) : 1)
#ifndef NAN
#define NAN      __int_as_float(0x7fffffff)
#define INFINITY HUGE_NUMBER
#endif

typedef REAL F;
typedef F V;
typedef float VF;
typedef double VD;
typedef u32 U;
typedef u64 UL;
#define __builtin_convertvector(value, type) ((type)(value))

struct B {  // true or false, with the operators of a mask
  bool yes;
  __device__ __forceinline__ B(bool yes) : yes(yes) {}
};
INLINE B operator&(B a, B b) { return a.yes && b.yes; }
INLINE B operator|(B a, B b) { return a.yes || b.yes; }
INLINE B operator^(B a, B b) { return a.yes != b.yes; }
INLINE B operator==(B a, B b) { return a.yes == b.yes; }
INLINE B operator!=(B a, B b) { return a.yes != b.yes; }
INLINE B operator~(B a) { return !a.yes; }
INLINE B mask(int yes) { return yes != 0; }
#define any(m) (B(m).yes)  // CUDA has a function of this name

INLINE V bc(F s) { return s; }
INLINE VF sel(B m, VF a, VF b) { return m.yes ? a : b; }
INLINE VD sel(B m, VD a, VD b) { return m.yes ? a : b; }
INLINE VF as_real(U bits) { return __uint_as_float(bits); }
INLINE VD as_real(UL bits) { return __longlong_as_double((i64)bits); }
INLINE VF narrow(VD x) { return (VF)x; }
INLINE U multiply_high(U a, uint32_t b) { return (U)((UL)a * b >> 32); }

#define FUNCTION(name, f, d)                \
  INLINE VF m_##name(VF x) { return f(x); } \
  INLINE VD m_##name(VD x) { return d(x); }
#define FUNCTION_OF_TWO(name, f, d)                  \
  INLINE VF m_##name(VF x, VF y) { return f(x, y); } \
  INLINE VD m_##name(VD x, VD y) { return d(x, y); }

FUNCTION(sqrt, sqrtf, sqrt)
FUNCTION(cbrt, cbrtf, cbrt)
FUNCTION(exp, expf, exp)
FUNCTION(exp2, exp2f, exp2)
FUNCTION(expm1, expm1f, expm1)
FUNCTION(log, logf, log)
FUNCTION(log1p, log1pf, log1p)
FUNCTION(tan, tanf, tan)
FUNCTION(asin, asinf, asin)
FUNCTION(acos, acosf, acos)
FUNCTION(atan, atanf, atan)
FUNCTION(sinh, sinhf, sinh)
FUNCTION(cosh, coshf, cosh)
FUNCTION(tanh, tanhf, tanh)
FUNCTION(asinh, asinhf, asinh)
FUNCTION(acosh, acoshf, acosh)
FUNCTION(atanh, atanhf, atanh)
FUNCTION(erf, erff, erf)
FUNCTION(erfc, erfcf, erfc)
FUNCTION(lgamma, lgammaf, lgamma)
FUNCTION(floor, floorf, floor)
FUNCTION(ceil, ceilf, ceil)
FUNCTION(trunc, truncf, trunc)
FUNCTION(round_even, rintf, rint)
FUNCTION(round_away, roundf, round)
FUNCTION_OF_TWO(pow, powf, pow)
FUNCTION_OF_TWO(atan2, atan2f, atan2)
FUNCTION_OF_TWO(rem, fmodf, fmod)

// quarter: 0 for the sine, 1 for the cosine; polynomials of Cephes. CUDA's own have a part for large arguments that, in
// line, would be most of the program. n: turns of π/2, r: what is left of the angle.
INLINE VF circle_at(VF n, VF r, int quarter) {
  const VF z = r * r;
  const VF s = sine_series(z) * z * r + r;
  const VF c = cosine_series(z) * z * z - 0.5f * z + 1.0f;
  const int k = (int)n + quarter;
  return __uint_as_float(__float_as_uint(k & 1 ? c : s) ^ ((u32)(k & 2) << 30));
}
// Many of these in line would be longer than what a GPU keeps of a program at hand.
#if MANY_FUNCTIONS
static __device__ __noinline__
#else
INLINE
#endif
    VF circle_far(VF x, int quarter) {
  const double turns = rint(x * 0.63661977236758134308);
  const double r = fma(turns, -6.1232339957367660359e-17, fma(turns, -1.5707963267948965580, (double)x));
  return circle_at((VF)(turns - 4 * floor(turns / 4)), (VF)r, quarter);
}
INLINE VF circle(VF x, int quarter) {
  if (!(fabsf(x) < 1e4f)) return circle_far(x, quarter);
  const VF n = rintf(x * 0.636619772f);
  return circle_at(n, fmaf(n, 1.71512451e-15f, fmaf(n, 4.37113883e-8f, fmaf(n, -1.57079637f, x))), quarter);
}
INLINE VF m_sin(VF x) { return circle(x, 0); }
INLINE VF m_cos(VF x) { return circle(x, 1); }
INLINE VD m_sin(VD x) { return sin(x); }
INLINE VD m_cos(VD x) { return cos(x); }

#define OF_BOTH(T)                                                                         \
  INLINE T m_abs(T x) { return x < 0 ? -x : x; }                                           \
  INLINE T m_sign(T x) { return x > 0 ? T(1) : x < 0 ? T(-1) : x; }                        \
  INLINE T m_max(T a, T b) { return a > b || a != a ? a : b; } /* NaN if one of them is */ \
  INLINE T m_min(T a, T b) { return a < b || a != a ? a : b; }                             \
  INLINE B m_isfinite(T x) { return x - x == 0; }
OF_BOTH(VF)
OF_BOTH(VD)

// of the noise alone, where an error of 1e-6 is far below the unit of a normal
INLINE VF log_of_positive(VF x) { return __logf(x); }
INLINE VD log_of_positive(VD x) { return log(x); }
INLINE VF wave(VF turns, int quarter) { return quarter ? __cosf(turns) : __sinf(turns); }
INLINE VD wave(VD turns, int quarter) { return quarter ? cos(turns) : sin(turns); }
