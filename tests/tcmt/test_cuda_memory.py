"""Arrays that go to the device and come back in one copy."""

import numpy as np

from fluctua.tcmt.kernel import cuda
from fluctua.tcmt.kernel.cuda_memory import Bundle


def test_arrays_of_all_types_come_back_as_they_went(device):
    cp = cuda.require_cupy()
    arrays = {
        "real": np.linspace(0, 1, 7, dtype=np.float32),
        "none": np.zeros((0, 3)),
        "whole": np.arange(-3, 5, dtype=np.int32).reshape(2, 4),
        "one": np.array(2.5),
        "columns": np.arange(12.0).reshape(3, 4).T,  # not contiguous
    }
    bundle = Bundle.from_host(cp, arrays)
    there = bundle.get()
    assert list(there) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(there[name], array, strict=True)
        np.testing.assert_array_equal(bundle[name].get(), array, strict=True)
        assert bundle.address(name) == bundle[name].data.ptr


def test_a_bundle_is_written_to_and_copied_on(device):
    cp = cuda.require_cupy()
    bundle = Bundle(cp, sums=((3,), np.float64), flags=((2,), np.int32))
    bundle["sums"][...], bundle["flags"][...] = 1.5, 7
    target = cp.zeros(3)
    bundle.copy("sums", target.data)
    np.testing.assert_array_equal(target.get(), [1.5, 1.5, 1.5])
    np.testing.assert_array_equal(bundle.get()["flags"], [7, 7])
