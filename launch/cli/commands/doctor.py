"""``lockstep doctor``: print the findings of ``launch/cli/doctor.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from launch.cli.args import Parser
from launch.cli.output import write_json, write_line


def run(argv: Sequence[str]) -> int:
    """Run the checks and print the findings; return 1 if one is a problem, else 0."""
    parser = Parser(
        "lockstep doctor",
        "[--json]",
        "Check versions, devices, memory, compilers, Ray and caches, and print advice for what is wrong.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse(argv)

    from launch.cli.doctor import PROBLEM, run_checks

    findings = run_checks()
    healthy = not any(finding.status == PROBLEM for finding in findings)
    if arguments.json:
        write_json({"ok": healthy, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            write_line(f"{finding.status:<8} {finding.name:<14} {finding.detail}")
            if finding.advice:
                write_line(f"{'':<23} -> {finding.advice}")
    return 0 if healthy else 1
