"""The rollout engine: transformers in its own process, against the reference in this one."""

import pytest
import torch

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.bringup.probe import parts
from glm5next_plugin.bringup.process import Worker
from glm5next_plugin.bringup.weights import digest, unequal_tensors
from glm5next_plugin.checkpoint.inventory import expected_tensors
from glm5next_plugin.checkpoint.synthetic import make_checkpoint
from glm5next_plugin.errors import InputError

from ..checkpoint.editing import edited, stored_tensors
from ..hf_oracle import modeling

PROMPTS, SAMPLES, ANSWER = 4, 2, 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "checkpoint", "demo", seed=1, vision=True, mtp=True)


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    log = tmp_path_factory.mktemp("engine") / "log"
    worker = Worker("the engine", "tests.bringup.inspected_engine:InspectedEngine", dict(dtype="fp32"), log)
    worker.result(120)
    yield worker
    worker.close()


@pytest.fixture
def engine(process, checkpoint):
    process.call("load", checkpoint, timeout=60)
    return process


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(0, 64, (PROMPTS, 28), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def samples(engine, prompts):
    return engine.call("sample", prompts, SAMPLES, ANSWER, 5, timeout=60)


def test_it_holds_every_text_tensor_of_the_inventory_with_the_values_of_the_file(engine, checkpoint):
    held = engine.call("load", checkpoint, timeout=60)
    text = expected_tensors(Architecture.from_pretrained(checkpoint), vision=False, mtp=False)
    stored = {name: digest(tensor) for name, tensor in stored_tensors(checkpoint).items() if name in text}
    assert stored.keys() == text.keys()
    assert unequal_tensors(stored, held) == []


def test_log_probabilities_are_those_of_a_forward_pass_over_prompt_and_answer(samples, checkpoint, prompts):
    model = modeling().Glm5NextForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.cat([prompts.repeat_interleave(SAMPLES, dim=0), samples.answers], dim=1)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[:, -ANSWER - 1 : -1]
    expected = logits.double().softmax(-1).gather(-1, samples.answers.unsqueeze(-1)).squeeze(-1).log()
    assert samples.log_probs.dtype == torch.float32
    torch.testing.assert_close(samples.log_probs.double(), expected, atol=1e-5, rtol=0)


def test_the_same_seed_samples_the_same_and_another_seed_does_not(engine, samples, prompts):
    again = engine.call("sample", prompts, SAMPLES, ANSWER, 5, timeout=60)
    other = engine.call("sample", prompts, SAMPLES, ANSWER, 6, timeout=60)
    assert torch.equal(again.answers, samples.answers) and torch.equal(again.log_probs, samples.log_probs)
    assert not torch.equal(other.answers, samples.answers)


def test_samples_of_a_prompt_differ_and_come_after_one_another(samples):
    assert samples.answers.shape == (PROMPTS * SAMPLES, ANSWER)
    assert not torch.equal(samples.answers[0], samples.answers[1])


def test_tokens_are_drawn_from_the_distribution(engine, samples, prompts):
    """2048 draws of the first token: the mean of -log p is the entropy, to within five standard errors."""
    drawn = engine.call("sample", prompts[:1], 2048, 1, 7, timeout=60)
    surprise = -drawn.log_probs
    by_token = {int(token): -value for token, value in zip(drawn.answers, drawn.log_probs, strict=True)}
    probabilities = torch.tensor([-value for value in by_token.values()]).exp()
    assert probabilities.sum() > 0.99
    entropy = -(probabilities * probabilities.log()).sum()
    assert abs(surprise.mean() - entropy) < 5 * surprise.std() / 2048**0.5 + 0.02


def test_it_records_every_part_of_the_model(engine, samples, checkpoint, prompts):
    recorded = engine.call("probe", prompts, timeout=60)
    assert recorded.keys() == {part.name for part in parts(Architecture.from_pretrained(checkpoint))}
    assert all(value.shape[:2] == prompts.shape for value in recorded.values())
    # 16 keys in 4 selected pools, and the tail of at most 3
    assert recorded["layers.3.indexer"].sum(-1)[0].tolist() == [
        min(i + 1, 16 + (i + 1) % 4) for i in range(prompts.shape[1])
    ]
    assert (recorded["layers.1.router"].sum(-1) == Architecture.from_pretrained(checkpoint).num_experts_per_tok).all()


def test_it_shares_no_code_with_the_trainer(engine):
    modules = engine.call("modules", timeout=60)
    shared = [name for name in modules if name.startswith(("megatron", "glm5next_plugin"))]
    assert [name for name in shared if not name.startswith(("glm5next_plugin.bringup", "glm5next_plugin.health"))] == [
        "glm5next_plugin",
        "glm5next_plugin.architecture",
        "glm5next_plugin.errors",
        "glm5next_plugin.json_text",
    ]
    assert "glm5next_plugin.bringup.grpo" not in modules


def test_a_checkpoint_without_one_of_its_tensors_is_refused(engine, checkpoint, tmp_path):
    name = "model.language_model.layers.2.self_attn.o_proj.weight"
    with pytest.raises(InputError, match=f"misses 1 tensors, such as {name}"):
        engine.call("load", edited(checkpoint, tmp_path / "without", lambda tensors: tensors.pop(name)), timeout=60)


def test_nan_in_the_weights_shows_as_nan_log_probabilities(engine, checkpoint, prompts, tmp_path):
    broken = edited(checkpoint, tmp_path / "nan", lambda tensors: tensors["lm_head.weight"].fill_(float("nan")))
    engine.call("load", broken, timeout=60)
    found = engine.call("sample", prompts, SAMPLES, ANSWER, 5, timeout=60)
    assert found.log_probs.isnan().all()
    assert (found.answers == 0).all()
