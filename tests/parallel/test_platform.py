"""The platform of each kind of device."""

from __future__ import annotations

import pytest
import torch

from parallel.platform import CpuPlatform, CudaPlatform, Platform, detect_platform, platform_for


@pytest.mark.parametrize(("platform", "opaque"), [(Platform, False), (CpuPlatform, True), (CudaPlatform, True)])
def test_attention_is_an_opaque_op_on_cpu_and_cuda_only(platform: type[Platform], opaque: bool) -> None:
    assert platform().opaque_attention_op() is opaque


def test_the_detected_platform_is_cached() -> None:
    assert detect_platform() is detect_platform()
    assert detect_platform().device_type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_device_has_the_platform_of_its_type() -> None:
    assert platform_for(torch.device("cpu")).dispatch_key == "CPU"
    assert platform_for(torch.device("cuda:1")).dispatch_key == "CUDA"
    with pytest.raises(ValueError, match="no platform for device 'meta'"):
        platform_for(torch.device("meta"))
