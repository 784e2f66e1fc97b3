"""The task: what it shows, what it rewards, and what can be scored without reading the prompt."""

import itertools
from fractions import Fraction

import pytest
import torch

from glm5next_plugin.bringup.task import SymbolClassTask
from glm5next_plugin.errors import InputError
from glm5next_plugin.recipes.variants import demo, tiny

TASK = SymbolClassTask(vocab_size=64, prompt_length=28)


def test_the_same_seed_gives_the_same_prompts_and_another_step_others():
    first, again, later = TASK.prompts(16, 0, 1), TASK.prompts(16, 0, 1), TASK.prompts(16, 0, 2)
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.keys, again.keys)
    assert not torch.equal(first.tokens, later.tokens)
    assert not torch.equal(first.tokens, TASK.prompts(16, 1, 1).tokens)


def test_every_class_is_the_key_equally_often():
    assert torch.equal(TASK.prompts(16, 3, 7).keys.bincount(), torch.tensor([4, 4, 4, 4]))
    with pytest.raises(ValueError, match="15 prompts; needed: a multiple of 4"):
        TASK.prompts(15, 0, 0)


def test_half_of_a_prompt_is_its_key_symbol_and_no_other_key_symbol_is_in_it():
    prompts = TASK.prompts(16, 0, 1)
    for tokens, key in zip(prompts.tokens, prompts.keys, strict=True):
        assert tokens[tokens < 4].tolist() == [key] * 14
    assert prompts.tokens.max() < 64


def test_the_reward_is_the_share_of_tokens_in_the_keys_class():
    answers = torch.tensor([[2, 6, 62, 10], [2, 6, 3, 0], [1, 3, 0, 5]])
    assert TASK.reward(answers, torch.tensor([2, 2, 2])).tolist() == [1.0, 0.5, 0.0]


def test_the_reward_depends_on_the_prompt():
    answer = torch.tensor([[1, 5, 9, 13]])
    assert [TASK.reward(answer, torch.tensor([key])).item() for key in range(4)] == [0.0, 1.0, 0.0, 0.0]


def test_no_answer_scores_more_than_a_quarter_on_average_over_the_prompts():
    """All 4096 answers over 8 symbols. A policy that ignores the prompt is a mixture of them."""
    task = SymbolClassTask(vocab_size=8, prompt_length=28)
    keys = task.prompts(16, 0, 1).keys
    scores = []
    for answer in itertools.product(range(8), repeat=task.answer_length):
        answers = torch.tensor(answer).expand(len(keys), -1)
        scores.append(Fraction(task.reward(answers, keys).sum().item()) / len(keys))
    assert max(scores) == task.best_score_without_prompt() == Fraction(1, 4)
    assert task.best_score_without_prompt() <= Fraction(6, 10)


@pytest.mark.parametrize("architecture", [demo(), tiny(), tiny(index_kpool=16, index_topk=32)])
def test_every_answered_token_chooses_among_more_pools_than_it_may_select(architecture):
    task = SymbolClassTask.for_architecture(architecture)
    assert task.prompt_length // architecture.index_kpool > architecture.index_topk // architecture.index_kpool
    assert task.prompt_length > architecture.index_topk + architecture.index_kpool - 1
    assert (task.prompt_length + task.answer_length) % 8 == 0


def test_a_vocabulary_too_small_for_keys_and_noise_is_refused():
    with pytest.raises(InputError, match="the vocabulary has 7 tokens; the task needs at least 8"):
        SymbolClassTask(vocab_size=7, prompt_length=28)
