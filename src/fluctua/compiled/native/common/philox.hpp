// Philox4x32 (Salmon et al., SC'11), the counter-based generator of all kernels: its constants and its round.
//
// A word is a number, a vector of them, or that of a GPU's thread. `Words` says how they are multiplied and mixed:
//   Words::multiply(a, constant, high, low)    high and low words of the products
//   Words::mix(a, b, c)                        a ^ b ^ c
#pragma once
#include "inline.hpp"

#define PHILOX_ROUNDS     10
#define PHILOX7_ROUNDS    7  // they pass BigCrush
#define PHILOX_MULTIPLY_0 0xD2511F53u
#define PHILOX_MULTIPLY_1 0xCD9E8D57u
#define PHILOX_KEY_0      0x9E3779B9u  // added to the key after every round
#define PHILOX_KEY_1      0xBB67AE85u

template <class Words, class Word, class Key>
COMMON_INLINE void philox_round(Word& c0, Word& c1, Word& c2, Word& c3, Key k0, Key k1) {
  Word high0, low0, high1, low1;
  Words::multiply(c0, PHILOX_MULTIPLY_0, high0, low0);
  Words::multiply(c2, PHILOX_MULTIPLY_1, high1, low1);
  c0 = Words::mix(high1, c1, k0);
  c1 = low1;
  c2 = Words::mix(high0, c3, k1);
  c3 = low0;
}
