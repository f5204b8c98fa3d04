"""Workers in this process that answer in any order and die at any time: what a cluster does,
without one.
"""

import random

from fluctua.scale.dispatch import CallResult, WorkerLost


class Chaos:
    """A pool of `many` workers. risk: that a report is a death. A worker may have computed before
    it died.

    `computed`: every call that was carried out, the lost ones too.
    """

    def __init__(self, subject, many, seed=0, risk=0.0):
        self.subject, self.risk, self.random = subject, risk, random.Random(seed)
        self.alive, self.next = list(range(many)), many
        self.held = []
        self.computed = []
        self.deaths = 0

    def workers(self):
        return self.alive

    def submit(self, worker, bundle):
        if worker in self.alive:
            self.held += [(worker, call) for call in bundle]

    def put(self, value):
        return value

    def wait(self):
        worker, call = self.held[self.random.randrange(len(self.held))]
        if self.random.random() < self.risk:
            if self.random.random() < 0.5:
                self.compute(call)
            self.held = [(other, call) for other, call in self.held if other != worker]
            self.alive[self.alive.index(worker)] = self.next
            self.next += 1
            self.deaths += 1
            return WorkerLost(worker, "it was killed")
        self.held.remove((worker, call))
        return CallResult(worker, call.number, self.compute(call))

    def compute(self, call):
        self.computed.append(call)
        return getattr(self.subject, call.method)(*call.arguments)

    def close(self):
        self.alive = []
