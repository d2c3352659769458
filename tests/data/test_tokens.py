"""Encoding of prompts and supervised rows."""

import json
import subprocess
import sys
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlpipe.config.data import DataConfig, FilePrompts
from rlpipe.config.rollout import RolloutConfig
from rlpipe.data.prompts import PromptRow
from rlpipe.data.tokenizer import CLASSES, MODEL_TYPES, load_tokenizer
from rlpipe.data.tokens import encode_prompt, encode_supervised, render
from rlpipe.errors import ConfigError, DataError

FILE = FilePrompts(type="file", paths=("x.jsonl",))
CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "what is 1 + 2?"},
    {"role": "assistant", "content": "it is 3"},
    {"role": "user", "content": "what is 2 + 2?"},
    {"role": "assistant", "content": "it is 4"},
]


def data(**keys):
    return DataConfig(prompts=FILE, **keys)


def rollout(**keys):
    return RolloutConfig(rollout_batch_size=1, **keys)


def row(prompt, label=None):
    return PromptRow(prompt, label, where="x.jsonl:7")


def trained(tokenizer, encoded):
    """Return the text of each run of trained tokens."""
    runs = []
    run = []
    for token, mask in [*zip(encoded.response_ids, encoded.loss_mask, strict=True), (0, 0)]:
        if mask:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


def test_a_plain_prompt_is_tokenized_without_special_tokens(characters, chat):
    encoded = encode_prompt(characters, row("Spell: word"), data(), rollout())
    assert len(encoded.prompt_ids) == 5
    assert characters.decode(encoded.prompt_ids) == encoded.prompt == "Spell: word"
    assert encoded.response_ids == encoded.loss_mask == ()
    assert (
        chat.decode(encode_prompt(chat, row("what is"), data(), rollout()).prompt_ids) == "what is"
    )


def test_a_chat_template_renders_a_string_like_one_message(chat):
    config = data(apply_chat_template=True)
    one = encode_prompt(chat, row("what is 1 + 2?"), config, rollout())
    two = encode_prompt(chat, row([CHAT[1]]), config, rollout())
    assert one == two
    assert one.prompt == "<|im_start|>user\nwhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert chat.decode(one.prompt_ids) == one.prompt


def test_template_variables_reach_the_template(chat):
    template = chat.chat_template
    chat.chat_template = "{{ mood }}{{ messages[0]['content'] }}"
    try:
        assert (
            render(
                chat,
                "hi",
                data(apply_chat_template=True, apply_chat_template_kwargs={"mood": "!"}),
                where="",
            )
            == "!hi"
        )
    finally:
        chat.chat_template = template


def test_a_plain_answer_ends_with_end_of_sequence(characters):
    encoded = encode_supervised(
        characters, row("Spell: word", "drow"), data(), rollout(type="dataset")
    )
    assert characters.decode(encoded.response_ids) == "drow<eos>"
    assert encoded.loss_mask == (1,) * 5
    assert (
        encoded.prompt_ids
        == encode_prompt(characters, row("Spell: word"), data(), rollout()).prompt_ids
    )


def test_the_last_answer_of_a_chat_is_trained_up_to_its_end_of_turn(chat):
    config = data(apply_chat_template=True)
    encoded = encode_supervised(chat, row(CHAT), config, rollout(type="dataset"))
    assert trained(chat, encoded) == ["it is 4<|im_end|>"]
    assert encoded.prompt_ids == encode_prompt(chat, row(CHAT[:4]), config, rollout()).prompt_ids
    assert all(encoded.loss_mask)


def test_all_assistant_trains_all_answers_and_no_other_token(chat):
    config = data(apply_chat_template=True)
    encoded = encode_supervised(
        chat, row(CHAT), config, rollout(type="dataset", loss_mask_type="all_assistant")
    )
    assert trained(chat, encoded) == ["it is 3<|im_end|>", "it is 4<|im_end|>"]
    assert encoded.loss_mask[0] == encoded.loss_mask[-1] == 1
    text = chat.decode(encoded.prompt_ids + encoded.response_ids)
    assert text == render(chat, CHAT, config, where="", add_generation_prompt=False).removesuffix(
        "\n"
    )


def test_a_label_is_an_additional_assistant_message(chat):
    config = data(apply_chat_template=True)
    encoded = encode_supervised(chat, row(CHAT[:4], "it is 4"), config, rollout(type="dataset"))
    assert encoded == encode_supervised(chat, row(CHAT), config, rollout(type="dataset"))


def test_step_loss_mask_excludes_a_message(chat):
    config = data(apply_chat_template=True)
    every = rollout(type="dataset", loss_mask_type="all_assistant")
    chat_messages = [*CHAT[:2], {**CHAT[2], "step_loss_mask": 0}, *CHAT[3:]]
    assert trained(chat, encode_supervised(chat, row(chat_messages), config, every)) == [
        "it is 4<|im_end|>"
    ]
    chat_messages = [*CHAT[:4], {**CHAT[4], "step_loss_mask": 0}]
    encoded = encode_supervised(chat, row(chat_messages), config, every)
    assert trained(chat, encoded) == ["it is 3<|im_end|>"]
    assert len(encoded.prompt) == 3


