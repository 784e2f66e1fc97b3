"""The rollout engine: the glm5_next model of transformers, in a process of its own.

It shares no code with the trainer: neither the operators nor the checkpoint reader nor the name table. What it loads is
a released checkpoint through ``from_pretrained``.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch

from glm5next_plugin.errors import InputError

from .engine_weights import released_tensors
from .weights import VISION_PREFIX, digest

_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Samples:
    """What the engine sampled.

    Attributes:
        answers: int64 ``[prompts * samples_per_prompt, answer_length]``, the samples of a prompt after one another.
        log_probs: fp32, the same shape: log-probability of each token at temperature 1.
    """

    answers: torch.Tensor
    log_probs: torch.Tensor


class HfEngine:
    """Runs in a :class:`.process.Worker`; samples with the weights of the last :meth:`load`.

    Args:
        dtype: ``"fp32"`` or ``"bf16"``; transformers keeps in fp32 what it always keeps so.
    """

    def __init__(self, dtype: str):
        # transformers binds fla's kernels when the model's module is imported, and they need a GPU
        sys.modules["fla"] = None
        from transformers import Glm5NextForConditionalGeneration

        self._model_class = Glm5NextForConditionalGeneration
        self._dtype = _TORCH_DTYPES[dtype]
        self._model: Any = None

    def load(self, directory: Path) -> dict[str, str]:
        """Replace the model by the checkpoint in ``directory``.

        Returns:
            released name to digest of every tensor that the model then holds.

        Raises:
            InputError: the checkpoint lacks tensors of the text model; vision may be absent as a whole.
        """
        model, report = self._model_class.from_pretrained(
            directory, dtype=self._dtype, attn_implementation="eager", local_files_only=True, output_loading_info=True
        )
        absent = sorted(name for name in report["missing_keys"] if not name.startswith(VISION_PREFIX))
        if absent:
            raise InputError(f"{directory}: the rollout engine misses {len(absent)} tensors, such as {absent[0]}")
        self._model = model.eval()
        return {name: digest(tensor) for name, tensor in released_tensors(model.state_dict())}

    @torch.inference_mode()
    def sample(self, prompts: torch.Tensor, samples_per_prompt: int, answer_length: int, seed: int) -> Samples:
        """Sample answers token by token at temperature 1 from the whole vocabulary.

        A row whose logits are not all finite has no distribution: it takes token 0 with a log-probability of NaN, which
        the metrics count.

        Args:
            prompts: int64 ``[prompts, prompt_length]``.
            samples_per_prompt: answers of each prompt.
            answer_length: tokens of an answer; there is no stop token.
            seed: of the random draws.
        """
        generator = torch.Generator().manual_seed(seed)
        output = self._model(input_ids=prompts, use_cache=True)
        cache = output.past_key_values
        owner = torch.arange(prompts.shape[0]).repeat_interleave(samples_per_prompt)
        cache.reorder_cache(owner)  # one prefill a prompt; every sample gets its copy of the state
        logits = output.logits[owner, -1].float()
        answers, log_probs = [], []
        for position in range(answer_length):
            if position:
                logits = self._model(input_ids=answers[-1], past_key_values=cache, use_cache=True).logits[:, -1].float()
            distribution = logits.log_softmax(dim=-1)
            broken = ~distribution.isfinite().all(dim=-1, keepdim=True)
            draws = torch.multinomial(torch.where(broken, 1.0, distribution.exp()), 1, generator=generator)
            answers.append(draws.masked_fill(broken, 0))
            log_probs.append(distribution.gather(1, answers[-1]).masked_fill(broken, float("nan")))
        return Samples(torch.cat(answers, dim=1), torch.cat(log_probs, dim=1))

    def probe(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Intermediate results for ``tokens`` ``[n, s]``; names as in :mod:`.probe`."""
        from .engine_probe import record

        return record(self._model, tokens)
