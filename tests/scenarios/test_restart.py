"""A worker group that fails is started again, and nobody who waits for tokens can tell: rows 1, 2 and 4 of the faults.

Every rank gets real signals while requests are in flight. Ranks over Ray are in ``test_ray.py``; what the supervisor
does with messages under way when a rank fails is in ``test_worker_group.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from launch.llm import LLM, AsyncLLM
from runtime.common.errors import LockstepError, RankDiedError, RankTimeoutError
from runtime.common.sampling_params import SamplingParams
from runtime.executor.supervisor import Supervisor
from tests.checkpoints import prompts, tiny_checkpoint
from tests.launch.cli.commands.test_generate import transformers_greedy

LENGTHS = (1, 9, 30, 17)
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.95, seed=7, ignore_eos=True)
PARAMS = [GREEDY, GREEDY, SEEDED, SEEDED]


@dataclass
class Strikes:
    """Signals that hit ranks in the middle of what they do, and what was noticed of it.

    Attributes:
        after: plans still to be submitted before ``number`` is sent to ``ranks``; 0: none is due.
        sent: when each signal was sent.
        noticed: the failure that each restart was made for, and when.
    """

    after: int = 0
    ranks: tuple[int, ...] = ()
    number: int = signal.SIGKILL
    sent: list[float] = field(default_factory=list)
    noticed: list[tuple[LockstepError, float]] = field(default_factory=list)

    def arm(self, *ranks: int, number: int = signal.SIGKILL, after: int = 10) -> None:
        self.ranks, self.number, self.after = ranks, number, after


@pytest.fixture
def strikes(monkeypatch: pytest.MonkeyPatch) -> Strikes:
    return strike_supervisors(monkeypatch)


def strike_supervisors(monkeypatch: pytest.MonkeyPatch) -> Strikes:
    """Strikes at every supervisor of this test."""
    made, submit, restart = Strikes(), Supervisor.submit, Supervisor.restart

    def submit_and_strike(self: Supervisor, plan: Any) -> None:
        submit(self, plan)
        if made.after:
            made.after -= 1
            if made.after == 0:
                made.sent.append(time.monotonic())
                for rank in made.ranks:
                    os.kill(self.rank_pids[rank], made.number)

    def note_and_restart(self: Supervisor) -> int:
        assert self._failure is not None
        made.noticed.append((self._failure, time.monotonic()))
        return restart(self)

    monkeypatch.setattr(Supervisor, "submit", submit_and_strike)
    monkeypatch.setattr(Supervisor, "restart", note_and_restart)
    return made


def settings(tp: int, **more: Any) -> dict[str, Any]:
    local = {"tensor_parallel_size": tp, "distributed_executor_backend": "local"}
    return {**local, "enforce_eager": True, "progress": False, **more}


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(prompts(*LENGTHS), PARAMS)
    assert [output.finish_reason for output in outputs] == ["length"] * len(PARAMS)
    return [output.token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("victims", [[(0,), (1,)], [(0,), (1, 2)]], ids=["tp 2", "tp 3"])
def test_rows_1_and_2_sigkill_of_each_rank_mid_decode(victims: list[tuple[int, ...]], strikes: Strikes):
    """Each rank in turn, until the restarts are used up: then the cause comes through, and all is gone."""
    tp, allowed = max(map(max, victims)) + 1, len(victims)
    with LLM(str(tiny_checkpoint()), **settings(tp, max_restarts=allowed)) as llm:
        expected = tokens(llm)
        assert expected[:2] == transformers_greedy(tiny_checkpoint(), LENGTHS, GREEDY.max_tokens)[:2]
        for ranks in victims:
            old = llm.rank_pids
            strikes.arm(*ranks)
            assert tokens(llm) == expected
            error, when = strikes.noticed[-1]
            check_kill(error, ranks)
            assert when - strikes.sent[-1] < 2.0  # noticed in 0.5 s; the rest is tearing down on a busy machine
            assert len(llm.rank_pids) == tp and not set(old) & set(llm.rank_pids)
        assert len(strikes.noticed) == llm.engine.stats.restarts == allowed
        processes = [psutil.Process(pid) for pid in llm.rank_pids]
        strikes.arm(tp - 1)
        with pytest.raises(RankDiedError) as caught:
            tokens(llm)
        check_kill(caught.value, (tp - 1,))
        assert caught.value.exit_code == 137
        assert time.monotonic() - strikes.sent[-1] < 5.0
        assert not [process for process in processes if process.is_running()]
        with pytest.raises(RankDiedError):  # the engine is dead, and says so at once
            tokens(llm)
        assert len(strikes.noticed) == allowed


def check_kill(error: LockstepError, ranks: tuple[int, ...]) -> None:
    """The error names a rank that was killed, what killed it, and when."""
    assert isinstance(error, RankDiedError) and error.rank in ranks and error.returncode == -signal.SIGKILL
    assert f"rank {error.rank}" in str(error) and "SIGKILL" in str(error) and error.stage.startswith("step ")


@pytest.mark.slow
def test_row_4_a_stopped_rank_meets_the_step_deadline_and_is_replaced(strikes: Strikes, capfd):
    with LLM(str(tiny_checkpoint()), **settings(2, max_restarts=1, step_timeout=1.0)) as llm:
        expected = tokens(llm)
        strikes.arm(1, number=signal.SIGSTOP)
        assert tokens(llm) == expected
    error, when = strikes.noticed[0]
    assert isinstance(error, RankTimeoutError) and "--step-timeout" in str(error) and "1" in str(error)
    assert when - strikes.sent[0] < 1.0 + 2.0 + 2.0  # the knob + 2 s; the rest is a busy machine
    assert "runner.py" in capfd.readouterr().err  # the stack of the rank that waits for the other


@pytest.mark.slow
def test_one_rank_under_asyncio_killed_mid_decode_and_while_idle(strikes: Strikes):
    """Nobody asks for anything while the second signal comes: the engine's own thread notices it."""

    async def ask(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> list[int]:
        return [output async for output in llm.generate(prompt, params)][-1].token_ids

    async def ask_all(llm: AsyncLLM) -> list[list[int]]:
        return await asyncio.gather(*map(ask, [llm] * len(PARAMS), prompts(*LENGTHS), PARAMS))

    async def live(llm: AsyncLLM) -> None:
        expected = await ask_all(llm)
        strikes.arm(0)
        assert await ask_all(llm) == expected
        check_kill(strikes.noticed[0][0], (0,))
        assert llm.engine.snapshot().restarts == 1
        os.kill(llm.rank_pids[0], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while llm.engine.snapshot().restarts == 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert await ask_all(llm) == expected

    with AsyncLLM(str(tiny_checkpoint()), **settings(1, max_restarts=2)) as llm:
        asyncio.run(live(llm))
    error, _ = strikes.noticed[1]
    assert isinstance(error, RankDiedError) and error.rank == 0 and "SIGKILL" in str(error) and error.stage == ""
