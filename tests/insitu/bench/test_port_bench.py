"""A virtual bench that records its ports only: box, messages, driver and command."""

import dataclasses

import numpy as np
import pytest
from typer.testing import CliRunner

from fluctua.cli.app import app
from fluctua.insitu.bench import device, processes, server
from fluctua.insitu.bench.bench_model import make_model
from fluctua.insitu.bench.box import Bench
from fluctua.insitu.bench.session import Session
from fluctua.insitu.instrument.protocol import InvalidReply
from fluctua.insitu.instrument.virtual import VirtualBench

WHOLE = device.Sheet(rows=2, columns=3, seed=1, readout=0.0)
PORTS = dataclasses.replace(WHOLE, read="ports")


def measure(sheet):
    settings = device.reset_settings(sheet)
    return device.measure(sheet, device.draw_hidden(sheet), settings, count=3, points=41)


def test_ports_are_columns_of_the_whole_record():
    """Without readout noise, which is drawn for what is read, they are the same numbers."""
    whole = measure(WHOLE)
    ports = measure(PORTS)
    assert whole.shape == (3, 41, 12)
    assert np.array_equal(ports, whole[..., [0, 5, 6, 11]])
    assert ports.any()


def test_readout_noise_is_that_of_the_data_sheet():
    noisy = measure(dataclasses.replace(PORTS, readout=0.1)) * PORTS.scale
    clean = measure(PORTS) * PORTS.scale
    # 4 channels, 41 samples and 3 trajectories: a standard deviation to 1/√(2·492)
    assert np.std(noisy - clean) == pytest.approx(0.1, rel=4 / np.sqrt(2 * noisy.size))


@pytest.mark.parametrize(("sheet", "sites"), [(WHOLE, "0,1,2,3,4,5"), (PORTS, "0,5")])
def test_the_bench_lists_what_it_reads(sheet, sites):
    answer = Session(Bench(sheet)).execute(b"ACQ:SIT?;NOIS?").data
    assert answer == f"{sites};0.0\n".encode()


def test_an_acquisition_counts_the_bytes_that_are_read():
    bench = Bench(PORTS)
    bench.count, bench.points = 10, 11
    bench.initiate()
    assert bench.codes.nbytes == 2 * 10 * 11 * 4


def test_another_word_is_refused():
    with pytest.raises(ValueError, match=r"`read`.*all or ports.*'sides'"):
        device.Sheet(read="sides")
    outcome = CliRunner().invoke(app, ["virtual-bench", "--set", "read=sides"])
    assert outcome.exit_code == 2
    assert "'sides'" in outcome.output


def test_the_driver_names_the_channels_that_are_read():
    with server.background(Bench(PORTS)) as port:
        bench = VirtualBench(f"tcp://127.0.0.1:{port}", points=11)
        bench.arm(2)
        batch = bench.acquire()
        bench.close()
    assert bench.channels == ("Re psi[0]", "Re psi[5]", "Im psi[0]", "Im psi[5]")
    assert batch.x.shape == (2, 11, 4)
    assert bench.description.sites == (0, 5)
    assert not bench.description.reads_all


@pytest.mark.parametrize("answer", ["0,6", "0,0", "0.5", "-1"])
def test_resonators_that_are_not_there_are_refused(monkeypatch, answer):
    execute = Session.execute

    def lie(self, line, *room):
        reply = execute(self, line, *room)
        return reply._replace(data=f"{answer}\n".encode()) if line == b"ACQ:SIT?" else reply

    monkeypatch.setattr(Session, "execute", lie)
    with server.background(Bench(PORTS)) as port, pytest.raises(InvalidReply, match="ACQ:SIT"):
        VirtualBench(f"tcp://127.0.0.1:{port}", points=11)


def test_what_ports_do_not_tell_is_refused():
    with server.background(Bench(PORTS)) as port:
        bench = VirtualBench(f"tcp://127.0.0.1:{port}", points=11, sigma_kappa=0.1)
        with pytest.raises(ValueError, match="kerr and sigma_kappa"):
            make_model(bench)
        bench.close()


def test_the_options_of_a_bench_hold_what_it_reads():
    assert "read=ports" in processes.list_sheet_options(PORTS)
