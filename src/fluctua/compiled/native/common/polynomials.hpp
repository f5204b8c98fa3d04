// Polynomials of Cephes in single precision, of numbers and of vectors.
#pragma once
#include "inline.hpp"

// ln(1 + m) = m − m²/2 + m³ log_series(m), for 1 + m in [√½, √2]
template <class V> COMMON_INLINE V log_series(V m) {
  V p = 7.0376836292e-2f * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  return p * m + 3.3333331174e-1f;
}

// sin r = r + r z sine_series(z), z = r², for |r| ≤ π/4
template <class V> COMMON_INLINE V sine_series(V z) {
  return (-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f;
}

// cos r = 1 − z/2 + z² cosine_series(z)
template <class V> COMMON_INLINE V cosine_series(V z) {
  return (2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f;
}
