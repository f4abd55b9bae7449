"""The collectives over real ranks: the bits of their results, and the errors when a rank is missing or differs."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel import toolchain
from parallel.collectives.base import CollectiveError, CollectiveMismatch, CollectiveTimeout
from parallel.collectives.shared_memory import SLOT_BYTES, open_shared_memory
from parallel.group import TensorParallelGroup, init_group
from parallel.group_spec import GroupSpec
from tests.dist.ranks import run_ranks, try_ranks

HOST_BACKENDS = ["shm", "gloo"]
COUNTS = [0, 1, 7, 511, 513, SLOT_BYTES // 2 + 3]
SHORT = 0.4


def as_bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def values(rank: int, dtype: str, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return (torch.randn(count, generator=generator) * 100).to(getattr(torch, dtype))


def all_reduce(group: TensorParallelGroup, dtype: str) -> list[bytes]:
    return [as_bytes(group.all_reduce(values(group.rank, dtype, count))) for count in COUNTS]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_all_reduce_sums_in_rank_order_in_fp32_with_the_same_bits_everywhere(size: int, dtype: str) -> None:
    expected: list[bytes] = []
    for count in COUNTS:
        total = values(0, dtype, count).float()
        for rank in range(1, size):
            total = total + values(rank, dtype, count).float()
        expected.append(as_bytes(total.to(getattr(torch, dtype))))
    for backend in HOST_BACKENDS:
        assert run_ranks(all_reduce, size, dtype, backend=backend) == [expected] * size


def special_values(group: TensorParallelGroup, dtype: str) -> list[str]:
    kind = getattr(torch, dtype)
    big = torch.finfo(kind).max
    x = torch.tensor([torch.inf, torch.nan, big, -big, -0.0, torch.finfo(kind).smallest_normal / 4, 1.0], dtype=kind)
    return [str(float(value)) for value in group.all_reduce(x)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_infinities_nan_overflow_and_subnormals(dtype: str, backend: str) -> None:
    tiny = 2 * torch.finfo(getattr(torch, dtype)).smallest_normal / 4
    expected = ["inf", "nan", "inf", "-inf", "-0.0", str(tiny), "2.0"]
    assert run_ranks(special_values, 2, dtype, backend=backend) == [expected] * 2


def other_operations(group: TensorParallelGroup) -> None:
    rank, size = group.rank, group.size
    for shape in [(2, 3), (0, 3), (40_000,)]:
        for dtype in (torch.int64, torch.int32, torch.bfloat16, torch.bool):
            expected = torch.stack([torch.full(shape, r + 1).to(dtype) for r in range(size)])
            mine = expected[rank]
            assert torch.equal(group.all_gather(mine), expected)
            for root in range(size):
                gathered = group.gather(mine, dst=root)
                assert (gathered is None) == (rank != root)
                if gathered is not None:
                    assert torch.equal(gathered, expected)
                assert torch.equal(group.broadcast(mine, src=root), expected[root])
            group.barrier()
    # A tensor that is not contiguous, and one that requires a gradient.
    x = torch.arange(12.0).reshape(3, 4).T.requires_grad_()
    assert torch.equal(group.all_reduce(x.detach()), size * x.detach())
    assert torch.equal(group.broadcast(x, src=0), x)


@pytest.mark.parametrize("backend", HOST_BACKENDS)
@pytest.mark.parametrize("size", [2, 3])
def test_gather_broadcast_and_barrier(backend: str, size: int) -> None:
    run_ranks(other_operations, size, backend=backend)


def many_small_sums(group: TensorParallelGroup) -> bool:
    for step in range(2000):
        x = torch.full((1 + step % 5,), float(step + group.rank))
        if group.all_reduce(x)[0].item() != sum(step + rank for rank in range(group.size)):
            return False
    return True


def test_more_ranks_than_cores_make_progress() -> None:
    assert run_ranks(many_small_sums, 4, backend="shm", timeout=60) == [True] * 4


def message_of(function: Callable[[], object]) -> str:
    """The class and text of the collective error that ``function`` raises."""
    try:
        function()
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def skip_one(group: TensorParallelGroup) -> str:
    def step() -> None:
        if group.rank != 1:
            group.all_reduce(torch.ones(100))
        group.gather(torch.ones(8))

    return message_of(step)


@pytest.mark.parametrize("backend", HOST_BACKENDS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_skipped_collective_is_a_mismatch_on_every_rank(backend: str, size: int) -> None:
    for message in run_ranks(skip_one, size, backend=backend):
        assert message.startswith("CollectiveMismatch")
        assert "called all_reduce of 400 bytes of float32" in message
        assert "rank 1 called gather of 32 bytes of float32 with root 0" in message


def differ(group: TensorParallelGroup, what: str) -> str:
    odd = group.rank == 1
    if what == "epoch":
        group.set_epoch(8 if odd else 7)
    x = torch.ones(5 if odd and what == "size" else 4, dtype=torch.int64 if odd and what == "dtype" else torch.float32)
    return message_of(lambda: group.broadcast(x, src=1 if odd and what == "root" else 0))


@pytest.mark.parametrize("backend", HOST_BACKENDS)
@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("size", ["16 bytes", "20 bytes"]),
        ("dtype", ["float32", "int64"]),
        ("root", ["root 0", "root 1"]),
        ("epoch", ["epoch 7", "epoch 8"]),
    ],
)
def test_a_difference_between_ranks_is_in_the_error(backend: str, what: str, texts: list[str]) -> None:
    for message in run_ranks(differ, 2, what, backend=backend):
        assert message.startswith("CollectiveMismatch")
        assert all(text in message for text in texts)


def be_late(group: TensorParallelGroup, folder: str) -> list[str]:
    """Rank 1 joins only after the others have timed out."""
    done = [Path(folder, f"done-{rank}") for rank in range(group.size)]
    if group.rank == 1:
        while not all(path.exists() for rank, path in enumerate(done) if rank != 1):
            time.sleep(0.01)
    messages = [message_of(lambda: group.all_reduce(torch.ones(4))), message_of(group.barrier)]
    done[group.rank].touch()
    return messages


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_a_missing_rank_is_named_and_the_group_is_unusable(backend: str, tmp_path: Path) -> None:
    first, late, third = run_ranks(be_late, 3, str(tmp_path), backend=backend, collective_timeout=SHORT)
    timed_out = [messages for messages in (first, third) if messages[0].startswith("CollectiveTimeout")]
    assert timed_out, (first, third)
    for messages in timed_out:
        assert "rank 1 did not join all_reduce of 16 bytes of float32" in messages[0]
        assert "collective 1 of group 'tp'" in messages[0]
        assert "0.4 s" in messages[0]
        assert "was aborted after CollectiveTimeout" in messages[1]
    assert late[0].startswith("Collective") and late[1].startswith("Collective")


def die(group: TensorParallelGroup) -> str:
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return message_of(lambda: group.all_reduce(torch.ones(4)))


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_a_killed_rank_ends_the_wait_of_the_others(backend: str) -> None:
    outcomes = try_ranks(die, 2, backend=backend, collective_timeout=SHORT)
    assert outcomes[1].error == "the process ended with -9"
    assert outcomes[0].value.startswith("Collective")


def leave(group: TensorParallelGroup) -> list[object]:
    group.barrier()
    if group.rank == 1:
        group.close()
        return []
    with pytest.raises(CollectiveError) as caught:
        group.all_reduce(torch.ones(4))
    return [type(caught.value).__name__, str(caught.value), *caught.value.missing]


def test_a_rank_that_closes_the_group_ends_the_wait_of_the_others() -> None:
    (kind, message, missing), _ = run_ranks(leave, 2, backend="shm", collective_timeout=60.0, timeout=20)
    assert (kind, missing) == ("CollectiveError", 1)
    assert "rank 1 has closed the group" in message


def fall_back(group: TensorParallelGroup, backend: str, folder: str) -> list[str]:
    """Open a second group; rank 1 finds neither a compiler nor a compiled library."""
    run_id = f"{os.getppid()}-{Path(folder).name}"
    spec = GroupSpec("second", group.rank, group.size, f"file://{folder}/store", run_id=run_id, backend=backend)
    spec = replace(spec, timeout=30.0, library_dir=f"{folder}/{group.rank}")
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    compilers = toolchain.COMPILERS
    logging.getLogger("lockstep").addHandler(handler)
    try:
        if group.rank == 1:
            toolchain.COMPILERS = ("no-such-compiler",)
        second = init_group(spec, group.device)
        total = second.all_reduce(torch.ones(2)).tolist()
        second.close()
        return [second.backend, str(total), *warnings]
    except CollectiveError as error:
        return [type(error).__name__, str(error)]
    finally:
        toolchain.COMPILERS = compilers
        logging.getLogger("lockstep").removeHandler(handler)


def test_without_a_compiler_all_ranks_fall_back_to_gloo_with_a_warning(tmp_path: Path) -> None:
    first, second = run_ranks(fall_back, 2, "auto", str(tmp_path), timeout=90)
    assert first[:2] == second[:2] == ["gloo", "[2.0, 2.0]"]
    assert "fall back to gloo" in first[2] and "rank 1 has no library" in first[2]
    assert "no C compiler (no-such-compiler) on the PATH" in second[2]


def test_an_explicit_shm_backend_does_not_fall_back(tmp_path: Path) -> None:
    for kind, text in run_ranks(fall_back, 2, "shm", str(tmp_path), timeout=90):
        assert kind == "NoLibraryError"
        assert "rank 1 has no library" in text


def test_a_missing_rank_at_the_rendezvous_is_named_and_no_segment_is_left(tmp_path: Path) -> None:
    run_id = f"{os.getpid()}-{tmp_path.name}"
    for rank, missing in ((0, 1), (1, 0)):
        with pytest.raises(CollectiveTimeout, match=f"rank {missing} ") as caught:
            open_shared_memory("tp", rank, 2, run_id=run_id, library_dir=str(tmp_path), timeout=0.1)
        assert caught.value.missing == (missing,)
        assert not list(Path("/dev/shm").glob(f"*{run_id}*"))


def test_gloo_names_a_missing_rank_at_the_rendezvous(tmp_path: Path) -> None:
    spec = GroupSpec("tp", 0, 2, f"file://{tmp_path}/store", run_id="1-a", backend="gloo", timeout=SHORT)
    with pytest.raises(CollectiveTimeout, match="rank 1 of 2 did not join within") as caught:
        init_group(spec, torch.device("cpu"))
    assert caught.value.missing == (1,)


def test_unsupported_dtypes_and_roots_are_refused() -> None:
    for message in run_ranks(refused, 2, backend="shm"):
        assert message == ["all_reduce sums float32, bfloat16, float16", "broadcast with root 2; the ranks are 0 to 1"]


def refused(group: TensorParallelGroup) -> list[str]:
    messages: list[str] = []
    for call in (lambda: group.all_reduce(torch.ones(2, dtype=torch.int64)), lambda: group.broadcast(torch.ones(1), 2)):
        try:
            call()
        except ValueError as error:
            messages.append(str(error).partition("; rank")[0])
    group.barrier()  # the group is still usable
    return messages


def test_errors_share_a_base_class() -> None:
    assert issubclass(CollectiveTimeout, CollectiveError) and issubclass(CollectiveMismatch, CollectiveError)
    assert issubclass(CollectiveError, RuntimeError)
