// The paper's baseline, a column at a time: within each quantile bin of |ψ|², trajectory j has the baseline
//
//   λ̄⁽ʲ⁾ = Σ_{i≠j} λ̂⁽ⁱ⁾U_i² / Σ_{i≠j} U_i²                                                         (Eq. 20)
//
// With S0 = ΣU², m = Σλ̂U²/S0 over the whole bin, itself included, this is the same as
//
//   λ̂⁽ʲ⁾ − λ̄⁽ʲ⁾ = (λ̂⁽ʲ⁾ − m) / (1 − U_j²/S0),
//
// two numbers per bin and one division per trajectory. Where one weight dominates its bin both factors cancel; if
// less than 2⁻¹⁰ of the weight is the others', they are summed again, in double, without it (`alone`).
//
// Compiled once per instruction set, like sweep.cpp.
#include "parts.hpp"

namespace fluctua {
namespace FLUCTUA_ISA {

namespace {

constexpr int kPiece = kColumnPiece;  // trajectories whose weights are made, then added to bins, while in L1
constexpr int kMaxBins = kMostBins;

typedef float F32x2 __attribute__((vector_size(8), aligned(8), may_alias));
typedef float F32x4 __attribute__((vector_size(16), aligned(16), may_alias));
typedef double F64x2 __attribute__((vector_size(16), aligned(16), may_alias));
typedef double F64x4 __attribute__((vector_size(32), aligned(16), may_alias));
template <class Real, int Width> struct Group;
template <> struct Group<float, 2> {
  using T = F32x2;
};
template <> struct Group<float, 4> {
  using T = F32x4;
};
template <> struct Group<double, 2> {
  using T = F64x2;
};
template <> struct Group<double, 4> {
  using T = F64x4;
};

// ---- membership ------------------------------------------------------------------------------------------------

// Sorts non-negative numbers by their bits. `keys` and `spare` hold `count` each; the sorted one is returned.
template <class Word> Word* radix_sort(Word* keys, Word* spare, std::int64_t count) {
  constexpr int digits = int(sizeof(Word));
  std::uint32_t seen[digits][256] = {};
  for (std::int64_t i = 0; i < count; ++i)
    for (int d = 0; d < digits; ++d) ++seen[d][(keys[i] >> (8 * d)) & 255];
  for (int d = 0; d < digits; ++d) {
    if (seen[d][(keys[0] >> (8 * d)) & 255] == count) continue;  // all the same
    std::uint32_t sum = 0;
    for (int v = 0; v < 256; ++v) {
      const std::uint32_t n = seen[d][v];
      seen[d][v] = sum;
      sum += n;
    }
    for (std::int64_t i = 0; i < count; ++i) spare[seen[d][(keys[i] >> (8 * d)) & 255]++] = keys[i];
    Word* swap = keys;
    keys = spare;
    spare = swap;
  }
  return keys;
}

// Bin = number of edges not above the value, edges being the values of rank ⌊kE/K⌋: equal values share a bin.
template <class Real> void assign(const Columns<Real>& c, const Real* value, std::int64_t column, Real* scratch) {
  using Word = typename Simd<Real>::Word;
  Word* keys = reinterpret_cast<Word*>(scratch);
  const Word* from = reinterpret_cast<const Word*>(value);
  for (std::int64_t j = 0; j < c.count; ++j) keys[j] = from[j];
  const Word* sorted = radix_sort(keys, keys + c.stride, c.count);
  Word edge[kMaxBins];
  for (int k = 1; k < c.bins; ++k) edge[k - 1] = sorted[k * c.count / c.bins];
  std::uint8_t* bin = c.bin + column * c.stride;
  std::int32_t* members = c.members + column * c.bins;
  for (int k = 0; k < c.bins; ++k) members[k] = 0;
  for (std::int64_t j = 0; j < c.count; j += kLanes) {  // rows are padded to whole blocks
    std::uint32_t n[kLanes] = {};
    for (int k = 0; k + 1 < c.bins; ++k)
      for (int l = 0; l < kLanes; ++l) n[l] += from[j + l] >= edge[k];
    for (int l = 0; l < kLanes; ++l) bin[j + l] = std::uint8_t(n[l]);
  }
  for (std::int64_t j = 0; j < c.count; ++j) ++members[bin[j]];
}

// ---- sums over bins --------------------------------------------------------------------------------------------

struct Bins {
  void clear(int bins) {
    for (int k = 0; k < bins; ++k) s0[k] = s1[k] = 0;
  }
  double s0[kMaxBins], s1[kMaxBins];
};

// The numbers of each lane next to each other.
template <class V, class Real> FLUCTUA_INLINE void put(Real* to, V a, V b) {
  V low, high;
  zip(a, b, low, high);
  store(to, low);
  store(to + Simd<Real>::width, high);
}
FLUCTUA_INLINE void put(float* to, F32 a, F32 b, F32 c, F32 d) {
  F32 ab[2], cd[2];
  zip(a, b, ab[0], ab[1]);
  zip(c, d, cd[0], cd[1]);
  for (int h = 0; h < 2; ++h) {  // and the pairs as units of 64 bits
    F64 low, high;
    zip(bits<F64>(ab[h]), bits<F64>(cd[h]), low, high);
    store(to + 2 * h * Simd<float>::width, bits<F32>(low));
    store(to + (2 * h + 1) * Simd<float>::width, bits<F32>(high));
  }
}
FLUCTUA_INLINE void put(double* to, F64 a, F64 b, F64 c, F64 d) {
  for (int i = 0; i < Simd<double>::width; ++i) {
    to[4 * i] = a[i];
    to[4 * i + 1] = b[i];
    to[4 * i + 2] = c[i];
    to[4 * i + 3] = d[i];
  }
}

// Σ of groups of `Width` numbers by bin. Two tables in turn, so that neighbours in the same bin do not wait for each
// other; emptied into double after every piece.
template <class Real, int Width>
void add_up(const Real* groups, const std::uint8_t* bin, std::int64_t count, int bins, Bins* out) {
  using G = typename Group<Real, Width>::T;
  G table[2][kMaxBins];
  for (int k = 0; k < bins; ++k) table[0][k] = table[1][k] = G{};
  const G* v = reinterpret_cast<const G*>(groups);
  std::int64_t j = 0;
  for (; j + 4 <= count; j += 4) {
    table[0][bin[j]] += v[j];
    table[1][bin[j + 1]] += v[j + 1];
    table[0][bin[j + 2]] += v[j + 2];
    table[1][bin[j + 3]] += v[j + 3];
  }
  for (; j < count; ++j) table[0][bin[j]] += v[j];
  for (int k = 0; k < bins; ++k)
    for (int i = 0; i < Width / 2; ++i) {
      out[i].s0[k] += double(table[0][k][2 * i]) + double(table[1][k][2 * i]);
      out[i].s1[k] += double(table[0][k][2 * i + 1]) + double(table[1][k][2 * i + 1]);
    }
}

// m and 1/S0 of every bin. If all weights of a bin vanish so do its scores, and it does not matter what stands here.
template <class Real> void finish(const Bins& b, const std::int32_t* members, int bins, Real* mean, Real* inverse) {
  int singles = 0;
  for (int k = 0; k < bins; ++k) {
    const double one_over = b.s0[k] > 0 ? 1 / b.s0[k] : 0.0;
    mean[k] = Real(b.s1[k] * one_over);
    inverse[k] = Real(one_over);
    singles += members[k] == 1;
  }
  if (singles == 0) return;
  for (int k = 0; k < bins; ++k) {
    // One alone takes the baseline of all the others, in which it has no weight. If they have none either, it keeps
    // the 1/S0 that makes it look like all of the weight, and `settle` hands it to `alone`.
    if (members[k] != 1) continue;
    double s0 = 0, s1 = 0;
    for (int i = 0; i < bins; ++i)
      if (i != k) {
        s0 += b.s0[i];
        s1 += b.s1[i];
      }
    if (!(s0 > 0)) continue;
    mean[k] = Real(s1 / s0);
    inverse[k] = 0;
  }
}

// λ̂ − λ̄ of trajectory j by the definition: the others of its bin, or all others if it has none; their plain mean if
// all their scores vanish.
template <class Real>
Real alone(const Real* u, const Real* to_go, const std::uint8_t* bin, std::int64_t count, std::int64_t j, bool single) {
  double s0 = 0, s1 = 0, plain = 0, n = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (i == j || (!single && bin[i] != bin[j])) continue;
    const double w = double(u[i]) * double(u[i]);
    s0 += w;
    s1 += w * double(to_go[i]);
    plain += double(to_go[i]);
    n += 1;
  }
  return Real(double(to_go[j]) - (s0 > 0 ? s1 / s0 : plain / n));
}

// Small tables looked up by lane.
template <class Real> struct Lookup {
  using V = typename Simd<Real>::V;
  Lookup(const Real* table, int) : table(table) {}
  FLUCTUA_INLINE V operator()(const std::uint8_t* bin) const {
    V v;
    for (int l = 0; l < Simd<Real>::width; ++l) v[l] = table[bin[l]];
    return v;
  }
  const Real* table;
};

#if VECTOR_BYTES == 64
template <> struct Lookup<float> {  // up to 32 bins from two registers
  Lookup(const float* t, int bins)
      : table(t), low(_mm512_loadu_ps(t)), high(_mm512_loadu_ps(t + 16)), small(bins <= 32) {}
  FLUCTUA_INLINE F32 operator()(const std::uint8_t* bin) const {
    const __m512i i = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bin)));
    return bits<F32>(small ? _mm512_permutex2var_ps(low, i, high) : _mm512_i32gather_ps(i, table, 4));
  }
  const float* table;
  __m512 low, high;
  bool small;
};
#elif VECTOR_BYTES == 32
template <> struct Lookup<float> {
  Lookup(const float* t, int) : table(t) {}
  FLUCTUA_INLINE F32 operator()(const std::uint8_t* bin) const {
    const __m256i i = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bin)));
    return bits<F32>(_mm256_i32gather_ps(table, i, 4));
  }
  const float* table;
};
#endif

