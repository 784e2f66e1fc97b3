"""The task of the bring-up: continue with symbols of the class that the prompt shows.

Token ``t`` belongs to class ``t % 4``. A prompt shows one of four key symbols, one a class, at half of its positions in
random order, amid symbols that say nothing. The answer is a few tokens; the reward is the share of them that belong to
the key's class. So every answer can be checked, an untrained model scores 1/4, and each token of each answer teaches
something: a random model learns it in a few dozen updates.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import torch

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.errors import InputError

from .seeds import stream_seed

CLASSES = 4
ANSWER_TOKENS = 4
# a whole number of tokens for every tensor parallel rank
_LENGTH_MULTIPLE = 8


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A batch of prompts.

    Attributes:
        tokens: int64 ``[prompts, prompt_length]``.
        keys: int64 ``[prompts]``, class of each prompt's key symbol; every class equally often.
    """

    tokens: torch.Tensor
    keys: torch.Tensor


@dataclasses.dataclass(frozen=True)
class SymbolClassTask:
    """Prompts and rewards.

    Attributes:
        vocab_size: symbols are all token ids below it.
        prompt_length: tokens of a prompt.
        answer_length: tokens of an answer.
    """

    vocab_size: int
    prompt_length: int
    answer_length: int = ANSWER_TOKENS

    def __post_init__(self):
        if self.vocab_size < 2 * CLASSES:
            raise InputError(f"the vocabulary has {self.vocab_size} tokens; the task needs at least {2 * CLASSES}")

    @classmethod
    def for_architecture(cls, architecture: Architecture) -> SymbolClassTask:
        """Prompts long enough that the sparse attention has to choose among pools at every answered token.

        A query attends to all keys while at most ``selection_width`` are visible; the prompt is at least a pool longer.
        """
        least = architecture.selection_width + architecture.index_kpool + ANSWER_TOKENS
        total = -(-least // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        return cls(architecture.vocab_size, total - ANSWER_TOKENS)

    @property
    def key_symbols(self) -> range:
        """The key symbol of class 0, 1, 2, 3."""
        return range(CLASSES)

    def prompts(self, count: int, seed: int, step: int) -> Prompts:
        """The prompts of a step, the same for the same seed.

        Args:
            count: a multiple of the number of classes, so that every class is the key equally often.

        Raises:
            ValueError: another count.
        """
        if count % CLASSES:
            raise ValueError(f"{count} prompts; needed: a multiple of {CLASSES}, as many of each class")
        generator = torch.Generator().manual_seed(stream_seed(seed, step, "prompts"))
        keys = torch.randperm(count, generator=generator) % CLASSES
        shape = (count, self.prompt_length)
        noise = torch.randint(CLASSES, self.vocab_size, shape, generator=generator)
        order = torch.rand(shape, generator=generator).argsort(dim=1)
        shown = order < self.prompt_length // 2
        return Prompts(torch.where(shown, keys.unsqueeze(1), noise), keys)

    def reward(self, answers: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Share of right tokens, fp32 ``[samples]``.

        Args:
            answers: int64 ``[samples, answer_length]``.
            keys: int64 ``[samples]``, class of each sample's prompt.
        """
        return (answers % CLASSES == keys.unsqueeze(1)).float().mean(dim=1)

    @staticmethod
    def best_score_without_prompt() -> Fraction:
        """The most that a policy can score on average when its answers do not depend on the prompt.

        Such a policy has one distribution over answers. A token of class c is right for the prompts whose key is of
        class c: a quarter of them, whatever c is. So every such policy scores exactly this.
        """
        return Fraction(1, CLASSES)
