"""Text of tokens for the sample viewer (rlpipe.lineage.token_rows)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpipe.data.tokenizer import load_tokenizer
from rlpipe.errors import ConfigError
from rlpipe.lineage.token_rows import decoder, prompt_text

MODEL = Path(__file__).parents[1] / "stores" / "model"


def test_a_decoder_gives_the_text_of_the_models_tokenizer():
    tokenizer = load_tokenizer(str(MODEL))
    ids = [*tokenizer.encode("spell word backward"), tokenizer.eos_token_id]
    expected = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    assert [decoder(str(MODEL))([token]) for token in ids] == expected


def test_a_directory_without_a_readable_tokenizer_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="no tokenizer that can be loaded"):
        decoder(str(tmp_path))


def test_messages_are_lines_with_their_role():
    assert prompt_text('[{"role": "user", "content": "1 + 1"}]') == "user: 1 + 1"
    assert prompt_text('"plain"') == "plain"
