from __future__ import annotations

import logging

import pytest
from port_models import tiny
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# One token a character, and all of printable ASCII but the space, which becomes an underscore.
CHARACTERS = ["<pad>", "<s>", "</s>", *map(chr, range(33, 127))]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _quiet_transformers() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