// G += (λ̂ − λ̄)U for one parameter at one step.
template <class Real>
void settle(const Columns<Real>& c, const Bins& sums, std::int64_t column, const Real* u, const Real* to_go,
            Real* gradient) {
  using S = Simd<Real>;
  using V = typename S::V;
  alignas(64) Real mean[kMaxBins], inverse[kMaxBins];
  for (int k = 0; k < 32; ++k) mean[k] = inverse[k] = 0;  // looked up in whole registers
  const std::uint8_t* bin = c.bin + column * c.stride;
  const std::int32_t* members = c.members + column * c.bins;
  finish(sums, members, c.bins, mean, inverse);
  const Lookup<Real> mean_of(mean, c.bins), inverse_of(inverse, c.bins);
  const Real least = Real(1.0 / 1024);
  for (std::int64_t j = 0; j < c.count; j += S::width) {
    const V score = load<V>(u + j);
    const V others = Real(1) - (score * score) * inverse_of(bin + j);  // share of the weight that is not its own
    V advantage = ratio(load<V>(to_go + j) - mean_of(bin + j), others);
    if (__builtin_expect(any(others < least), 0))
      for (int l = 0; l < S::width; ++l)
        if (others[l] < least && j + l < c.count)
          advantage[l] = alone(u, to_go, bin, c.count, j + l, members[bin[j + l]] == 1);
    store(gradient + j, load<V>(gradient + j) + advantage * score);
  }
}

