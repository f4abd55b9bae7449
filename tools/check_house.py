"""Checks of names, prose and sizes that neither ruff nor import-linter makes; part of ``make check``.

Product code, benchmarks, tests and the documents use the field's words: every pattern of :data:`WORDS` is refused, with
what to write instead. Product modules begin with a docstring and stay within the limits of :data:`MAX_FILE_LINES`,
:data:`MAX_CLASS_LINES` and :data:`MAX_FUNCTION_LINES`.

    python tools/check_house.py [PATH ...]

prints one line for each violation and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("lockstep.py", "launch", "runtime", "workers", "parallel")
CODE = (*PRODUCT, "benchmarks", "tests", "tools", "examples")
SUFFIXES = (".py", ".c", ".h", ".md", ".toml")
EXEMPT = ("tools/check_house.py", "tests/tools/test_check_house.py", "LICENSE", "constraints.txt")

MAX_FILE_LINES = 400
MAX_CLASS_LINES = 250
MAX_FUNCTION_LINES = 60

WORDS = {
    # Prose: a sentence has a component for its subject and says what the component does.
    r"[Nn]obody|[Ss]omebody|[Ee]verybody": "name the component: no request, no rank, every rank",
    r"himself|herself": "itself",
    r"in earnest": "in production, or nothing",
    r"[Mm]end(s|ed|ing)?": "fix, repair",
    r"at (their|its) door": "queued on the ranks",
    r"sounds? like much": "say the figure",
    r"thrown out": "preempted, evicted",
    r"(stands?|stood) still": "stalls, is idle",
    r"cannot be had|can be had": "unsupported, not available",
    r"(what|whatever) is to be had": "what is available",
    r"is none of (our|its|their) business": "is not handled here",
    r"goes? without": "runs without, falls back to",
    r"in any company|(batch|their) company": "batch invariance",
    r"what is done twice is done": "both processes build it",
    r"is a person": "say who: the user",
    # Names: the right-hand side is what vLLM, SGLang and torch.distributed call it.
    r"[Rr]eplicas?|REPLICA\w*": "compiled model (a replica means data parallelism)",
    r"(?<!compiled_)(?<!distinct_)[Pp]ieces?(?!_)": "subgraph; shard or partition of a weight; chunk or part of a text",
    r"[Vv]erbs?": "RPC method",
    r"[Mm]ailbox(es)?": "output queue",
    r"Transcripts?|TextStream": "output, incremental detokenizer",
    r"_Draft|_obey": "builder, process_commands",
    r"Orders|make_orders|run_orders": "RankSpec, make_rank_specs, run_rank_spec",
    r"_?Troubles?|[Tt]roubles?": "failure",
    r"_lose\b|_silence\b|Silence": "mark_failed, timeout, NullProgress",
    r"Patience|Yielding|yielding": "deferred SIGTERM, SCHED_BATCH context",
    r"remove_traces|_?Belongings|no_restart": "cleanup, resources, supports_restart",
    r"torchrun_agent|rank_actor|rank_process|ray_cluster": "torchrun_wrapper, ray_actor, rank_main, ray_launcher",
    r"PatientProtocol|RequestMeter|RequestLog|_?Traffic|_?Exchange|_?Gate": "see ARCHITECTURE.md: the server's names",
    r"wide(?==|: bool)": "out_dtype=torch.float32",
    r"Follower|Grammars(?=\()": "grammar matcher, grammar compiler",
    r"CheckedRequest|RequestLimits": "GenerateRequest, InputProcessor",
    r"num_offered|num_pending": "num_cached_blocks, num_in_flight_tokens",
    r"OpCall": "one name for one thing",
    r"nearest\b(?=\()|examine|look_at": "suggest, run_checks, check",
}
"""Private words, as patterns of whole words, and what to write instead."""

_PATTERN = re.compile("|".join(f"(?P<w{index}>(?<![\\w])(?:{word})(?!\\w))" for index, word in enumerate(WORDS)))
_ADVICE = list(WORDS.values())


def check_words(name: str, text: str) -> Iterator[str]:
    """A line for every private word in ``text``."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in _PATTERN.finditer(line):
            advice = _ADVICE[int((found.lastgroup or "w0")[1:])]
            yield f"{name}:{number}: private word {found[0]!r}: write {advice}"


def check_sizes(name: str, text: str) -> Iterator[str]:
    """A line for a product file, class or function beyond its limit, and for a module without a docstring."""
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{name}:1: {lines} lines; allowed are {MAX_FILE_LINES}: split the file along a seam"
    if not name.endswith(".py"):
        return
    tree = ast.parse(text)
    if not ast.get_docstring(tree):
        yield f"{name}:1: the module has no docstring: say what lives there and what does not"
    limits = {
        ast.ClassDef: ("class", MAX_CLASS_LINES),
        ast.FunctionDef: ("function", MAX_FUNCTION_LINES),
        ast.AsyncFunctionDef: ("function", MAX_FUNCTION_LINES),
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kind, limit = limits[type(node)]
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if size > limit:
                yield f"{name}:{node.lineno}: {kind} {node.name} has {size} lines; allowed are {limit}"


def check(paths: Sequence[Path]) -> list[str]:
    """Every violation in files that git tracks or would track, as one line each."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *map(str, paths)]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    found: list[str] = []
    for name in sorted(name for name in set(names) if name.endswith(SUFFIXES) and name not in EXEMPT):
        path = ROOT / name
        if not path.is_file():  # Deleted in the working tree, not yet in the index.
            continue
        text = path.read_text(encoding="utf-8")
        folder = name.partition("/")[0]
        found += check_words(name, text)
        if folder in PRODUCT and name.endswith((".py", ".c", ".h")):
            found += check_sizes(name, text)
    return found


def main(argv: Sequence[str]) -> int:
    """Check the paths in ``argv``, by default the whole repository; give the exit code."""
    found = check([Path(name) for name in argv] or [ROOT])
    for line in found:
        print(line)
    print(f"house: {len(found)} violations" if found else "house: names, prose and sizes are in order", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
