"""Greedy tokens of two runs, compared: equal, but for steps at which the two best tokens tie."""

from collections.abc import Sequence


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def assert_equal_up_to_ties(
    prompts: Sequence[str],
    tokens: Sequence[list[int]],
    reference: Sequence[list[int]],
    logprobs: Sequence[Sequence[tuple[float, float]]],
    tie: float,
) -> None:
    """`logprobs` holds the reference's two best a step; closer than `tie` they may change places.

    What follows a changed token is another text, and not compared.
    """
    for prompt, a, b, best_two in zip(prompts, tokens, reference, logprobs, strict=True):
        assert len(a) == len(b) > 0
        where = first_difference(a, b)
        if where is not None:
            best, second = best_two[where]
            assert best - second <= tie, f"{prompt!r} differs at {where}: {best} against {second}"
