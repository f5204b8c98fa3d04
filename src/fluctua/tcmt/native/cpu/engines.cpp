#include "engines.hpp"

#ifdef FLUCTUA_X86_LEVELS
#include <cpuid.h>

#include <initializer_list>
#endif

namespace fluctua {

#define FLUCTUA_DECLARE(isa)            \
  namespace isa {                       \
  extern const Engine<float> engine32;  \
  extern const Engine<double> engine64; \
  }
FLUCTUA_DECLARE(baseline)
#ifdef FLUCTUA_X86_LEVELS
FLUCTUA_DECLARE(avx2)
FLUCTUA_DECLARE(avx512)
#endif

#ifdef FLUCTUA_X86_LEVELS
namespace {

// What the processor has and the operating system saves. Not `__builtin_cpu_supports`: clang-cl does not link its
// table.
struct Processor {
  unsigned ecx1 = 0, ebx7 = 0, saved = 0;

  Processor() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx1, &edx)) return;
    if (!__get_cpuid_count(7, 0, &eax, &ebx7, &ecx, &edx)) ebx7 = 0;
    if (has(ecx1, {27})) __asm__("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
  }
  static bool has(unsigned word, std::initializer_list<int> numbers) {
    for (int bit : numbers)
      if (!(word >> bit & 1)) return false;
    return true;
  }
  // FMA; AVX2, BMI2; registers of 128 and 256 bits
  bool avx2() const { return has(ecx1, {12}) && has(ebx7, {5, 8}) && has(saved, {1, 2}); }
  // F, DQ, CD, BW, VL; masks and registers of 512 bits
  bool avx512() const { return avx2() && has(ebx7, {16, 17, 28, 30, 31}) && has(saved, {5, 6, 7}); }
};

}  // namespace
#endif

template <> const std::vector<Engine<float>>& engines<float>() {
  static const std::vector<Engine<float>> all = [] {
    std::vector<Engine<float>> v;
#ifdef FLUCTUA_X86_LEVELS
    const Processor processor;
    if (processor.avx512()) v.push_back(avx512::engine32);
    if (processor.avx2()) v.push_back(avx2::engine32);
#endif
    v.push_back(baseline::engine32);
    return v;
  }();
  return all;
}

template <> const std::vector<Engine<double>>& engines<double>() {
  static const std::vector<Engine<double>> all = [] {
    std::vector<Engine<double>> v;
#ifdef FLUCTUA_X86_LEVELS
    const Processor processor;
    if (processor.avx512()) v.push_back(avx512::engine64);
    if (processor.avx2()) v.push_back(avx2::engine64);
#endif
    v.push_back(baseline::engine64);
    return v;
  }();
  return all;
}

}  // namespace fluctua
