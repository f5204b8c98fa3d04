"""The flags that the tests give XLA: JAX ends its process, without a message, at one that it
does not know.
"""

import pytest

from processes import QUICK_FLAGS, accepted_flags

UNKNOWN = "--xla_no_such_flag=true"


@pytest.mark.long
def test_flags_that_the_installed_jax_does_not_know_are_left_out():
    assert accepted_flags((QUICK_FLAGS[0], UNKNOWN)) == QUICK_FLAGS[:1]
    assert accepted_flags((UNKNOWN,)) == ()
