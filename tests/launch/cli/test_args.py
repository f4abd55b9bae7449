"""Flags come from the config dataclasses, win over the --config file, and are refused in one helpful line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launch.cli.args import CLI_MAX_TOKENS, Parser, Settings, UsageError, engine_arguments, read_settings
from launch.cli.commands.generate import build_parser, check
from runtime.common.config import EngineConfig
from runtime.common.errors import ConfigError, InputError, RequestError
from runtime.common.sampling_params import SamplingParams, StructuredOutputs


def settings(*argv: str) -> Settings:
    parser = build_parser()
    return read_settings(parser.parse(["demo", *argv]), parser)


def test_only_what_was_given_is_passed_on() -> None:
    assert settings() == Settings("demo", {}, SamplingParams(max_tokens=CLI_MAX_TOKENS))


def test_every_setting_with_a_flag_has_one() -> None:
    help_text = build_parser().format_help()
    for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(SamplingParams)):
        flag = "-n" if field.name == "n" else f"--{field.name.replace('_', '-')}"
        if field.metadata["flag"]:
            assert f"{flag} " in help_text or f"{flag}," in help_text, field.name
            assert field.metadata["short"] in help_text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["-tp", "2"], {"tensor_parallel_size": 2}),
        (["--tensor-parallel-size=3"], {"tensor_parallel_size": 3}),
        (["-O0"], {"optimization_level": 0}),
        (["-O", "3"], {"optimization_level": 3}),
        (["--enforce-eager"], {"enforce_eager": True}),
        (["--no-enforce-eager"], {"enforce_eager": False}),
        (["--cudagraph-mode", "full_decode_only"], {"cudagraph_mode": "FULL_DECODE_ONLY"}),
        (["--cudagraph-capture-sizes", "1,2,4"], {"cudagraph_capture_sizes": (1, 2, 4)}),
        (["--cudagraph-capture-sizes", "1", "2", "--seed", "7"], {"cudagraph_capture_sizes": (1, 2), "seed": 7}),
        (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["--kv-cache-memory", "1000000"], {"kv_cache_memory": 1000000}),
        (["--distributed-executor-backend", "ray"], {"distributed_executor_backend": "ray"}),
    ],
)
def test_engine_flags(argv: list[str], expected: dict[str, object]) -> None:
    assert settings(*argv).engine == expected


def test_sampling_flags() -> None:
    argv = "-n 2 --max-tokens 5 --temperature 0 --top-k 3 --presence-penalty -0.5 --ignore-eos --stop-token-ids 1,2"
    given = settings(*argv.split(), "--stop", ",", "two words", "--stop", "third").sampling
    assert given == SamplingParams(
        n=2,
        max_tokens=5,
        temperature=0.0,
        top_k=3,
        presence_penalty=-0.5,
        ignore_eos=True,
        stop_token_ids=(1, 2),
        stop=(",", "two words", "third"),
    )


def test_one_seed_serves_engine_and_requests() -> None:
    given = settings("--seed", "7")
    assert given.engine == {"seed": 7}
    assert given.sampling.seed == 7


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("tensor_parallel_size: 3\nenforce_eager: true\ntemperature: 0\nstop: [a, b]\nmax_model_len: null\n")
    given = settings("--config", str(file), "-tp", "2", "--no-enforce-eager")
    assert given.engine == {"tensor_parallel_size": 2, "enforce_eager": False, "max_model_len": None}
    assert given.sampling == SamplingParams(max_tokens=CLI_MAX_TOKENS, temperature=0.0, stop=("a", "b"))


def test_the_file_may_name_the_model(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: some/folder\n")
    parser = build_parser()
    assert read_settings(parser.parse(["--config", str(file)]), parser).model == "some/folder"
    assert settings("--config", str(file)).model == "demo"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_num_seq: 3", "unknown key 'max_num_seq'; did you mean max_num_seqs?"),
        ("run_dir: /tmp", "unknown key 'run_dir'"),
        ("max_num_seqs: many", "max_num_seqs is 'many' (str); it takes int"),
        ("[1, 2]", "holds a list"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        settings("--config", str(file))
    assert str(file) in str(refused.value)
    assert message in str(refused.value)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--config nowhere\.yaml: No such file"):
        settings("--config", "nowhere.yaml")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-tokns", "3"], "unknown flag --max-tokns; did you mean --max-tokens?"),
        (["--max-tokns=3"], "unknown flag --max-tokns; did you mean --max-tokens?"),
        (["--zzzzzzzzz"], "unknown flag --zzzzzzzzz (see lockstep generate --help)"),
        (["--max-tokens"], "--max-tokens: a value is missing"),
        (["--max-tokens", "many"], "--max-tokens: 'many' is not a whole number"),
        (["--temperature", "hot"], "--temperature: 'hot' is not a number"),
        (
            ["--dtype", "bfloat"],
            "--dtype: 'bfloat' is not one of auto, bfloat16, float16, float32; did you mean bfloat16?",
        ),
        (["--cudagraph-capture-sizes", "1,x"], "--cudagraph-capture-sizes: 'x' is not a whole number"),
        (["surplus"], "unexpected argument 'surplus'"),
        (["--prompt", "a", "--prompts-file", "b"], "not allowed with argument --prompt"),
    ],
)
def test_usage_errors_are_one_line_that_helps(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        settings(*argv)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_values_are_checked_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"block_size is 0; allowed: 1 to 1024"):
        settings("--block-size", "0")
    with pytest.raises(RequestError, match=r"top_p is 2\.0"):
        settings("--top-p", "2")


def test_a_missing_model_is_an_input_error() -> None:
    parser = build_parser()
    with pytest.raises(InputError, match="MODEL is missing"):
        read_settings(parser.parse(["--prompt", "swallows", "demo"]), parser)


def test_abbreviated_flags_are_unknown() -> None:
    parser = Parser("prog", "[--number N]", "for the test")
    parser.add_argument("--number")
    with pytest.raises(UsageError, match=r"unknown flag --num; did you mean --number\?"):
        parser.parse(["--num", "3"])


def structured(*argv: str) -> StructuredOutputs | None:
    return check(["demo", "--prompt", "x", *argv])[1].sampling.structured_outputs


def test_structured_output_flags(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    assert structured() is None
    assert structured("--regex", "[a-z]+") == StructuredOutputs(regex="[a-z]+")
    assert structured("--json-schema", str(file)) == StructuredOutputs(json='{"type": "integer"}')
    assert structured("--json-schema", ' {"type": "string"}') == StructuredOutputs(json=' {"type": "string"}')
    assert structured("--json-schema", "true") == StructuredOutputs(json="true")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--json-schema", '{"type"'], "--json-schema is not JSON"),
        (["--json-schema", "nowhere.json"], "--json-schema nowhere.json: No such file or directory"),
        (["--json-schema", "LIST"], "LIST is a JSON list; a schema is an object"),
        (["--json-schema", "BYTES"], "BYTES is not UTF-8"),
        (["--json-schema", "{" * 100_000], "--json-schema is not JSON"),
        (["--json-schema", "{}", "--regex", "a"], "--regex: not allowed with argument --json-schema"),
        (["--regex", "((("], "invalid regex"),
        (["--json-schema", '{"type": "no such"}'], "structured output"),
        (["--regex", ""], "regex takes a text that is not empty"),
        (["--regex", "a", "--min-tokens", "3"], "min_tokens and structured_outputs contradict each other"),
    ],
)
def test_wrong_structured_output_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    (tmp_path / "LIST").write_text("[]")
    (tmp_path / "BYTES").write_bytes(b"\xff")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as refused:
        structured(*argv)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_engine_arguments_are_read_back_as_they_were() -> None:
    engine = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "local",
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "cudagraph_capture_sizes": (1, 2, 8),
        "optimization_level": 1,
    }
    assert settings(*engine_arguments(engine)).engine == engine
    assert settings(*engine_arguments({"max_model_len": None})).engine == {}
