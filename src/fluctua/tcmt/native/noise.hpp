// Counter-based normals: a pure function of (seed, trajectory, site, step), so CPU, GPU and JAX draw the
// same noise and any step can be replayed. Philox4x32-10 (Salmon et al., SC'11), then Box–Muller.
//
// One call serves two steps of one site: words (0, 1) give the two quadratures of the even step and
// words (2, 3) those of the odd one. The law is the specification of `fluctua.core.draws.philox`.
#pragma once
#include <cmath>
#include <cstdint>

#include "philox.hpp"

namespace fluctua {

struct Words {
  std::uint32_t w[4];

  static void multiply(std::uint32_t a, std::uint32_t b, std::uint32_t& high, std::uint32_t& low) {
    const std::uint64_t p = static_cast<std::uint64_t>(a) * b;
    high = static_cast<std::uint32_t>(p >> 32);
    low = static_cast<std::uint32_t>(p);
  }
  static std::uint32_t mix(std::uint32_t a, std::uint32_t b, std::uint32_t c) { return a ^ b ^ c; }
};

inline Words philox(std::uint64_t seed, std::uint32_t trajectory, std::uint32_t site, std::uint32_t pair) {
  std::uint32_t c0 = site, c1 = pair, c2 = trajectory, c3 = 0;
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
    philox_round<Words>(c0, c1, c2, c3, k0, k1);
    k0 += PHILOX_KEY_0;
    k1 += PHILOX_KEY_1;
  }
  return {{c0, c1, c2, c3}};
}

// Two independent standard normals from two words. (w + ½)·2⁻³² lies in (0, 1], so the logarithm is finite.
template <class Real> inline void box_muller(std::uint32_t first, std::uint32_t second, Real& re, Real& im) {
  const Real scale = static_cast<Real>(2.3283064365386963e-10);  // 2⁻³²
  const Real radius = std::sqrt(Real(-2) * std::log((static_cast<Real>(first) + Real(0.5)) * scale));
  const Real angle = Real(6.283185307179586) * (static_cast<Real>(second) * scale);
  re = radius * std::cos(angle);
  im = radius * std::sin(angle);
}

}  // namespace fluctua
