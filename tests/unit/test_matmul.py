"""Products cut for the threads of a CPU, against the whole in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hosted_tinker.modeling import matmul
from hosted_tinker.modeling.matmul import MAX_ROWS, multiply, multiply_transposed


@pytest.fixture(autouse=True, scope="module")
def three_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@given(
    rows=st.sampled_from([0, 1, 2, 7, MAX_ROWS, MAX_ROWS + 1]),
    out_features=st.sampled_from([3, 12, 13]),
    in_features=st.sampled_from([5, 6]),
    has_bias=st.booleans(),
)
def test_parts_make_the_whole(
    rows: int, out_features: int, in_features: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias, g = (
        torch.randn(shape, generator=generator)
        for shape in (
            (rows, in_features),
            (out_features, in_features),
            (out_features,),
            (rows, out_features),
        )
    )
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    found = multiply(x, weight, bias if has_bias else None)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    expected = g.double() @ weight.double()
    torch.testing.assert_close(
        multiply_transposed(g, weight).double(), expected, rtol=1e-5, atol=1e-5
    )


def test_few_rows_are_cut_and_many_are_not() -> None:
    weight = torch.randn(12, 5)
    assert matmul.count_parts(torch.randn(4, 5), weight, 12) == 3
    assert matmul.count_parts(torch.randn(4, 5), weight, 5) == 1
    assert matmul.count_parts(torch.randn(MAX_ROWS + 1, 5), weight, 12) == 1
    assert matmul.count_parts(torch.randn(4, 12), torch.randn(12, 5).T, 12) == 1