@pytest.mark.parametrize(
    ("prompt", "label", "keys", "message"),
    [
        (CHAT[:2], None, {}, "the row has no trained message"),
        ([{**CHAT[2], "step_loss_mask": 0}], None, {}, "the row has no trained message"),
        ([{**CHAT[2], "step_loss_mask": 2}], None, {}, "step_loss_mask is not 0 or 1"),
        (CHAT, None, {"rollout_max_response_len": 3}, "the answer is too long"),
        (CHAT, None, {"rollout_max_context_len": 20}, "the prompt is too long"),
    ],
)
def test_a_chat_row_that_cannot_be_trained_is_named(chat, prompt, label, keys, message):
    with pytest.raises(DataError, match=f"x.jsonl:7: {message}"):
        encode_supervised(
            chat,
            row(prompt, label),
            data(apply_chat_template=True),
            rollout(type="dataset", **keys),
        )


def test_a_template_that_rewrites_history_is_refused(chat):
    template = chat.chat_template
    chat.chat_template = template.replace(
        "{{ m['content'] }}",
        "{{ m['content'] if loop.last or m['role'] != 'assistant' else 'earlier' }}",
    )
    config = data(apply_chat_template=True)
    try:
        encode_supervised(chat, row(CHAT[:3]), config, rollout(type="dataset"))
        with pytest.raises(DataError, match="rewrites earlier messages"):
            encode_supervised(
                chat, row(CHAT), config, rollout(type="dataset", loss_mask_type="all_assistant")
            )
    finally:
        chat.chat_template = template


def test_a_template_that_raises_names_the_row(chat):
    template = chat.chat_template
    chat.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(
            DataError, match=r"x.jsonl:7: the chat template refuses[\s\S]*roles must alternate"
        ):
            encode_prompt(chat, row("hi"), data(apply_chat_template=True), rollout())
    finally:
        chat.chat_template = template


def test_a_supervised_row_without_label_is_named(characters):
    with pytest.raises(DataError, match=r"x.jsonl:7: a supervised row needs an answer"):
        encode_supervised(characters, row("Spell: word"), data(), rollout(type="dataset"))


def test_messages_without_a_chat_template_are_refused(characters):
    with pytest.raises(DataError, match=r"x.jsonl:7[\s\S]*data.apply_chat_template=true"):
        encode_prompt(characters, row(CHAT), data(), rollout())
    with pytest.raises(ConfigError, match="no chat template"):
        encode_prompt(characters, row(CHAT), data(apply_chat_template=True), rollout())


