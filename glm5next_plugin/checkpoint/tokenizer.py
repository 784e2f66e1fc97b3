"""A tokenizer of one token a character, for synthetic checkpoints; AutoTokenizer loads it without a network."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.recipes.variants import special_token_ids

_UNKNOWN = "\ufffd"
_MOST_CHARACTERS = 4096


def write_tokenizer(directory: Path, architecture: Architecture) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json.

    Id 0 stands for characters without a token; printable characters follow, letters and digits first; the special
    tokens have the ids of :func:`special_token_ids`. Decoding gives back what was encoded, character by character.
    """
    special = special_token_ids(architecture.vocab_size)
    room = min(min(special.values()), _MOST_CHARACTERS)
    characters = itertools.islice(_characters(), room - 1)
    vocabulary = {_UNKNOWN: 0} | {character: i for i, character in enumerate(characters, 1)}
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, number in special.items()
    ]
    end = "<|endoftext|>"
    stops = [special[token] for token in (end, "<|user|>", "<|observation|>")]
    _write(
        directory / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocabulary | special, "unk_token": _UNKNOWN},
        },
    )
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": architecture.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "eos_token": end,
            "pad_token": end,
            "unk_token": _UNKNOWN,
        },
    )
    _write(
        directory / "generation_config.json",
        {"eos_token_id": stops, "pad_token_id": special[end], "do_sample": True, "temperature": 1.0},
    )


def _characters() -> Iterator[str]:
    printable = (chr(code) for code in range(0x20, 0xD800) if chr(code).isprintable() and chr(code) != _UNKNOWN)
    ascii_first = list(itertools.islice(printable, 95))
    yield from sorted(ascii_first, key=lambda character: (not character.isalnum(), character))
    yield "\n"
    yield from printable


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
