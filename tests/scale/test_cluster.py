"""Three machines, which are processes here: the history of one process, also when a worker and
a machine are killed.
"""

import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import fluctua as fl
import trap
from fluctua.scale import cluster
from fluctua.store import history
from processes import wait_until

ITERATIONS = 4


def describe(estimator):
    return fl.Training(estimator, trap.THETA, optax.adam(0.1), trajectories=400, seed=3)


def test_without_ray_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"fluctua\[cluster\]"):
        fl.distributed(fl.ppgt(trap.SIMULATOR, trap.OBJECTIVE), "auto")


@pytest.fixture(scope="module")
def machines():
    """A cluster of three machines with one core each; the first is where this process is."""
    utils = pytest.importorskip(
        "ray.cluster_utils", reason="ray is not installed: pip install 'fluctua[cluster]'"
    )
    made = utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        made.add_node(num_cpus=1)
        made.wait_for_nodes()
        yield made
    finally:
        made.shutdown()


class Killing(cluster.Cluster):
    """A cluster on which something is killed while calls are in hand: `after` results, `kill`
    is called once.
    """

    after, kill = 0, None

    def wait(self):
        report = super().wait()
        self.after -= 1
        if self.after == 0:
            self.kill()
        return report


def rows(folder):
    return [row._replace(seconds=0.0) for row in history.read(folder / "history.csv")]


@pytest.mark.long
def test_history_is_that_of_one_process_though_a_worker_and_a_machine_are_killed(
    machines, tmp_path
):
    third = machines.add_node(num_cpus=1)
    machines.wait_for_nodes()
    alone = fl.distributed(fl.ppgt(trap.SIMULATOR, trap.OBJECTIVE), None, shards=20)
    fl.run(describe(alone), ITERATIONS, tmp_path / "here")
    estimator = fl.distributed(fl.ppgt(trap.SIMULATOR, trap.OBJECTIVE), None, shards=20)
    estimator.pool = pool = Killing(estimator.ranged, machines.address)
    try:
        wait_until(lambda: len(pool.workers()) >= 3, interval=0.1)  # all machines take part

        def kill_machine():
            machines.remove_node(third, allow_graceful=False)

        def kill_worker():
            pool.ray.kill(pool.actors[min(pool.ready)])
            pool.after, pool.kill = 30, kill_machine

        pool.after, pool.kill = 5, kill_worker
        fl.run(describe(estimator), ITERATIONS, tmp_path / "there")
        reasons = {loss.reason.split(":")[0] for loss in estimator.losses}
        assert rows(tmp_path / "there") == rows(tmp_path / "here")
        assert len(estimator.losses) >= 2
        assert reasons <= {
            "ActorDiedError",
            "ActorUnavailableError",
            "NodeDiedError",
            "RayActorError",
        }
        assert next(pool.numbers) >= 4  # a worker began in the place of the one that was killed

        with pytest.raises(
            FloatingPointError, match="of 20 trajectories are not finite"
        ):  # as it was raised there
            estimator(jax.random.key(0), {"f": jnp.full(1, 1e308)}, 400)
    finally:
        pool.close()
