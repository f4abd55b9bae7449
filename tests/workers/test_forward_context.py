"""The forward context: set for one pass, never nested, cleared even when the pass fails."""

from __future__ import annotations

import pytest
import torch

from workers.forward_context import AttentionMetadata, ForwardContext, forward_context, get_forward_context


def make_context() -> ForwardContext:
    nothing = torch.empty(0)
    return ForwardContext.for_step(AttentionMetadata(0, 0, 0, 0, nothing, nothing, nothing, nothing), {}, {})


def test_is_set_inside_and_only_there() -> None:
    context = make_context()
    with forward_context(context) as entered:
        assert get_forward_context() is entered is context
    with pytest.raises(RuntimeError, match=r"no forward pass is running; call the model inside"):
        get_forward_context()


def test_refuses_nesting_and_keeps_the_outer_one() -> None:
    outer = make_context()
    with forward_context(outer):
        with pytest.raises(RuntimeError, match="inside another one"), forward_context(make_context()):
            pass
        assert get_forward_context() is outer


def test_is_cleared_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), forward_context(make_context()):
        raise ZeroDivisionError
    with forward_context(make_context()):
        pass
