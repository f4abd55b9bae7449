"""Recording and tapes, op by op: what is kept, how results are computed in place, and that values live long enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.library import Library

from parallel.group import get_group
from parallel.library import register_op
from workers.graphs.arena import Arena
from workers.graphs.record import Recording, copy_into, record
from workers.graphs.tape import Tape, bind

Function = Callable[[torch.Tensor], torch.Tensor]

WEIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As steps are run."""
    with torch.inference_mode():
        yield


def tape_of(function: Function, x: torch.Tensor) -> tuple[Tape, Recording]:
    recording = record(lambda: function(x))
    result = recording.result
    assert result is not None
    return bind(recording, Arena(), torch.empty(result.shape, dtype=result.dtype), {}), recording


def ops_of(recording: Recording) -> list[str]:
    return [call.op._schema.name.removeprefix("aten::") for call in recording.calls]


FUNCTIONS: dict[str, Function] = {
    "arithmetic": lambda x: (x + 1) * x - x / 3 + 2.5 * x,
    "linear": lambda x: F.linear(x, WEIGHT).pow(2).mean(-1, keepdim=True) + 1e-6,
    "views": lambda x: torch.cat([part * 2 for part in x.chunk(2, dim=-1)], dim=-1).unflatten(-1, (2, 2)).flatten(1),
    "transposed": lambda x: (x.t() + 1).t().reshape(-1).view(x.shape),
    "casts": lambda x: x.to(torch.bfloat16).float() + x.double().float(),
    "no cast": lambda x: x.float() + x.contiguous(),
    "in place": lambda x: torch.zeros_like(x).add_(x).mul_(2)[:, :2].clone(),
    "slice written": lambda x: (y := x * 1, y[:, 1:3].copy_(x[:, :2]), y[0].zero_())[0],
    "several results": lambda x: sum(x.topk(2, dim=-1)) + x.max(dim=-1, keepdim=True).values,
    "empty filled": lambda x: torch.empty_like(x).copy_(x).sigmoid(),
    "constants": lambda x: x * torch.arange(4) + torch.ones(4) + torch.full((4,), 2.0),
    "expanded": lambda x: x.sum(-1, keepdim=True).expand(-1, 4) * x,
    "broadcast": lambda x: torch.where(x > 0, x, torch.zeros((), dtype=x.dtype)),
    "the input": lambda x: x,
    "a view of the input": lambda x: x[:, 1:],
    "gathered": lambda x: WEIGHT.index_select(0, (x[:, 0] > 0).long())[:, :3],
    "normed": lambda x: F.layer_norm(x, (4,)) + F.softmax(x, dim=-1) + F.gelu(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_replay_has_the_bits_of_the_function(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(5, 4)
    tape, _ = tape_of(FUNCTIONS[name], x)
    for _ in range(3):
        x.normal_(generator=generator)
        expected = FUNCTIONS[name](x.clone())
        assert torch.equal(tape(), expected)


def test_views_and_memory_vanish() -> None:
    _, recording = tape_of(
        lambda x: x.view(2, 10).t().unsqueeze(0)[0].t().reshape(5, 4) + torch.empty(4), torch.ones(5, 4)
    )
    assert ops_of(recording) == ["add"]


def test_copies_are_copies_and_the_quickest_call_is_taken() -> None:
    _, recording = tape_of(lambda x: F.silu((x * 2).to(torch.bfloat16)), torch.ones(5, 4))
    assert [call.into for call in recording.calls] == [torch.mul, copy_into, torch._C._nn.silu]


def test_results_are_computed_into_the_arena() -> None:
    """With ``out=`` no step allocates what it computes: the tape holds every tensor it will ever use."""
    x = torch.ones(5, 4)
    tape, recording = tape_of(lambda x: F.silu(x * 2).mean(-1, keepdim=True) + x, x)
    assert all(call.into is not None for call in recording.calls)
    steps: list[Any] = [*tape.steps[:-1]]
    targets = [step.keywords["out"].data_ptr() for step in steps]
    tape()
    assert [step.keywords["out"].data_ptr() for step in steps] == targets


@pytest.fixture
def library() -> Library:
    return Library("graphs_test", "FRAGMENT")


def test_an_op_of_ours_is_called_and_its_result_copied(library: Library) -> None:
    def halve(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    register_op("halve", halve, target_library=library, dispatch_key="CPU")
    x = torch.ones(5, 4)
    tape, recording = tape_of(lambda x: torch.ops.graphs_test.halve(x)[:, :2] * 3, x)
    assert ops_of(recording) == ["graphs_test::halve", "mul"]
    x.fill_(4.0)
    assert tape().tolist() == [[6.0, 6.0]] * 5


def test_an_op_that_only_writes_is_kept(library: Library) -> None:
    written: list[float] = []

    def note(x: torch.Tensor, output: torch.Tensor) -> None:
        written.append(float(x[0, 0]))
        output.copy_(x + 1)

    register_op("note", note, mutates_args=("output",), target_library=library, dispatch_key="CPU")
    x = torch.zeros(5, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        torch.ops.graphs_test.note(x * 1, output)
        return output * 2

    tape, _ = tape_of(function, x)
    x.fill_(3.0)
    assert tape().tolist() == [[8.0] * 4] * 5
    assert written == [0.0, 3.0]


def test_a_function_that_gives_other_bits_is_not_taken(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    """Were ``torch.mul`` to round otherwise than the op, the op's own overload would be called."""

    def wrong(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> None:
        torch.ops.aten.mul.out(x, y, out=out)
        out[0] += 1e-3

    monkeypatch.setattr(torch, "mul", wrong)
    _, recording = tape_of(lambda x: torch.ops.aten.mul.Tensor(x + 1, x), torch.ones(5, 4))
    assert recording.calls[-1].into is torch.ops.aten.mul.out


def test_exchanges_are_not_carried_out() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        summed: Any = torch.ops.lockstep.all_reduce(x, "no such group")
        gathered: Any = torch.ops.lockstep.all_gather(summed, 3, "no such group")
        return gathered.sum(0)

    with pytest.raises(ValueError, match="no group 'no such group'"):
        get_group("no such group")
    _, recording = tape_of(function, torch.ones(5, 4))
    assert ops_of(recording) == ["lockstep::all_reduce", "lockstep::all_gather", "sum"]