@pytest.mark.parametrize("key", ["custom_generate_function_path", "rollout_function_path"])
def test_a_user_function_gets_messages_without_a_chat_template(characters, key):
    """As in slime, whose strands example says not to set --apply-chat-template."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "image"}]}]
    sampled = rollout(**{key: "mine.py:generate"}, rollout_max_context_len=4)
    for messages, text in ((CHAT[:2], "be short\nwhat is 1 + 2?"), (parts, "what\n")):
        encoded = encode_prompt(characters, row(messages), data(), sampled)
        assert encoded.prompt == messages and encoded.overlong is None
        assert characters.decode(encoded.prompt_ids) == text
    with pytest.raises(DataError, match="too long"):
        encode_prompt(characters, row("a text of the same length"), data(), sampled)


def test_a_prompt_that_is_too_long_is_named(characters):
    encode_prompt(
        characters,
        row("Spell: word"),
        data(rollout_max_prompt_len=5),
        rollout(rollout_max_context_len=6),
    )
    with pytest.raises(
        DataError, match=r"x.jsonl:7: the prompt is too long[\s\S]*5 tokens[\s\S]*at most 4"
    ):
        encode_prompt(characters, row("Spell: word"), data(rollout_max_prompt_len=4), rollout())
    with pytest.raises(DataError, match=r"rollout_max_context_len"):
        encode_prompt(characters, row("Spell: word"), data(), rollout(rollout_max_context_len=5))


def test_a_prompt_without_tokens_is_named(chat):
    template = chat.chat_template
    chat.chat_template = "{{ '' }}"
    try:
        with pytest.raises(DataError, match=r"x.jsonl:7: the prompt has no tokens"):
            encode_prompt(chat, row("hi"), data(apply_chat_template=True), rollout())
    finally:
        chat.chat_template = template


def test_a_saved_tokenizer_is_loaded_and_a_missing_one_is_named(characters, tmp_path):
    characters.save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(str(tmp_path / "model"))
    assert loaded.encode("Spell: word") == characters.encode("Spell: word")
    assert loaded.eos_token_id == characters.eos_token_id
    with pytest.raises(ConfigError, match="no such model directory"):
        load_tokenizer(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no tokenizer that can be loaded"):
        load_tokenizer(str(tmp_path / "empty"))


def test_a_tokenizer_without_end_of_sequence_is_refused(characters):
    eos = characters.eos_token
    characters.eos_token = None
    try:
        with pytest.raises(ConfigError, match="no end-of-sequence token"):
            encode_supervised(
                characters, row("Spell: word", "drow"), data(), rollout(type="dataset")
            )
    finally:
        characters.eos_token = eos


def test_a_cut_prompt_keeps_its_last_tokens_and_its_original_length(characters):
    short = data(rollout_max_prompt_len=3, overlong_prompts="truncate_left")
    encoded = encode_prompt(characters, row("Spell: word"), short, rollout())
    whole = encode_prompt(characters, row("Spell: word"), data(), rollout())
    assert encoded.prompt_ids == whole.prompt_ids[-3:] and encoded.prompt == "ord"
    assert encoded.overlong is not None and whole.overlong is None
    assert (encoded.overlong.tokens, encoded.overlong.limit) == (5, 3)
    fits = encode_prompt(characters, row("Spell: wo"), short, rollout())
    assert fits.overlong is None and fits.prompt == "Spell: wo"


def test_a_chat_prompt_is_cut_at_the_start_of_its_text(chat):
    config = data(
        apply_chat_template=True, rollout_max_prompt_len=6, overlong_prompts="truncate_left"
    )
    encoded = encode_prompt(chat, row("what is 1 + 2?"), config, rollout())
    assert len(encoded.prompt_ids) == 6 and str(encoded.prompt).endswith("<|im_start|>assistant\n")
    assert chat.decode(encoded.prompt_ids) == encoded.prompt


def test_the_smallest_limit_applies_and_includes_the_models_context(characters):
    room = rollout(rollout_max_context_len=5)
    for limit, config, sampling, context in (
        (4, data(rollout_max_prompt_len=4), rollout(), 100),
        (4, data(rollout_max_prompt_len=5), room, 100),
        (4, data(), rollout(), 5),
        (2, data(), room, 3),
    ):
        with pytest.raises(
            DataError, match=rf"x.jsonl:7: the prompt is too long[\s\S]*at most {limit} "
        ):
            encode_prompt(
                characters, row("Spell: word"), config, sampling, model_context_len=context
            )
    with pytest.raises(DataError, match=r"raise rollout\.rollout_max_context_len, or set"):
        encode_prompt(characters, row("Spell: word"), data(), room)
    with pytest.raises(
        DataError,
        match=r"max_position_embeddings[\s\S]*longer context, or set "
        r"data\.overlong_prompts: drop or truncate_left",
    ):
        encode_prompt(characters, row("Spell: word"), data(), rollout(), model_context_len=5)


def test_a_supervised_prompt_is_cut_to_fit_its_answer(characters):
    supervised = rollout(type="dataset", rollout_max_context_len=8)
    whole = encode_supervised(
        characters, row("Spell: word", "drow"), data(), rollout(type="dataset")
    )
    cut = encode_supervised(
        characters, row("Spell: word", "drow"), data(overlong_prompts="truncate_left"), supervised
    )
    assert (cut.response_ids, cut.prompt_ids) == (whole.response_ids, whole.prompt_ids[-3:])
    no_room = rollout(type="dataset", rollout_max_context_len=5)
    with pytest.raises(DataError, match="the answer leaves no room for a prompt"):
        encode_supervised(
            characters, row("Spell: word", "drow"), data(overlong_prompts="truncate_left"), no_room
        )
    long_answer = rollout(type="dataset", rollout_max_response_len=4)
    for policy in ("error", "drop", "truncate_left"):
        with pytest.raises(DataError, match="the answer is too long"):
            encode_supervised(
                characters, row("Spell: word", "drow"), data(overlong_prompts=policy), long_answer
            )


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("tokenizer_class", CLASSES)
def test_a_known_class_is_the_one_that_transformers_chooses(
    tmp_path, chat, tokenizer_class, model_type
):
    directory = of_class(tmp_path, chat, tokenizer_class, model_type)
    chosen: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    loaded: Any = load_tokenizer(directory)
    assert type(loaded) is type(chosen)
    assert loaded.init_kwargs == chosen.init_kwargs
    assert loaded.backend_tokenizer.to_str() == chosen.backend_tokenizer.to_str()
    assert loaded.chat_template == chosen.chat_template


def test_a_known_class_is_loaded_and_used_without_torch(tmp_path, chat):
    directory = of_class(tmp_path, chat, "PreTrainedTokenizerFast", "qwen3")
    program = """
import sys
from rlpipe.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
ids = tokenizer.encode("what is", add_special_tokens=False)
assert tokenizer.decode(ids, skip_special_tokens=False) == "what is"
tokenizer.apply_chat_template([{"role": "user", "content": "what is"}], tokenize=False)
assert "torch" not in sys.modules
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint, GGUFTensor
"""
    subprocess.run([sys.executable, "-c", program, directory], check=True)


def of_class(tmp_path, tokenizer, tokenizer_class, model_type):
    """Return a model directory with the files of a tokenizer, and these names."""
    directory = tmp_path / "model"
    tokenizer.save_pretrained(directory)
    for name, key, value in (
        ("config.json", "model_type", model_type),
        ("tokenizer_config.json", "tokenizer_class", tokenizer_class),
    ):
        path = directory / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, key: value}))
    return str(directory)
