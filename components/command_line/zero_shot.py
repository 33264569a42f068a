"""`m3diff zero-shot`: caption and score the test split with a model behind an endpoint."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from m3diff.command_line.arguments import ALLOW_UNLICENSED, FOLDER, parse_count, parse_url
from m3diff.command_line.command import Command, argument

if TYPE_CHECKING:
    from m3diff.settings.tree import Params


def _run(params: Params, args: argparse.Namespace) -> None:
    from m3diff.settings.rules import check_paths

    check_paths(params, "evaluate")
    from m3diff.commands.zero_shot import PROMPT, QUESTION_PROMPT, ZeroShotRequest, zero_shot

    request = ZeroShotRequest(
        url=args.url,
        model=args.model,
        prompt=args.prompt or PROMPT,
        question_prompt=args.question_prompt or QUESTION_PROMPT,
        key_variable=args.key_variable,
        max_tokens=args.max_tokens or None,
        limit=params.predict.limit if args.limit is None else args.limit,
        timeout_s=args.timeout_s or ZeroShotRequest.timeout_s,
        allow_unlicensed=args.allow_unlicensed,
        reuse_answers=args.reuse_answers,
    )
    paths = params.paths
    result = zero_shot(request, params.evaluate, params.compute, paths.mixture, paths.records, paths.clean, args.out)
    print("\n".join(result.lines))


COMMAND = Command(
    run=_run,
    arguments=(
        argument("--url", type=parse_url, required=True, help="OpenAI-compatible, with /v1; the images are sent there"),
        argument("--model", required=True, metavar="NAME", help="the model's name at the endpoint"),
        argument(
            "--limit", type=parse_count, metavar="N", help="how many test pairs, 0 for all; default: predict.limit"
        ),
        argument("--out", **FOLDER, help="folder for captions and report"),
        argument("--prompt", metavar="TEXT", help="text sent with the images; {question} is the pair's question"),
        argument("--question-prompt", metavar="TEXT", help="text sent with a record's own {question}"),
        argument(
            "--max-tokens", type=parse_count, metavar="N", help="maximum tokens per answer; default: the server's"
        ),
        argument(
            "--key-variable",
            metavar="NAME",
            default="OPENAI_API_KEY",
            help="holds the key; default: OPENAI_API_KEY",
        ),
        argument("--timeout-s", type=parse_count, metavar="S", help="seconds for an answer; default: 120"),
        argument(
            "--reuse-answers",
            action=argparse.BooleanOptionalAction,
            help="use stored answers of another server; --no-reuse-answers: ask again and keep both; default: stop",
        ),
        ALLOW_UNLICENSED,
    ),
    examples=("m3diff zero-shot --url http://127.0.0.1:8000/v1 --model Qwen/Qwen2.5-VL-7B-Instruct --limit 20",),
)
