"""Encode a dialogue for training, for any family."""

from collections.abc import Callable, Sequence

from m3diff.models.contract import Branch, Processor
from m3diff.records.sample import Turn

EncodePrompt = Callable[[tuple[Turn, ...], tuple[str, ...]], Sequence[int]]
EncodeAnswer = Callable[[str], Sequence[int]]


def encode_dialogue(
    encode_prompt: EncodePrompt, encode_answer: EncodeAnswer, turns: Sequence[Turn], marks: tuple[str, ...]
) -> list[Branch]:
    """Encode a dialogue as token ids, so that each answer follows exactly the prompt that generation would get.

    If the prompt of a turn begins with the prompt and the answer of the turn before it, both turns are in the same
    branch. Otherwise, for example if the chat template removes reasoning from earlier answers, the turn starts a new
    branch, which repeats the turns before it without a loss on their answers.

    Args:
        encode_prompt, encode_answer: methods of the processor, which may be cached.
        turns: the turns of the dialogue, in order. All their answers are trained on.
        marks: marks of the images that the dialogue is about.
    """
    branches: list[Branch] = []
    for number, turn in enumerate(turns):
        prompt = list(encode_prompt((*turns[:number], Turn(turn.question)), marks))
        answer = encode_answer(turn.answer)
        span = (len(prompt), len(prompt) + len(answer))
        previous = branches[-1] if branches else None
        if previous is not None and prompt[: len(previous.ids)] == previous.ids:
            branches[-1] = Branch([*prompt, *answer], [*previous.spans, span])
        else:
            branches.append(Branch([*prompt, *answer], [span]))
    return branches


def count_longest_branch(processor: Processor, turns: tuple[Turn, ...], marks: tuple[str, ...]) -> int:
    """Return the length of the longest branch of a dialogue, in tokens."""
    branches = encode_dialogue(processor.encode_prompt, processor.encode_answer, turns, marks)
    return max(len(branch.ids) for branch in branches)
