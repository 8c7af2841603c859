"""A tensor of which a part is there, against the whole tensor: whatever an engine takes, it gets the same or is refused."""

from __future__ import annotations

import pytest
import torch

from tonnage.vllm_plugin.opening import LoadError
from tonnage.vllm_plugin.slices import SlicedTensor, sliced

pytestmark = pytest.mark.heavy

WHOLE = torch.arange(12.0 * 6).reshape(12, 6)


def rows(*ranges: tuple[int, int]) -> torch.Tensor:
    """Return the whole with these rows alone, and a row of padding behind them."""
    part = torch.cat([*(WHOLE[begin:end] for begin, end in ranges), torch.zeros(1, 6)])
    return sliced("w", part, 0, ranges, WHOLE.shape)


def columns(begin: int, end: int) -> torch.Tensor:
    return sliced("w", WHOLE[:, begin:end].contiguous(), 1, [(begin, end)], WHOLE.shape)


TAKEN = {
    "rows": (rows((4, 8)), lambda whole: whole.narrow(0, 4, 4)),
    "fewer rows": (rows((4, 8)), lambda whole: whole[5:7]),
    "one row": (rows((4, 8)), lambda whole: whole[-5]),
    "rows and columns": (rows((4, 8)), lambda whole: whole.narrow(1, 2, 3).narrow(0, 4, 4)),
    "columns": (columns(2, 4), lambda whole: whole.narrow(1, 2, 2)),
    "columns, some rows": (columns(2, 4), lambda whole: whole[3:9, 2:4]),
    "transposed": (columns(2, 4), lambda whole: whole.t().narrow(0, 2, 2)),
    "axes exchanged": (columns(2, 4), lambda whole: whole.transpose(0, 1).transpose(0, 1)[:, 3:4]),
    "permuted": (rows((4, 8)), lambda whole: whole.unsqueeze(0).permute(2, 0, 1)[:, :, 4:8]),
    "chunk": (rows((4, 8)), lambda whole: whole.chunk(3)[1]),
    "split": (rows((4, 8)), lambda whole: whole.split([4, 4, 4])[1]),
    "unbound": (rows((4, 8)), lambda whole: whole.unbind(0)[6]),
    "part of a fused half": (rows((0, 3), (6, 9)), lambda whole: whole.narrow(0, 6, 6).narrow(0, 0, 3)),
    "two ranges that meet": (rows((0, 3), (6, 9)), lambda whole: torch.cat([whole[0:3], whole[6:9]])),
    "converted before it is cut": (rows((4, 8)), lambda whole: whole.to(torch.float64)[4:8]),
    "copied before it is cut": (rows((4, 8)), lambda whole: whole.t().contiguous().clone()[:, 4:8]),
    "a view on the way": (rows((4, 8)), lambda whole: whole.detach()[4:8].contiguous()),
}


@pytest.mark.parametrize(("part", "take"), TAKEN.values(), ids=list(TAKEN))
def test_what_is_there_is_what_the_whole_has(part, take):
    assert isinstance(part, SlicedTensor)
    assert (part.shape, part.dtype) == (WHOLE.shape, WHOLE.dtype)
    taken, expected = take(part), take(WHOLE)
    assert not isinstance(taken, SlicedTensor)
    held = torch.full(expected.shape, -1.0)
    held.copy_(taken)
    assert torch.equal(held, expected)


@pytest.mark.parametrize(
    "take",
    [
        lambda whole: whole,
        lambda whole: whole.narrow(0, 3, 4),
        lambda whole: whole.narrow(0, 5, 4),
        lambda whole: whole[0],
        lambda whole: whole[0, 0],
        lambda whole: whole.narrow(1, 0, 2),
        lambda whole: whole.t(),
        lambda whole: whole.chunk(3)[0],
    ],
)
def test_more_than_is_there_is_refused_by_name(take):
    taken = take(rows((4, 8)))
    held = torch.full(taken.shape, -1.0)
    with pytest.raises(LoadError, match="vLLM: w: takes more than the cut of this rank"):
        held.copy_(taken)
    assert held.min() == held.max() == -1


def test_a_hole_between_ranges_is_no_range():
    with pytest.raises(LoadError, match=r"within 0\.\.2, 4\.\.6 of axis 0"):
        torch.empty(6, 6).copy_(rows((0, 2), (4, 6))[:6])


def test_everything_there_is_an_ordinary_tensor():
    assert type(sliced("w", WHOLE, 0, [(0, 12)], WHOLE.shape)) is torch.Tensor


def test_an_expert_of_another_rank_is_no_error_until_it_is_taken():
    stack = sliced("experts", torch.ones(2, 3, 4), 0, [(2, 4)], (8, 3, 4))
    assert [type(expert) is torch.Tensor for expert in stack] == [2 <= number < 4 for number in range(8)]
    assert stack[0].narrow(0, 1, 2).shape == (2, 4)
    with pytest.raises(LoadError, match="within nothing of axis 0"):
        torch.empty(3, 4).copy_(stack[0].to(torch.float64))


def test_nothing_can_be_taken_of_a_rank_that_holds_padding_alone():
    assert rows().narrow(0, 12, 0).clone().shape == (0, 6)
    with pytest.raises(LoadError, match="within nothing"):
        torch.empty(1, 6).copy_(rows().narrow(0, 11, 1))


def test_codes_and_bytes_are_followed_like_numbers():
    codes = WHOLE.to(torch.float8_e4m3fn)
    part = sliced("codes", codes[4:8].clone(), 0, [(4, 8)], codes.shape)
    assert part.dtype == torch.float8_e4m3fn
    assert torch.equal(part.narrow(0, 4, 4).view(torch.uint8), codes[4:8].view(torch.uint8))
