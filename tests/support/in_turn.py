"""Cases that meet engines and precisions in turn, not each with each."""

from itertools import cycle, product


def in_turn(cases, *axes):
    """Pair every case with one combination of the axes, the combinations one after the other.

    A fault of a case, or of an engine or precision, fails in every pair that has it; all pairs
    together are as many as the longer of the two lists.
    """
    cases = list(cases)
    combinations = list(product(*axes))
    length = max(len(cases), len(combinations))
    pairs = zip(range(length), cycle(cases), cycle(combinations), strict=False)
    return [(case, *combination) for _, case, combination in pairs]
