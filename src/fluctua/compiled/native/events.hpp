// The events of one step of a jump process, number for number those of JAX; the functions `event` and `event_scores`
// above are one of them. Trajectories that have passed the end of the step wait for the others of their block.
#pragma once

// uniform in [0, 1), as JAX makes it of the 32 or 64 bits of its type
INLINE void uniform_of(U high, U low, VF& f) { f = as_real((U)(((high ^ low) >> 9) | 0x3f800000u)) - 1.0f; }
INLINE void uniform_of(U high, U low, VD& f) {
  UL bits = (__builtin_convertvector(high, UL) << 20) | (__builtin_convertvector(low, UL) >> 12);
  f = as_real((UL)(bits | 0x3ff0000000000000ULL)) - 1.0;
}
// the draw with the key that is number `which` of those that (k0, k1) splits into
INLINE V uniform_from(U k0, U k1, unsigned which) {
  U a = U{}, b = U{} + which, high = U{}, low = U{};
  threefry(k0, k1, a, b);
  threefry(a, b, high, low);
  V f;
  uniform_of(high, low, f);
  return f;
}
// −ln(1 − u): the difference is exact
INLINE V exponential_of(V u) {
#ifdef LANES
  return -log_of_positive((V)(F(1) - u));
#else
  return -m_log(F(1) - u);
#endif
}

// From x on. p: where the last event leads, and the score of all of them behind.
template <bool SCORED>
INLINE void events(const F* u, const F* w, const V* c, const V* x, const U* stream, unsigned n, V* p) {
  U s0 = U{}, s1 = U{} + n, k0 = U{}, k1 = U{} + 1u;  // the normals of the step have the key before
  threefry(stream[0], stream[1], s0, s1);
  threefry(s0, s1, k0, k1);
  EACH(k, STATE) p[k] = x[k];
  if (SCORED) EACH(k, EVENT_SCORES) p[STATE + k] = bc(F(0));
  V since = bc(F(0));
  B going = mask(1);
  for (unsigned k = 0; any(going) && k < MAX_EVENTS; k++) {
    U a = U{}, b = U{} + k;
    threefry(k0, k1, a, b);
    V draws[3 + EVENT_CARRIES * (EVENT_SCORES + STATE)];
    draws[0] = since;
    draws[1] = exponential_of(uniform_from(a, b, 0));
    draws[2] = uniform_from(a, b, 1);
#if EVENT_CARRIES  // the sums so far, and where the step began
    EACH(k, EVENT_SCORES) draws[3 + k] = p[STATE + k];
    EACH(k, STATE) draws[3 + EVENT_SCORES + k] = x[k];
#endif
    V y[STATE], ds[AT_LEAST_ONE(EVENT_SCORES)];
    B over = mask(0);
    if (SCORED) {
      event_scores(u, w, c, p, nullptr, draws, y, since, over, ds);
      EACH(k, EVENT_SCORES) p[STATE + k] += sel(going, ds[k], bc(F(0)));
    } else {
      event(u, w, c, p, nullptr, draws, y, since, over, ds);
    }
    EACH(k, STATE) p[k] = sel(going, y[k], p[k]);
    going = going & ~over;
  }
  EACH(k, STATE) p[k] = sel(going, bc(F(NAN)), p[k]);  // more than MAX_EVENTS
}
