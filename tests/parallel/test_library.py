"""Registration of ops: what the schema says, where the implementation goes, how long an op lives."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.library import Library

from parallel import library
from parallel.library import LIBRARY, add_implementation, python_implementations, register_op
from parallel.platform import CpuPlatform, CudaPlatform


def scale(x: torch.Tensor, factor: float, bias: torch.Tensor | None = None, times: int = 1) -> torch.Tensor:
    y = x * factor**times
    return y if bias is None else y + bias


def scale_fake(x: torch.Tensor, factor: float, bias: torch.Tensor | None = None, times: int = 1) -> torch.Tensor:
    return torch.empty_like(x)


def double_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(2 * x)


@pytest.fixture
def target() -> Iterator[Library]:
    """A library whose ops are gone after the test."""
    own = Library("lockstep_test", "FRAGMENT")
    yield own
    own._destroy()


def test_schema_comes_from_the_type_hints(target: Library) -> None:
    register_op("scale", scale, target_library=target)
    schema = str(torch.ops.lockstep_test.scale.default._schema)
    assert schema == "lockstep_test::scale(Tensor x, float factor, Tensor? bias=None, SymInt times=1) -> Tensor"


def test_what_is_mutated_stands_in_the_schema_and_is_written(target: Library) -> None:
    register_op("double_into", double_into, mutates_args=("out",), fake=lambda x, out: None, target_library=target)
    op = torch.ops.lockstep_test.double_into
    assert op.default._schema.is_mutable
    assert [argument.is_write for argument in op.default._schema.arguments] == [False, True]
    x, out = torch.randn(4), torch.zeros(4)
    op(x, out)
    torch.testing.assert_close(out, 2 * x)
    torch.library.opcheck(op.default, (x, out))


def test_opcheck_passes_with_a_fake(target: Library) -> None:
    register_op("scale", scale, fake=scale_fake, target_library=target)
    torch.library.opcheck(torch.ops.lockstep_test.scale.default, (torch.randn(3, 4), 2.0, torch.randn(4)))


def test_a_fake_is_registered_only_when_given(target: Library) -> None:
    register_op("bare", scale, target_library=target)
    register_op("faked", scale, fake=scale_fake, target_library=target)
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3)
        assert torch.ops.lockstep_test.faked(x, 1.0).shape == (2, 3)
        with pytest.raises(Exception, match="bare"):
            torch.ops.lockstep_test.bare(x, 1.0)


def test_tags_are_passed_on(target: Library) -> None:
    register_op("tagged", scale, tags=(torch.Tag.pt2_compliant_tag,), target_library=target)
    assert torch.Tag.pt2_compliant_tag in torch.ops.lockstep_test.tagged.default.tags


@pytest.mark.parametrize("platform", [CpuPlatform(), CudaPlatform()])
def test_the_dispatch_key_is_the_platforms(
    target: Library, monkeypatch: pytest.MonkeyPatch, platform: CpuPlatform | CudaPlatform
) -> None:
    monkeypatch.setattr(library, "detect_platform", lambda: platform)
    register_op("keyed", scale, target_library=target)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = [key for key in ("CPU", "CUDA") if has("lockstep_test::keyed", key)]
    assert keys == [platform.dispatch_key]


def test_one_op_can_have_an_implementation_per_device(target: Library) -> None:
    register_op("both", scale, dispatch_key="CUDA", target_library=target)
    add_implementation(
        "both", lambda x, factor, bias=None, times=1: x - factor, dispatch_key="CPU", target_library=target
    )
    assert torch.ops.lockstep_test.both(torch.zeros(1), 3.0).item() == -3.0
    register_op("same", scale, dispatch_key=("CUDA", "CPU"), target_library=target)
    assert torch.ops.lockstep_test.same(torch.ones(1), 3.0).item() == 3.0


def test_an_op_lives_as_long_as_its_library() -> None:
    own = Library("lockstep_mortal", "FRAGMENT")
    register_op("scale", scale, target_library=own)
    assert torch.ops.lockstep_mortal.scale(torch.ones(1), 2.0).item() == 2.0
    del own
    gc.collect()
    with pytest.raises(AttributeError):
        torch.ops.lockstep_mortal.scale(torch.ones(1), 2.0)


def test_other_code_can_add_ops_to_our_namespace() -> None:
    assert LIBRARY.ns == "lockstep"
    theirs = Library("lockstep", "FRAGMENT")
    register_op("added_by_a_test", scale, target_library=theirs)
    assert torch.ops.lockstep.added_by_a_test(torch.ones(1), 4.0).item() == 4.0
    assert torch.ops.lockstep.added_by_a_test.default in python_implementations("CPU")
    theirs._destroy()
    del theirs
    gc.collect()
    assert scale not in python_implementations("CPU").values()


def test_a_signature_without_hints_is_refused(target: Library) -> None:
    with pytest.raises(ValueError, match="x"):
        register_op("untyped", lambda x: x, target_library=target)
