// Python interface of the native core.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>

#include "cpu/engines.hpp"
#include "cpu/passes.hpp"
#include "noise.hpp"

namespace nb = nanobind;

namespace {

using Normals = nb::ndarray<nb::numpy, double, nb::ndim<3>>;

Normals normals(std::uint64_t seed, std::size_t trajectories, std::size_t steps, std::size_t width) {
  if (trajectories == 0 || steps == 0 || width == 0)
    throw std::invalid_argument("trajectories, steps and width must all be at least 1");
  constexpr std::size_t most = std::size_t(1) << 32;  // counters of trajectories, sites and pairs of steps
  if (trajectories > most || steps > 2 * most || width > 2 * most)
    throw std::invalid_argument("trajectories, pairs of steps and sites must fit 32 bits");
  fluctua::length({std::int64_t(trajectories), std::int64_t(steps), std::int64_t(width), sizeof(double)});
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

using fluctua::Fields;

// Python's own exception if a signal's handler raised one.
void finish(bool done) {
  if (!done) throw nb::python_error();
}

void sweep(nb::object plan, nb::object once, nb::object out, bool is_double, const std::string& engine) {
  const Fields p(plan), o(once), to(out);
  finish(is_double ? fluctua::one_pass<double>(p, o, to, engine) : fluctua::one_pass<float>(p, o, to, engine));
}

void binned(nb::object plan, nb::object once, nb::object out, bool is_double, const std::string& engine) {
  const Fields p(plan), o(once), to(out);
  finish(is_double ? fluctua::binned_pass<double>(p, o, to, engine) : fluctua::binned_pass<float>(p, o, to, engine));
}

void twin(nb::object plan, nb::object once, nb::object model, nb::object tables, nb::object out, bool is_double,
          const std::string& engine) {
  const Fields p(plan), o(once), m(model), t(tables), to(out);
  finish(is_double ? fluctua::twin_pass<double>(p, o, m, t, to, engine)
                   : fluctua::twin_pass<float>(p, o, m, t, to, engine));
}

void measured(nb::object plan, nb::object states, bool is_double, const std::string& engine) {
  const Fields p(plan), s(states);
  finish(is_double ? fluctua::measured_pass<double>(p, s, engine) : fluctua::measured_pass<float>(p, s, engine));
}

void filter(nb::object network, nb::object job, bool is_double, const std::string& engine) {
  const Fields n(network), j(job);
  finish(is_double ? fluctua::filter_pass<double>(n, j, engine) : fluctua::filter_pass<float>(n, j, engine));
}

void information(nb::object terms, nb::object job) {
  const Fields t(terms), j(job);
  finish(fluctua::information_pass(t, j));
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
  m.def("plan_fields", &fluctua::plan_fields, "Names of the fields that `plan` must have, in order.");
  m.def("sweep", &sweep, nb::arg("plan"), nb::arg("once"), nb::arg("out"), nb::arg("is_double"), nb::arg("engine") = "",
        "One pass over the trajectories of a resonator network; see fluctua.tcmt.kernel.cpu.");
  m.def("binned", &binned, nb::arg("plan"), nb::arg("once"), nb::arg("out"), nb::arg("is_double"),
        nb::arg("engine") = "", "The second pass over those trajectories, with the quantile-binned baseline.");
  m.def("twin", &twin, nb::arg("plan"), nb::arg("once"), nb::arg("model"), nb::arg("tables"), nb::arg("out"),
        nb::arg("is_double"), nb::arg("engine") = "", "One pass with the twin correction.");
  m.def("measured", &measured, nb::arg("plan"), nb::arg("states"), nb::arg("is_double"), nb::arg("engine") = "",
        "Sums of the scores of measured states; see fluctua.tcmt.kernel.cpu.");
  m.def("filter", &filter, nb::arg("network"), nb::arg("job"), nb::arg("is_double"), nb::arg("engine") = "",
        "The filter of sampled states and its pass back; see fluctua.tcmt.kernel.samples.");
  m.def("information", &information, nb::arg("terms"), nb::arg("job"),
        "Information about the numbers of a network; see fluctua.tcmt.kernel.samples.");
  m.def("engines", &engine_names, "Instruction sets this processor can use, best first.");
}
