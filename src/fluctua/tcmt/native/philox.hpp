// Counter-based normals: a pure function of (seed, trajectory, site, step), so CPU, GPU and JAX draw the
// same noise and any step can be replayed. Philox4x32-10 (Salmon et al., SC'11), then Box–Muller.
//
// One call serves two steps of one site: words (0, 1) give the two quadratures of the even step and
// words (2, 3) those of the odd one. The law is the specification of `fluctua.core.draws.philox`.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define FLUCTUA_BOTH __host__ __device__ __forceinline__
#else
#define FLUCTUA_BOTH inline
#endif

namespace fluctua {

struct Words {
  std::uint32_t w[4];
};

FLUCTUA_BOTH Words philox(std::uint64_t seed, std::uint32_t trajectory, std::uint32_t site, std::uint32_t pair) {
  std::uint32_t c0 = site, c1 = pair, c2 = trajectory, c3 = 0;
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = static_cast<std::uint64_t>(0xD2511F53u) * c0;
    const std::uint64_t p1 = static_cast<std::uint64_t>(0xCD9E8D57u) * c2;
    const std::uint32_t h0 = static_cast<std::uint32_t>(p0 >> 32), l0 = static_cast<std::uint32_t>(p0);
    const std::uint32_t h1 = static_cast<std::uint32_t>(p1 >> 32), l1 = static_cast<std::uint32_t>(p1);
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Two independent standard normals from two words. (w + ½)·2⁻³² lies in (0, 1], so the logarithm is finite.
template <class Real> FLUCTUA_BOTH void box_muller(std::uint32_t first, std::uint32_t second, Real& re, Real& im) {
  const Real scale = static_cast<Real>(2.3283064365386963e-10);  // 2⁻³²
  const Real radius = std::sqrt(Real(-2) * std::log((static_cast<Real>(first) + Real(0.5)) * scale));
  const Real angle = Real(6.283185307179586) * (static_cast<Real>(second) * scale);
  re = radius * std::cos(angle);
  im = radius * std::sin(angle);
}

}  // namespace fluctua
