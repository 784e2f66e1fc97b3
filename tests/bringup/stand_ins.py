"""A trainer and an engine that need no framework: their model is one column of ``lm_head.weight``.

The policy is ``softmax(weight)``, whatever the prompt. They let the tests of the loop run in seconds. The functions
below are ``worker_setup`` callables that break one side.
"""

import os
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.bringup.engine import Samples
from glm5next_plugin.bringup.probe import parts
from glm5next_plugin.bringup.trainer import UpdateFigures
from glm5next_plugin.bringup.weights import digest

NAME = "lm_head.weight"


def read(directory):
    (shard,) = Path(directory).glob("*.safetensors")
    return load_file(shard)[NAME].float()


def log_probs_of(weight, answers):
    return weight[:, 0].log_softmax(0)[answers]


def recorded(architecture, tokens):
    return {part.name: torch.ones(*tokens.shape, 4) for part in parts(architecture)}


class StandInEngine:
    def __init__(self, dtype):
        self.architecture = None

    def load(self, directory):
        if self.architecture is None:
            self.architecture = Architecture.from_pretrained(directory)
        self.weight = read(directory)
        return {NAME: digest(self.weight)}

    def sample(self, prompts, samples_per_prompt, answer_length, seed):
        generator = torch.Generator().manual_seed(seed)
        shape = (len(prompts) * samples_per_prompt, answer_length)
        distribution = self.weight[:, 0].softmax(0)
        answers = torch.multinomial(distribution, shape[0] * shape[1], True, generator=generator).view(shape)
        return Samples(answers, log_probs_of(self.weight, answers))

    def probe(self, tokens):
        return recorded(self.architecture, tokens)


class StandInTrainer:
    def __init__(self, settings, rank, store):
        self.settings = settings
        self.rank = rank
        self.architecture = Architecture.from_pretrained(settings.checkpoint)
        self.weight = read(settings.checkpoint)

    def weights(self):
        return {NAME: digest(self.weight)} if self.rank == 0 else None

    def log_probs(self, tokens, answer_length):
        return log_probs_of(self.weight, tokens[:, -answer_length:]) if self.rank == 0 else None

    def update(self, minibatch):
        before = log_probs_of(self.weight, minibatch.tokens[:, -minibatch.old.shape[1] :])
        self.weight = self.weight + self.settings.learning_rate * self.weight.roll(1, 0)
        kl = (minibatch.old - before)[minibatch.mask].mean().item()
        return UpdateFigures(grad_norm=0.5, kl=kl) if self.rank == 0 else None

    def export(self, directory):
        if self.rank:
            return None
        directory.mkdir(parents=True)
        save_file({NAME: self.weight}, directory / "model.safetensors")
        return {NAME: digest(self.weight)}

    def probe(self, tokens):
        return recorded(self.architecture, tokens)


def nan_for_one_token(target):
    """The trainer's log-probability of one token is NaN."""
    right = StandInTrainer.log_probs

    def wrong(self, tokens, answer_length):
        found = right(self, tokens, answer_length)
        found[3, 2] = float("nan")
        return found

    StandInTrainer.log_probs = wrong


def temperature_half(target):
    """The trainer takes log-probabilities at another temperature."""
    StandInTrainer.log_probs = lambda self, tokens, length: log_probs_of(2 * self.weight, tokens[:, -length:])


def one_part_differs(target):
    """As above, and what layer 2's MLP computes differs as well, from there on."""
    temperature_half(target)
    right = StandInTrainer.probe

    def wrong(self, tokens):
        found = right(self, tokens)
        names = list(found)
        return found | {name: 1.1 * found[name] for name in names[names.index("layers.2.mlp") :]}

    StandInTrainer.probe = wrong


def engine_keeps_old_weights(target):
    """The second load of the engine does nothing."""
    right = StandInEngine.load

    def wrong(self, directory):
        return right(self, directory) if self.architecture is None else {NAME: digest(self.weight)}

    StandInEngine.load = wrong


def import_rounds(target):
    """The trainer holds rounded weights."""
    right = StandInTrainer.__init__

    def wrong(self, **arguments):
        right(self, **arguments)
        self.weight = self.weight.half().float() + 1e-3

    StandInTrainer.__init__ = wrong


def engine_dies(target):
    """The engine is killed in the second rollout."""
    right, calls = StandInEngine.sample, []

    def wrong(self, *args):
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return right(self, *args)

    StandInEngine.sample = wrong


def trainer_refuses_to_export(target):
    """An export fails as a writer fails that is given a tensor of the wrong dtype."""
    from glm5next_plugin.errors import InputError

    def wrong(self, directory):
        raise InputError("A_log came as bfloat16; needed: float32")

    StandInTrainer.export = wrong
