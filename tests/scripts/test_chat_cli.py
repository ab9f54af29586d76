"""chat.py as a user types into it: answers on standard output, all else on standard error."""

import pytest

SETTINGS = ["--dtype", "float32", "--max-model-len", 64, "--max-tokens", 4]


def errors(result) -> list[str]:
    return [x for x in result.stderr.decode().splitlines() if x.startswith("error: ")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-len", 1], "max_model_len must be at least 2, got 1; choose more"),
        (["--max-model-len", 200_000], "must be at most 131072 (the model's limit), got 200000"),
        (
            ["--max-model-len", 5],
            "no message fits, not even '?': the prompt has 5 tokens; with one to generate that "
            "exceeds max_model_len 5; shorten it, or allow more if the model takes more",
        ),
        (["--max-model-len", 64, "--system", "s" * 64], "the prompt has 72 tokens"),
        (["--num-pages", 2], "the pool has 1; use more pages"),
        (["--seed", -1], "seed must be in 0 .. 18446744073709551615, got -1; any of these will do"),
        (["--max-tokens", 0], "max_tokens must be at least 1, got 0; ask for one at least"),
    ],
    ids=lambda x: f"{x!s:.30}",
)
def test_what_no_message_fits_into_is_refused_before_weights_are_read(
    run_here, tiny_model, no_weights, arguments, message
):
    result = run_here("chat", "--model", tiny_model, *arguments, stdin=b"hello\n")
    assert result.returncode == 2
    (error,) = errors(result)
    assert message in error
    assert result.stdout == b""


def test_a_line_too_long_costs_no_other(run_here, tiny_model):
    stdin = b"hi\n" + b"x" * 80 + b"\n/reset\nhi\n/quit\nunread"
    result = run_here("chat", "--model", tiny_model, *SETTINGS, stdin=stdin)
    assert result.returncode == 0, result.stderr
    (error,) = errors(result)
    assert "exceeds max_model_len 64" in error
    first, second = result.stdout.decode().splitlines()
    assert first == second != ""


def test_an_answer_that_fails_says_why_and_is_forgotten(run_here, unsound_model):
    result = run_here("chat", "--model", unsound_model, *SETTINGS, stdin=b"hi\nhi\n")
    assert result.returncode == 0, result.stderr
    cause = "error: the network gave NaN or infinity; check its weights, or use dtype float32"
    assert errors(result) == [f"{cause} (/reset starts afresh)"] * 2
