"""Turn a GGUF file into a Hugging Face checkpoint folder; run as a program, in a process of its own.

``python -P convert_gguf.py FILE.gguf FOLDER`` writes bf16 safetensors, the configs, the tokenizer and its chat
template. This is the only file that needs transformers, and it imports torch: ``demo_model.py`` starts it so that the
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
    """Write the checkpoint of ``gguf`` into ``folder``, every quantized weight expanded to bf16.

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
    # The weights are plain bf16 now; left in, this would tell readers to look for quantized ones.
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors come out readable by their owner only


def die_with_parent() -> None:
    """End this process when the one that started it dies: nobody would use what it goes on to write."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        sys.exit("the process that wanted this conversion is gone")


if __name__ == "__main__":
    die_with_parent()
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
