// An ensemble, LANES trajectories side by side: its arrays, starts, noise and sums. Arrays have the trajectory last:
// component k of trajectory j is [k·E + j].
#pragma once
#include <stdlib.h>

struct Run {
  int64_t count, steps, first;  // first: the number of the first trajectory
  const F *shared, *timed;      // (SHARED,), (T, TIMED): the same for all trajectories
  const F *x, *context;         // (STATE, E) or (STATE,), (CONTEXT, E)
  const uint32_t* stream;       // (STREAM, E), or the key
  const F* guess;               // (E,) the return, or near it; the same for all if there is none
  F *reward, *last;             // (E,) in and out, (STATE, E) out
  const F* gradient;            // (PARAMETERS, E): of what is before the first step
  F* rows;                      // (E, PARAMETERS) out: the gradients
  const F* score;               // (PARAMETERS, E): ΣU before the first step
  const F *bar, *inverse;       // (T,) or (T, SCORES): the baseline, and 1/ΣU²; with a stop, 1/ΣW or 0
  double* sums;                 // (T, 2 + STOPS) or (T, SCORES, 2)
  int32_t* flags;               // DOMINATED: one trajectory has nearly all of a weight; NOT_FINITE
  double scale;                 // of what is left out: E/(E − 1) where trajectories leave themselves out
  double same;                  // the guess for all
};
#define DOMINATED  1
#define NOT_FINITE 2
#define ALONE      (sizeof(F) == 8 ? 1e-12 : 1e-5)  // share of the other trajectories below which there are none

#define INLINE_MEMBER inline __attribute__((always_inline))
#define SITES         ((WIDTH + 1) / 2)  // of Philox: two components each
#define SPARE         (WIENER == 2 ? 2 * SITES : 0)
#define LATER         (WIENER == 3 ? 4 * NORMALS : 0)
#ifndef EACH_NORMAL  // of Threefry
#define EACH_NORMAL(k) EACH(k, NORMALS)
#endif

template <class T, class S> INLINE T loaded(const S* from, int64_t j, int64_t count) {
  T v;
  if (j + LANES <= count) {
    __builtin_memcpy(&v, from + j, sizeof v);
  } else {
    for (int l = 0; l < LANES; l++) v[l] = from[j + l < count ? j + l : count - 1];
  }
  return v;
}
INLINE void stored(F* to, V v, int64_t j, int64_t count) {
  if (j + LANES <= count) {
    __builtin_memcpy(to + j, &v, sizeof v);
  } else {
    for (int l = 0; l < LANES && j + l < count; l++) to[j + l] = v[l];
  }
}
// zero for the lanes beyond the last trajectory
INLINE V counted(V v, int64_t j, int64_t count) {
  if (j + LANES <= count) return v;
  for (int l = 0; l < LANES; l++)
    if (j + l >= count) v[l] = 0;
  return v;
}

// Sums in double precision, in vectors of the processor's own length: compilers keep longer ones in memory.
#if DOUBLE
#define HALVES 1
typedef V Half;
INLINE Half half(V v, int) { return v; }
#else
#define HALVES 2
typedef float Narrow __attribute__((vector_size(2 * LANES)));
typedef double Half __attribute__((vector_size(4 * LANES)));
INLINE Half half(V v, int which) {
  Narrow part;
  __builtin_memcpy(&part, (const char*)&v + which * sizeof part, sizeof part);
  return __builtin_convertvector(part, Half);
}
#endif
struct Sum {
  Half of[HALVES] = {};
  INLINE_MEMBER void add(V v) { EACH(h, HALVES) of[h] += half(v, h); }
  INLINE_MEMBER double total() const {
    const int many = sizeof(Half) / 8;
    double part[many];
    Half all = of[0];
    for (int h = 1; h < HALVES; h++) all += of[h];
    __builtin_memcpy(part, &all, sizeof all);
    for (int step = many / 2; step > 0; step /= 2)
      for (int l = 0; l < step; l++) part[l] += part[l + step];
    return part[0];
  }
};