template <class Real> struct Row {  // one site at one step
  const Real *re, *im, *zr, *zi;
};

template <class Real> Row<Real> row(const Columns<Real>& c, std::int64_t sites, std::int64_t slot, std::int64_t n) {
  const std::int64_t at = (slot * 2 * sites + 2 * n) * c.stride;
  return {c.psi + at, c.psi + at + c.stride, c.zeta + at, c.zeta + at + c.stride};
}

template <class Real> void site_column(const Plan<Real>& plan, const Columns<Real>& c, int n, std::int64_t slot) {
  using S = Simd<Real>;
  using V = typename S::V;
  const Row<Real> r = row(c, plan.sites, slot, n);
  Real *omega = c.scratch, *chi = omega + c.stride, *groups = chi + c.stride;
  const Real* to_go = c.to_go + slot * c.stride;
  Bins sums[2];
  for (Bins& b : sums) b.clear(c.bins);
  for (std::int64_t from = 0; from < c.count; from += kPiece) {
    const std::int64_t to = from + kPiece < c.count ? from + kPiece : c.count;
    for (std::int64_t j = from; j < to; j += S::width) {
      const V yr = load<V>(r.re + j), yi = load<V>(r.im + j), l = load<V>(to_go + j);
      const V u = load<V>(r.zr + j) * yi - load<V>(r.zi + j) * yr, v = (yr * yr + yi * yi) * u;
      store(omega + j, u);
      store(chi + j, v);
      const V w = u * u, x = v * v, wl = w * l, xl = x * l;
      put(groups + 4 * (j - from), w, wl, x, xl);
    }
    add_up<Real, 4>(groups, c.bin + n * c.stride + from, to - from, c.bins, sums);
  }
  settle(c, sums[0], n, omega, to_go, c.gradient + n * c.stride);
  settle(c, sums[1], n, chi, to_go, c.gradient + (plan.sites + n) * c.stride);
}

