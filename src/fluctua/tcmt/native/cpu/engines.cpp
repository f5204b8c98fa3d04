#include "engines.hpp"

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

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace
#endif

template <> const std::vector<Engine<float>>& engines<float>() {
  static const std::vector<Engine<float>> all = [] {
    std::vector<Engine<float>> v;
#ifdef FLUCTUA_X86_LEVELS
    if (has_avx512()) v.push_back(avx512::engine32);
    if (has_avx2()) v.push_back(avx2::engine32);
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
    if (has_avx512()) v.push_back(avx512::engine64);
    if (has_avx2()) v.push_back(avx2::engine64);
#endif
    v.push_back(baseline::engine64);
    return v;
  }();
  return all;
}

}  // namespace fluctua