struct Spare {  // what Philox has drawn for later steps: words, and normals
  U words[AT_LEAST_ONE(SPARE)];
  V normals[AT_LEAST_ONE(LATER)];
};
struct Lanes {
  V x[STATE], c[AT_LEAST_ONE(CONTEXT)], reward;
  U stream[AT_LEAST_ONE(STREAM)];
  Spare spare;
};

INLINE void begun(Lanes& lanes, const Run& run, int64_t j) {
#if BEGINS  // one start, no context: streams are made of the key
  EACH(k, STATE) lanes.x[k] = bc(run.x[k]);
  lanes.reward = V{};
#if WIENER
  U number;
  for (int l = 0; l < LANES; l++) number[l] = (uint32_t)(run.first + (j + l < run.count ? j + l : run.count - 1));
  const U high = U{} + run.stream[0], low = U{} + run.stream[1];
#endif
#if WIENER == 1
  lanes.stream[0] = U{}, lanes.stream[1] = number;
  threefry(high, low, lanes.stream[0], lanes.stream[1]);
#elif WIENER >= 2
  lanes.stream[0] = high, lanes.stream[1] = low, lanes.stream[2] = number;
#endif
#else
  EACH(k, STATE) lanes.x[k] = loaded<V>(run.x + k * run.count, j, run.count);
  EACH(k, CONTEXT) lanes.c[k] = loaded<V>(run.context + k * run.count, j, run.count);
  EACH(k, STREAM) lanes.stream[k] = loaded<U>(run.stream + k * run.count, j, run.count);
  lanes.reward = loaded<V>(run.reward, j, run.count);
#endif
}
INLINE void ended(const Lanes& lanes, const Run& run, int64_t j) {
  EACH(k, STATE) stored(run.last + k * run.count, lanes.x[k], j, run.count);
  stored(run.reward, lanes.reward, j, run.count);
}

#if NORMALS
INLINE V normal_of(U high, U low) {
#if NOISE64 && DOUBLE
  return normal64(high, low);
#elif NOISE64
  return narrow(normal64(high, low));
#else
  return normal32(high, low);
#endif
}
#endif

#if NOISE64 && !DOUBLE
INLINE V rounded(N value) { return narrow(value); }
#else
INLINE V rounded(N value) { return value; }
#endif

// The normals of step n. Philox gives those of two or four steps at once: `spare` keeps the later ones, unless a run
// begins there.
INLINE void drawn(const U* stream, uint32_t n, V* z, Spare& spare, bool begins) {
#if NORMALS && WIENER == 1
  U a = U{}, b = U{} + n;
  threefry(stream[0], stream[1], a, b);
  EACH_NORMAL(k) {
    U high = U{}, low = U{} + (uint32_t)NORMAL_OF[k];
    threefry(a, b, high, low);
    z[k] = normal_of(high, low);
  }
#elif NORMALS && WIENER == 2
  for (int site = 0; site < SITES; site++) {
    const int re = PLACE_OF[site], im = site + SITES < WIDTH ? PLACE_OF[site + SITES] : -1;
    if (re < 0 && im < 0) continue;
    U c0 = U{} + (uint32_t)site, c1 = U{} + n / 2, c2 = stream[2], c3 = U{};
    if (n % 2 == 0 || begins) {
      philox<PHILOX_ROUNDS>(stream[0], stream[1], c0, c1, c2, c3);
      spare.words[2 * site] = c2;
      spare.words[2 * site + 1] = c3;
    }
    if (n % 2) {
      c0 = spare.words[2 * site];
      c1 = spare.words[2 * site + 1];
    }
    N cosine, sine;
    box_muller(c0, c1, cosine, sine);
    if (re >= 0) z[re] = rounded(cosine);
    if (im >= 0) z[im] = rounded(sine);
  }
#elif NORMALS && WIENER == 3
  if (n % 4 == 0 || begins) {
    for (int k = 0; k < NORMALS; k++) {
      N four[4];
      philox7_normals(stream, (uint32_t)NORMAL_OF[k], n / 4, four);
      EACH(b, 4) spare.normals[b * NORMALS + k] = rounded(four[b]);
    }
  }
  EACH(k, NORMALS) z[k] = spare.normals[n % 4 * NORMALS + k];
#endif
}
