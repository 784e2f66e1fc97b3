"""Answers of a layout's ranks put together, and how near they are to those of one process."""

from __future__ import annotations

from typing import Any

import torch


def assembled(answers: list[dict[str, Any]]) -> dict[int, torch.Tensor]:
    """Logits ``[b, s, vocab]`` of every micro-batch, from the ranks that hold pieces of them."""
    whole: dict[int, torch.Tensor] = {}
    pieces = [(i, answer["places"][i], rows) for answer in answers for i, rows in answer["logits"].items()]
    for index in {i for i, _, _ in pieces}:
        mine = [(places, rows) for i, places, rows in pieces if i == index]
        length = 1 + max(int(places.max()) for places, _ in mine)
        batch, _, vocab = mine[0][1].shape
        whole[index] = torch.full((batch, length, vocab), float("nan"))
        for places, rows in mine:
            whole[index][:, places] = rows
    return whole


def require_equal_logits(answers, one_process) -> None:
    """Bit for bit."""
    found, expected = assembled(answers), assembled([one_process])
    assert found.keys() == expected.keys() and found
    for index in expected:
        assert torch.equal(found[index], expected[index]), (found[index] - expected[index]).abs().max()


def require_close_logits(
    answers, one_process, limit: float = 5e-5, real: dict[int, torch.Tensor] | None = None
) -> None:
    """``max|a - b| / max|b|`` of every micro-batch; ``real`` gives the places to compare, where not all."""
    found, expected = assembled(answers), assembled([one_process])
    assert found.keys() == expected.keys() and found
    for index, logits in expected.items():
        mine = found[index] if real is None else found[index][:, real[index]]
        assert mine.shape == logits.shape
        error = (mine - logits).abs().max() / logits.abs().max()
        assert error <= limit, (index, float(error))


def require_close_gradients(answers, one_process, limit: float = 1e-4) -> None:
    """Relative norm of every gradient's error, and of the whole norm's."""
    found, expected = answers[0]["gradients"], one_process["gradients"]
    assert found.keys() == expected.keys()
    errors = {
        name: ((found[name] - gradient).norm() / gradient.norm().clamp(min=1e-20)).item()
        for name, gradient in expected.items()
    }
    worst = max(errors, key=errors.get)
    assert errors[worst] <= limit, (worst, errors[worst])
    for answer in answers:
        assert abs(answer["grad_norm"] / one_process["grad_norm"] - 1) <= 1e-5
