// The native core as Python sees it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>

#include "cpu.hpp"
#include "engines.hpp"
#include "philox.hpp"

namespace nb = nanobind;

namespace {

using Normals = nb::ndarray<nb::numpy, double, nb::ndim<3>>;

Normals normals(std::uint64_t seed, std::size_t trajectories, std::size_t steps, std::size_t width) {
  if (trajectories == 0 || steps == 0 || width == 0)
    throw std::invalid_argument("trajectories, steps and width must all be at least 1");
  const std::size_t sites = (width + 1) / 2;
  auto data = std::make_unique<double[]>(trajectories * steps * width);
  for (std::size_t j = 0; j < trajectories; ++j)
    for (std::size_t n = 0; n < steps; ++n)
      for (std::size_t s = 0; s < sites; ++s) {
        const fluctua::Words words = fluctua::philox(seed, std::uint32_t(j), std::uint32_t(s), std::uint32_t(n / 2));
        const int odd = n % 2 ? 2 : 0;
        double re, im;
        fluctua::box_muller(words.w[odd], words.w[odd + 1], re, im);
        double* row = data.get() + (j * steps + n) * width;
        row[s] = re;
        if (sites + s < width) row[sites + s] = im;
      }
  double* raw = data.release();
  nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<double*>(p); });
  return Normals(raw, {trajectories, steps, width}, owner);
}

nb::tuple words(std::uint64_t seed, std::uint32_t trajectory, std::uint32_t site, std::uint32_t pair) {
  const fluctua::Words w = fluctua::philox(seed, trajectory, site, pair);
  return nb::make_tuple(w.w[0], w.w[1], w.w[2], w.w[3]);
}

void sweep(nb::dict given, nb::dict out, bool is_double, const std::string& engine) {
  const fluctua::Arrays in(given), to(out);
  const bool done = is_double ? fluctua::run_cpu<double>(in, to, engine) : fluctua::run_cpu<float>(in, to, engine);
  if (!done) throw nb::python_error();  // what the signal's handler raised
}

void binned(nb::dict given, nb::dict out, bool is_double, const std::string& engine) {
  const fluctua::Arrays in(given), to(out);
  const bool done = is_double ? fluctua::run_binned<double>(in, to, engine) : fluctua::run_binned<float>(in, to, engine);
  if (!done) throw nb::python_error();
}

void twin(nb::dict given, nb::dict of_twin, nb::dict out, bool is_double, const std::string& engine) {
  const fluctua::Arrays in(given), model(of_twin), to(out);
  const bool done =
      is_double ? fluctua::run_twin<double>(in, model, to, engine) : fluctua::run_twin<float>(in, model, to, engine);
  if (!done) throw nb::python_error();
}

std::vector<std::string> engine_names() {
  std::vector<std::string> names;
  for (const auto& e : fluctua::engines<float>()) names.emplace_back(e.name);
  return names;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Fluctua's native core.";
  m.def("normals", &normals, nb::arg("seed"), nb::arg("trajectories"), nb::arg("steps"), nb::arg("width"),
        "Standard normals (trajectories, steps, width): real quadratures of all sites, then imaginary ones.");
  m.def("words", &words, nb::arg("seed"), nb::arg("trajectory"), nb::arg("site"), nb::arg("pair"),
        "The four Philox words of one site and pair of steps.");
  m.def("sweep", &sweep, nb::arg("given"), nb::arg("out"), nb::arg("is_double"), nb::arg("engine") = "",
        "One pass over the trajectories of a resonator network; see fluctua.tcmt.kernel.");
  m.def("binned", &binned, nb::arg("given"), nb::arg("out"), nb::arg("is_double"), nb::arg("engine") = "",
        "The second pass over those trajectories, with the quantile-binned baseline.");
  m.def("twin", &twin, nb::arg("given"), nb::arg("twin"), nb::arg("out"), nb::arg("is_double"), nb::arg("engine") = "",
        "One pass with the twin correction; see fluctua.tcmt.twin_kernel.");
  m.def("engines", &engine_names, "Instruction sets this processor can use, best first.");
}
