"""A twin that is wrong on purpose."""

import numpy as np

FAMILIES = ("omega", "kappa", "chi")


def wrong_by(error, seed):
    """A twin whose couplings are all wrong by a factor 1 + error·z, and whose detunings by error·z couplings.

    One draw for a whole training: a model is wrong in one way, not in another way every day.
    """

    def theta(true):
        rng = np.random.default_rng([seed, 0x7717])
        draw = {name: rng.normal(size=np.shape(true[name])) for name in FAMILIES}
        return {
            "omega": true["omega"] + error * draw["omega"],
            "kappa": true["kappa"] * (1 + error * draw["kappa"]),
            "chi": true["chi"] * (1 + error * draw["chi"]),
        }

    return theta
