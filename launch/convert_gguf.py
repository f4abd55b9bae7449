"""GGUF to Hugging Face checkpoint conversion, run as a program in a subprocess.

``python -P convert_gguf.py FILE.gguf FOLDER`` writes bf16 safetensors, the configs, the tokenizer and its chat
template. Only this module needs transformers; it also imports torch. ``demo_model.py`` runs it in a subprocess, so the
driver imports neither.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def convert(gguf: Path, folder: Path) -> None:
    """Write the checkpoint of ``gguf`` into ``folder``, with every quantized weight dequantized to bf16.

    Raises:
        OSError, ValueError: transformers cannot read the file or write the folder.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The weights are plain bf16 now; the key would declare them quantized.
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # save_pretrained makes safetensors files mode 0600.


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # The parent died before prctl.
        sys.exit("the parent process is gone")


if __name__ == "__main__":
    die_with_parent()
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
