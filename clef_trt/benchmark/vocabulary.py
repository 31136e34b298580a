"""A tokenizer for releases of random weights, trained in a moment on the texts that the benchmark sends.

Its token counts are close to those of the published vocabulary, which would be a download: common words are one token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ..encode import OPTIONS_OPENING, PREFIX, SCHEMA_OPENING, SUFFIX
from .workload import mix, words

TOKENS = 4096  # without the control tokens


def trained_tokenizer(control_tokens: tuple[str, ...], split: str) -> Tokenizer:
    """Byte-level BPE with the published normaliser and the pattern `split`; ids of control tokens follow its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_tokens(
        [AddedToken(token, special=token.startswith("<|"), normalized=False) for token in control_tokens]
    )
    return tokenizer


def _texts() -> Iterator[str]:
    yield from (PREFIX, SCHEMA_OPENING, OPTIONS_OPENING, SUFFIX, "\nEND FIELD\n")
    yield from (f"\nFIELD {number}\nID: q{number}\nTYPE: choice noul score\nINSTRUCTION: " for number in range(65))
    yield from (f"OPTION {number}: " for number in range(256))
    yield from ('{"option_id":"a","description":"b"}', " ".join(words()))
    for request in mix():
        yield from _values(request)


def _values(value: Any) -> Iterator[str]:
    """Every text within a JSON value, keys included, as prose and within quotes."""
    if isinstance(value, str):
        yield from (value, json.dumps(value, ensure_ascii=False))
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from (f'"{key}":', f'{{"{key}":', f',"{key}":')
            yield from _values(part)
    elif isinstance(value, list):
        for part in value:
            yield from _values(part)
