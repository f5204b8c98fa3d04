"""The benchmark of latency runs programs in fresh processes and reports medians."""

import latency


def test_a_case_runs_in_a_process_of_its_own(tmp_path):
    program = "times['places'] = measure(begin) | {'kernels': os.environ['FLUCTUA_KERNELS']}\n"
    alone = latency.run_case(latency.Case("alone", program), tmp_path)["places"]
    shared = latency.run_case(latency.Case("shared", program, "shared"), tmp_path)["places"]
    assert shared["kernels"] == str(tmp_path / "kernels")
    assert alone["kernels"] != shared["kernels"]
    assert alone["wall"] >= 0
    assert alone["processor"] >= alone["compilers"] == 0


def test_processes_that_are_started_count_as_compilers(tmp_path):
    work = "import sys; os.system(f'{sys.executable} -c \"sum(range(10**6))\"')\n"
    case = latency.Case("busy", work + "times['all'] = measure(begin)")
    clocks = latency.run_case(case, tmp_path)["all"]
    assert clocks["compilers"] > 0
    assert clocks["processor"] > clocks["compilers"]


def test_medians_are_taken_part_by_part():
    runs = [{"call": {"wall": wall, "processor": 1.0}} for wall in (3.0, 1.0, 2.0)]
    assert latency.take_medians(runs) == {"call": {"wall": 2.0, "processor": 1.0}}


def test_programs_of_all_cases_are_python():
    for case in [*latency.list_cases(), *latency.list_variants()]:
        compile(latency.CLOCK + case.program + latency.END, case.name, "exec")
    for name, change in latency.VARIANTS.items():
        compile(change, name, "exec")


def test_every_backend_is_a_case():
    names = [case.name for case in latency.list_cases()]
    assert len({*names}) == len(names)
    for backend in ("auto", "cpu", "jax"):
        assert f"{backend}, nothing compiled" in names
    rows = [{"case": "a", "times": {"call": {"wall": 1.0, "processor": 0.5, "compilers": 0.25}}}]
    assert latency.write_table(rows).splitlines()[-1] == "| a | call | 1.000 | 0.500 | 0.250 |"
