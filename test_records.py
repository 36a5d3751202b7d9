"""The tests of records.py: `python -m pytest -q test_records.py`."""
import itertools

import pytest

import nano_grpo as ng
import records
from test_nano import PROMPTS, close, make_sampler, random_policy, settings

def graded(*answers, gold="4"):
    """Rows of one question that end in these numbers."""
    rows = [ng.Row(ng.Example("q", gold), [1] * i, f"it is {answer}") for i, answer in enumerate(answers, 1)]
    return ng.grade_rows(rows, ng.rewards.last_number_reward_fn)

@pytest.mark.parametrize("n, right", [(1, 0), (1, 1), (4, 0), (4, 1), (4, 3), (7, 2), (8, 8)])
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_right_answer(n, right):
    answers = [True] * right + [False] * (n - right)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(answers, k))
        close(records.pass_at_k(n, right, k), sum(map(any, subsets)) / len(subsets))

@pytest.mark.parametrize("answers, want", [
    (["4", "4.0", "5"], True), (["5", "5", "4"], False), (["1/2", "0.5", "4"], False), (["4", "5"], True),
    (["5", "4"], False), (["5", "6", "7", "4", "4"], True), (["none", "none", "4"], True),
    (["none", "none"], False), (["5", "1,000", "1000", "4"], False)])
def test_the_majority_is_counted_by_the_equality_of_the_grader(answers, want):
    rows = graded(*answers)
    right = [row.reward["answer_reward"] == 1 for row in rows]
    assert records.majority_is_right([row.text for row in rows], right, "last_number") is want

@pytest.mark.parametrize("name, response", [
    ("r1_zero", " so </think> <answer> {} </answer>"), ("question_only", r"it is \\boxed{{{}}}"),
    ("gsm8k", "as said #### {}"), ("last_number", "it is {}"),
    ("my_file.py:mine", " </think> <answer> {} </answer>")])
def test_each_reward_has_its_answer_read_for_the_majority(name, response):
    texts = [response.format(answer) for answer in ("5", "5.0", "4")]
    assert records.majority_is_right(texts, [False, False, True], name) is False
    assert records.majority_is_right(texts[1:], [False, True], name) is False
    assert records.majority_is_right([texts[2], texts[2], texts[0]], [True, True, False], name) is True

def test_an_evaluation_with_many_answers_has_means_over_questions_and_their_standard_error():
    rows = graded("4", "4", "5", "6") + graded("5", "5", "4", "9") + graded("4", "4", "4", "4")
    metrics = records.evaluation_metrics(rows, 4, "last_number")
    close(metrics["eval/accuracy"], (0.5 + 0.25 + 1) / 3)
    mean = 7 / 12  # the standard error is that of three numbers, not of twelve
    close(metrics["eval/stderr"], (sum((x - mean)**2 for x in (0.5, 0.25, 1)) / 3 / 3) ** 0.5)
    assert list(metrics)[4:] == ["eval/pass@1", "eval/pass@2", "eval/pass@4", "eval/maj@4"]
    close([metrics[key] for key in list(metrics)[4:]], [7 / 12, (5 / 6 + 1 / 2 + 1) / 3, 1, 2 / 3])
    assert list(records.evaluation_metrics(graded("4", "5", "4"), 3, "last_number"))[4:] == [
        "eval/pass@1", "eval/pass@2", "eval/pass@3", "eval/maj@3"]
    assert list(records.evaluation_metrics(rows, 1, "last_number")) == list(metrics)[:4]

def test_an_evaluation_has_its_own_temperature_and_0_is_greedy():
    policy = random_policy()
    args = settings("--prompt question_only --eval-temperature 0 --max-tokens 6 --min-tokens 0")
    sampler = make_sampler(policy, args)
    held_out = [ng.Example("q", "1", None, prompt) for prompt in PROMPTS[:3]]
    _, rows = ng.evaluate(sampler, held_out, ng.rewards.question_only_reward_fn, 0, args)
    for row in rows:
        for i, token in enumerate(row.response_ids):
            ids = ng.torch.tensor([row.example.prompt_ids + row.response_ids[:i]])
            assert policy(ids).logits[0, -1].argmax() == token
    assert sampler.temperature == 1.0  # of training, as before
    args = settings("--prompt question_only --eval-samples 3 --eval-temperature 0.5 --max-tokens 6")
    _, rows = ng.evaluate(sampler, held_out, ng.rewards.question_only_reward_fn, 0, args)
    assert [row.example for row in rows] == [example for example in held_out for _ in range(3)]
    close(rows[1].sampler_log_probs,
          ng.response_log_probs(policy, rows[1:2], 0.5)[0][0][:len(rows[1].response_ids)], 1e-5)

@pytest.mark.parametrize("argv", [
    "--eval-samples 4 --eval-temperature 0", "--eval-samples 2 --thinking-budget 8"])
def test_answers_that_would_be_equal_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        settings(argv)
    assert "--eval-samples" in capsys.readouterr().err