template <class Real>
void bond_column(const Plan<Real>& plan, const Columns<Real>& c, int n, int b, std::int64_t slot) {
  using S = Simd<Real>;
  using V = typename S::V;
  const std::int64_t column = plan.sites + b;
  const Row<Real> p = row(c, plan.sites, slot, n), q = row(c, plan.sites, slot, plan.upper_site[b]);
  Real *kappa = c.scratch, *groups = kappa + c.stride;
  const Real* to_go = c.to_go + slot * c.stride;
  Bins sums;
  sums.clear(c.bins);
  for (std::int64_t from = 0; from < c.count; from += kPiece) {
    const std::int64_t to = from + kPiece < c.count ? from + kPiece : c.count;
    for (std::int64_t j = from; j < to; j += S::width) {
      const V u = load<V>(p.zr + j) * load<V>(q.im + j) - load<V>(p.zi + j) * load<V>(q.re + j) +
                  (load<V>(q.zr + j) * load<V>(p.im + j) - load<V>(q.zi + j) * load<V>(p.re + j));
      store(kappa + j, u);
      const V w = u * u, wl = w * load<V>(to_go + j);
      put(groups + 2 * (j - from), w, wl);
    }
    add_up<Real, 2>(groups, c.bin + column * c.stride + from, to - from, c.bins, &sums);
  }
  settle(c, sums, column, kappa, to_go, c.gradient + (2 * plan.sites + b) * c.stride);
}

// |ψ_n|² for the site's column, |ψ_n|² + |ψ_m|² for each bond's.
template <class Real> void membership(const Plan<Real>& plan, const Columns<Real>& c, int n) {
  Real *own = c.scratch, *both = own + c.stride, *keys = both + c.stride;
  const Row<Real> p = row(c, plan.sites, 0, n);
  for (std::int64_t j = 0; j < c.stride; ++j) own[j] = p.re[j] * p.re[j] + p.im[j] * p.im[j];
  assign(c, own, n, keys);
  for (int b = plan.upper_start[n]; b < plan.upper_start[n + 1]; ++b) {
    const Row<Real> q = row(c, plan.sites, 0, plan.upper_site[b]);
    for (std::int64_t j = 0; j < c.stride; ++j) both[j] = own[j] + (q.re[j] * q.re[j] + q.im[j] * q.im[j]);
    assign(c, both, plan.sites + b, keys);
  }
}

template <class Real> void all_columns(const Plan<Real>& plan, const Columns<Real>& c, int n) {
  if (c.rebin) membership(plan, c, n);
  for (std::int64_t slot = 0; slot < c.slots; ++slot) {
    site_column(plan, c, n, slot);
    for (int b = plan.upper_start[n]; b < plan.upper_start[n + 1]; ++b) bond_column(plan, c, n, b, slot);
  }
}

}  // namespace

void columns(const Plan<float>& plan, const Columns<float>& c, int site) { all_columns(plan, c, site); }
void columns(const Plan<double>& plan, const Columns<double>& c, int site) { all_columns(plan, c, site); }

}  // namespace FLUCTUA_ISA
}  // namespace fluctua
