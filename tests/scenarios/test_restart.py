"""A worker group that fails is restarted, and the tokens of requests in flight are those of an undisturbed run.

Ranks receive real signals while requests are in flight. Ranks over Ray are in ``test_ray.py``; messages in flight when
a rank fails are in ``runtime/executor/test_worker_group.py`` and ``test_supervisor.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
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
    """Signals to ranks during steps, and the failures that caused restarts.

    Attributes:
        after: plans to submit before signal ``number`` is sent to ``ranks``; 0: none is due.
        failures: the failure before each restart.
    """

    after: int = 0
    ranks: tuple[int, ...] = ()
    number: int = signal.SIGKILL
    failures: list[LockstepError] = field(default_factory=list)

    def arm(self, *ranks: int, number: int = signal.SIGKILL, after: int = 10) -> None:
        self.ranks, self.number, self.after = ranks, number, after


@pytest.fixture
def strikes(monkeypatch: pytest.MonkeyPatch) -> Strikes:
    return strike_supervisors(monkeypatch)


def strike_supervisors(monkeypatch: pytest.MonkeyPatch) -> Strikes:
    """Signals to the ranks of every supervisor of this test."""
    made, submit, restart = Strikes(), Supervisor.submit, Supervisor.restart

    def submit_and_strike(self: Supervisor, plan: Any) -> None:
        submit(self, plan)
        if made.after:
            made.after -= 1
            if made.after == 0:
                for rank in made.ranks:
                    os.kill(self.rank_pids[rank], made.number)

    def note_and_restart(self: Supervisor) -> int:
        assert self._failure is not None
        made.failures.append(self._failure)
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
def test_sigkill_of_each_rank_during_decode(victims: list[tuple[int, ...]], strikes: Strikes):
    """Each rank in turn, until no restart is left: then the cause is raised, and every process has ended."""
    tp, allowed = max(map(max, victims)) + 1, len(victims)
    with LLM(str(tiny_checkpoint()), **settings(tp, max_restarts=allowed)) as llm:
        expected = tokens(llm)
        assert expected[:2] == transformers_greedy(tiny_checkpoint(), LENGTHS, GREEDY.max_tokens)[:2]
        for ranks in victims:
            old = llm.rank_pids
            strikes.arm(*ranks)
            assert tokens(llm) == expected
            check_kill(strikes.failures[-1], ranks)
            assert len(llm.rank_pids) == tp and not set(old) & set(llm.rank_pids)
        assert len(strikes.failures) == llm.engine.stats.restarts == allowed
        processes = [psutil.Process(pid) for pid in llm.rank_pids]
        strikes.arm(tp - 1)
        with pytest.raises(RankDiedError) as caught:
            tokens(llm)
        check_kill(caught.value, (tp - 1,))
        assert caught.value.exit_code == 137
        assert not [process for process in processes if process.is_running()]
        with pytest.raises(RankDiedError):  # The engine stays dead.
            tokens(llm)
        assert len(strikes.failures) == allowed


def check_kill(error: LockstepError, ranks: tuple[int, ...]) -> None:
    """The error names a killed rank, the signal and the step."""
    assert isinstance(error, RankDiedError) and error.rank in ranks and error.returncode == -signal.SIGKILL
    assert f"rank {error.rank}" in str(error) and "SIGKILL" in str(error) and error.stage.startswith("step ")


@pytest.mark.slow
def test_a_stopped_rank_misses_the_step_deadline_and_is_replaced(strikes: Strikes, capfd):
    with LLM(str(tiny_checkpoint()), **settings(2, max_restarts=1, step_timeout=1.0)) as llm:
        expected = tokens(llm)
        strikes.arm(1, number=signal.SIGSTOP)
        assert tokens(llm) == expected
    error = strikes.failures[0]
    assert isinstance(error, RankTimeoutError) and "--step-timeout" in str(error) and "1" in str(error)
    assert "runner.py" in capfd.readouterr().err  # The stack of the rank that waits for the other.


@pytest.mark.slow
def test_one_rank_under_asyncio_killed_during_decode_and_while_idle(strikes: Strikes):
    """The second signal arrives without a request: the engine's thread detects the death."""

    async def ask(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> list[int]:
        return [output async for output in llm.generate(prompt, params)][-1].token_ids

    async def ask_all(llm: AsyncLLM) -> list[list[int]]:
        return await asyncio.gather(*map(ask, [llm] * len(PARAMS), prompts(*LENGTHS), PARAMS))

    async def live(llm: AsyncLLM) -> None:
        expected = await ask_all(llm)
        strikes.arm(0)
        assert await ask_all(llm) == expected
        check_kill(strikes.failures[0], (0,))
        assert llm.engine.snapshot().restarts == 1
        os.kill(llm.rank_pids[0], signal.SIGKILL)
        while llm.engine.snapshot().restarts == 1:  # The test's time-out bounds it.
            await asyncio.sleep(0.01)
        assert await ask_all(llm) == expected

    with AsyncLLM(str(tiny_checkpoint()), **settings(1, max_restarts=2)) as llm:
        asyncio.run(live(llm))
    error = strikes.failures[1]
    assert isinstance(error, RankDiedError) and error.rank == 0 and "SIGKILL" in str(error) and error.stage == ""
